"""Weights in 8-bit integers."""

import os
import subprocess
import sys

import pytest

LARGEST_SUMS = """
import torch
from rhhn_fairseq.ops.quantised import QuantisedWeight

for sign in (1, -1):
    weight = QuantisedWeight(torch.full((64, 8), float(sign)))
    torch.testing.assert_close(weight(torch.ones(4, 64)), torch.full((4, 8), 64.0 * sign))
"""


@pytest.mark.parametrize("instructions", ["avx2", ""])
def test_largest_sums_do_not_saturate(instructions):
    """With 127 steps a weight, AVX2 gave 32.4 for 64. An empty string lets FBGEMM choose."""
    environment = {**os.environ, "FBGEMM_ENABLE_INSTRUCTIONS": instructions}
    subprocess.run([sys.executable, "-c", LARGEST_SUMS], env=environment, check=True)
