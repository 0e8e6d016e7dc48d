"""Scaling by a sum of outer products: against the scaled matrices themselves, and its memory."""

import pytest
import torch
from helpers.fused_cells import RHN_NOISE, assert_equal, make_cell, run_pass

from rhhn_fairseq.ops.highway import products
from rhhn_fairseq.ops.matmul.rank_scaling import rank_scaled, scaling_matrices

B, N, H = 3, 2, 4


def rank_scaled_by_matrices(s_BH, weight_HG, first_BK, hyper_BN, weight_z, bias_z):
    """Computes ``rank_scaled`` with every sequence's matrix in memory, which the paper could not run."""
    scale = scaling_matrices(first_BK, hyper_BN, weight_z, bias_z, s_BH.shape[-1])
    copies = weight_HG.shape[-1] // first_BK.shape[-1]
    return torch.bmm(s_BH.unsqueeze(1), weight_HG * scale.repeat(1, 1, copies)).squeeze(1)


def _operands(d, copies=2, blocks=1, B=B, N=N, H=H, dtype=torch.float64):
    """W has ``copies`` times ``blocks`` blocks of columns, of which a b_i has ``blocks``."""
    torch.manual_seed(0)
    K = blocks * H
    width = (d - 1) * (H + K)
    shapes = (B, H), (H, copies * K), (B, K), (B, N), (N, width), (width,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("copies, blocks", [(1, 1), (2, 1), (4, 1), (1, 4)])
def test_equals_the_scaled_matrices(d, copies, blocks):
    operands = _operands(d, copies, blocks)
    y, expected = rank_scaled(*operands), rank_scaled_by_matrices(*operands)
    # Sums of at most 24 terms of order ten.
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(y)
    found = torch.autograd.grad((y * weights).sum(), operands)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), operands), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_first_and_second_derivatives():
    operands = _operands(3)
    assert torch.autograd.gradcheck(rank_scaled, operands)
    assert torch.autograd.gradgradcheck(rank_scaled, operands)


def _saved_numbers(function, operands) -> int:
    """Numbers that autograd keeps for the backward pass, operands not counted."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in operands}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*operands)
    return sum(kept.values())


def test_nothing_but_the_operands_is_kept():
    operands = _operands(4, B=8, N=8, H=16)
    assert _saved_numbers(rank_scaled, operands) == 0
    assert _saved_numbers(rank_scaled_by_matrices, operands) >= 8 * 16 * 32


@pytest.mark.parametrize("block_rows", [1, 12, 512])
@pytest.mark.parametrize("noise", [{}, RHN_NOISE], ids=["plain", "noisy"])
@pytest.mark.parametrize("backend", ["native", "aten"])
def test_blocks_of_steps_equal_the_loop(block_rows, noise, backend, monkeypatch):
    """Of one step, of two, of which the last is shorter, and of all."""
    monkeypatch.setattr(products, "BLOCK_ROWS", block_rows)
    cell = make_cell("hyperrhn, rank 3", noise)
    T, B = 5, 2
    x = torch.randn(T, B, 4, dtype=torch.float64)
    state = tuple(torch.randn(B, size, dtype=torch.float64) for size in cell.state_sizes)
    mask = torch.tensor([[0, 1], [1, 1], [1, 0], [1, 1], [1, 1]], dtype=torch.bool)
    drawn = cell.sample_noise(T, B)
    loop, blocks = (
        run_pass(cell, x, state, mask, drawn, name, monkeypatch) for name in ("reference", backend)
    )
    assert_equal(blocks, loop, 1e-13)
