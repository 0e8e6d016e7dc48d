"""Small cells in float64, and what they read, for the tests of cells."""

import torch

from rhhn_fairseq.cells import build_cell

C, H = 3, 5


def build(name, options, seed=0, dtype=torch.float64, sizes=(C, H)):
    """A cell whose parameters are all in general position: none is zero, one or symmetric."""
    torch.manual_seed(seed)
    cell = build_cell(name, *sizes, **options).to(dtype)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return cell


def draw_inputs(cell, T, B, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, cell.config.input_size, generator=generator, dtype=dtype)
    state = tuple(torch.randn(B, size, generator=generator, dtype=dtype) for size in cell.state_sizes)
    return x, state


def draw_noise(cell, T, B, seed=2):
    return cell.sample_noise(T, B, generator=torch.Generator().manual_seed(seed))
