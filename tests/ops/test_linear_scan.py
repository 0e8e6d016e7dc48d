"""The linear recurrence: both orders of computing it against a loop, and their derivatives."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rhhn_fairseq.ops.linear_scan import linear_scan, scan_by_doubling, scan_in_order

B, H = 2, 3


def _operands(T, seed=0):
    torch.manual_seed(seed)
    return torch.rand(T, B, H).double(), torch.randn(T, B, H).double(), torch.randn(B, H).double()


@pytest.mark.parametrize("T", [1, 2, 3, 8, 21])
@pytest.mark.parametrize("scan", [scan_in_order, scan_by_doubling, linear_scan])
def test_equals_a_loop(scan, T):
    a, b, h = _operands(T)
    states, expected = scan(a, b, h), h
    for t in range(T):
        expected = a[t] * expected + b[t]
        # Sums of at most 21 terms of order one.
        torch.testing.assert_close(states[t], expected, rtol=0, atol=1e-13)


def test_first_and_second_derivatives():
    operands = [tensor.requires_grad_() for tensor in _operands(5)]
    assert torch.autograd.gradcheck(linear_scan, operands)
    assert torch.autograd.gradgradcheck(linear_scan, operands)


def test_torch_knows_the_operation():
    torch.library.opcheck(torch.ops.rhhn.linear_scan.default, _operands(4))


def test_results_have_the_strides_that_compiled_code_expects():
    """Whatever those of the terms, as of a gradient that is transposed."""
    a, b, h = torch.rand(5, 3, 4), torch.rand(3, 5, 4).transpose(0, 1), torch.rand(3, 4)
    found = [scan(a, b, h).stride() for scan in (scan_in_order, scan_by_doubling)]
    with FakeTensorMode() as mode:
        fake = linear_scan(*map(mode.from_tensor, (a, b, h)))
    assert found == [fake.stride()] * 2
