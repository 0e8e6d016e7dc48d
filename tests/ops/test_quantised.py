"""Weights in 8-bit integers."""

import io

import pytest
import torch
from helpers.products import with_every_build

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight, _multiply


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 64, 8), (3, 37, 53), (4, 512, 16), (6, 5, 700)])
def test_every_build_multiplies_as_torch_does(M, K, N, threads, monkeypatch):
    monkeypatch.setattr(native, "SHARED", 1 if threads > 1 else 10**9)
    draw = torch.Generator().manual_seed(1)
    weight = QuantisedWeight(torch.randn(K, N, generator=draw))
    x = torch.randn(M, K, generator=draw) * torch.tensor([[1.0], [100.0], [0.0], [1e-30], [-1.0], [3.0]])[:M]
    operands = x, weight.panels, weight.scales, weight.sums
    expected = _multiply(*operands)
    torch.set_num_threads(threads)
    for _ in with_every_build():
        # The integers are the same, and both multiply them by the same two numbers.
        torch.testing.assert_close(native.multiply_integers(*operands), expected, rtol=1e-6, atol=0)
    torch.set_num_threads(1)
    assert torch.equal(weight(x[:1]), weight(x)[:1])


def test_numbers_that_are_not_finite_show():
    x = torch.ones(3, 70)
    x[0, 69], x[2, 3] = float("nan"), float("-inf")
    weight = QuantisedWeight(torch.ones(70, 20))
    operands = x, weight.panels, weight.scales, weight.sums
    for _ in with_every_build():
        for y in (native.multiply_integers(*operands), _multiply(*operands)):
            assert y.isnan().all(dim=1).tolist() == [True, False, True] and y[1].isfinite().all()
    assert QuantisedWeight(torch.full((4, 2), float("nan")))(torch.ones(1, 4)).isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_do_not_saturate(sign):
    """With 127 steps a weight, AVX2 gave 32.4 for 64."""
    weight = QuantisedWeight(torch.full((64, 8), float(sign)))
    for _ in with_every_build():
        torch.testing.assert_close(weight(torch.ones(4, 64)), torch.full((4, 8), 64.0 * sign))


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
