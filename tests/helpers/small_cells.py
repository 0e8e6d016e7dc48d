"""Small cells in float64, and what they read, for the tests of cells."""

import itertools

import pytest
import torch

from rhhn_fairseq.cells import CELLS, build_cell, cell_options
from rhhn_fairseq.cells.hyper import scalable_cells

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


def noise_at(noise, steps, b):
    """The noise of some steps of sequence ``b``; what all steps or sequences share stays whole."""
    whole = slice(None)
    return {
        key: part[steps if part.shape[0] > 1 else whole, slice(b, b + 1) if part.shape[1] > 1 else whole]
        for key, part in noise.items()
    }


def cell_cases():
    """Every registered cell with its default options, and with those that its registration names."""
    for name, entry in CELLS.items():
        # The default inner width of the paper's tables is larger than this test's cells.
        small = {"hyper_size": 3} if "hyper_size" in cell_options(name) else {}
        yield pytest.param(name, small, id=name)
        for options in entry.tests:
            label = ",".join(f"{key}={value}" for key, value in options.items())
            yield pytest.param(name, options, id=f"{name}-{label}")
    forms = itertools.cycle(itertools.product(("embedding", "direct"), ("xh", "x"), ("all", "recurrent")))
    for main, hyper in itertools.product(scalable_cells(), sorted(CELLS.keys() - {"hyper"})):
        options = dict(main_cell=main, hyper_cell=hyper, hyper_size=3, hyper_embed_size=2)
        options |= dict(zip(("hyper_map", "hyper_input", "hyper_scales"), next(forms), strict=True))
        if "rhn_depth" in cell_options(main) | cell_options(hyper):
            options["rhn_depth"] = 2
        yield pytest.param("hyper", options, id=f"hyper-{hyper}-{main}", marks=pytest.mark.slow)


every_cell = pytest.mark.parametrize("name, options", list(cell_cases()))
