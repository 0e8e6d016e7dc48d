"""Weights in 8-bit integers."""

import io
import os
import subprocess
import sys

import pytest
import torch

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight

LARGEST_SUMS = """
import torch
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight

for sign in (1, -1):
    weight = QuantisedWeight(torch.full((64, 8), float(sign)))
    torch.testing.assert_close(weight(torch.ones(4, 64)), torch.full((4, 8), 64.0 * sign))
"""


@pytest.mark.parametrize("instructions", ["avx2", ""])
def test_largest_sums_do_not_saturate(instructions):
    """With 127 steps a weight, AVX2 gave 32.4 for 64. An empty string lets FBGEMM choose."""
    environment = {**os.environ, "FBGEMM_ENABLE_INSTRUCTIONS": instructions}
    subprocess.run([sys.executable, "-c", LARGEST_SUMS], env=environment, check=True)


@torch.no_grad()
def test_rows_of_a_weight_are_packed_once():
    torch.manual_seed(0)
    weight, x = torch.randn(12, 8), torch.randn(3, 5)
    quantised = QuantisedWeight(weight)
    piece = quantised[slice(7, None)]
    # Measured: 0.07.
    assert 0 < (piece(x) - x @ weight[7:]).abs().max() < 0.1
    assert quantised[slice(7, 12)] is piece and piece.shape == (5, 8)
    torch.testing.assert_close(piece[slice(1, 3)](x[:, 1:3]), x[:, 1:3] @ weight[8:10], rtol=0, atol=0.1)


def test_a_state_dict_holds_the_integers():
    torch.manual_seed(0)
    first, second = (QuantisedWeight(torch.randn(12, 8)) for _ in range(2))
    x, piece = torch.randn(3, 12), second[slice(7, None)]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(second(x), first(x))
    assert second[slice(7, None)] is not piece
    assert torch.equal(second[slice(7, None)](x[:, 7:]), first[slice(7, None)](x[:, 7:]))
    with pytest.raises(UsageError, match=r"quantised weight of \[9, 8\] in place of \[12, 8\]"):
        second.load_state_dict(QuantisedWeight(torch.randn(9, 8)).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict({})
