"""The layers that are compared: torch.nn.LSTM, and cells on their backends.

Shapes: T time, B batch, C input, H hidden.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.machine import DTYPES, MOST, BenchConfig, check_names, in_graphs
from benchmarks.parity import Contender, check, with_gradients
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import CELLS, build_cell, cell_options
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import available_backends, explain
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends

BASELINE = "nn.LSTM"

ORACLE_ROWS = 32
"""Sequences the float64 run reads at a time: the whole batch would take twice the memory of what is timed."""

OF_CELLS = ("hyper_size", "hyper_embed_size", "hyper_rank", "rhn_depth", "h_detach", "recompute_steps")
"""Fields of ``SizesConfig`` that are passed to the cells with options of these names."""


@dataclass(frozen=True, kw_only=True)
class SizesConfig(BenchConfig):
    """Single layers: their sizes, backends and types."""

    cells: tuple = option(tuple(CELLS), help="names of cells, separated by commas")
    hidden: int = option(1000, help="width of the cells", low=1, high=MOST)
    input: int = option(50, help="width of the input", low=1, high=MOST)
    batch: int = option(128, help="sequences in a batch", low=1, high=MOST)
    length: int = option(50, help="steps of a sequence", low=1, high=MOST)
    hyper_size: int = option(128, help="width of the hypernetworks", low=1, high=MOST)
    hyper_embed_size: int = option(16, help="width of the embeddings z", low=1, high=MOST)
    hyper_rank: int = option(1, help="outer products that scale a matrix", low=1, high=MOST)
    rhn_depth: int = option(7, help="layers in one step of the highway networks", low=1, high=1000)
    h_detach: float = option(0.0, help="the cells' probability of h-detach", low=0, high=1)
    recompute_steps: int = option(0, help="the cells' option of that name", low=0)
    dtype: tuple = option(("float32",), help="dtypes of weights and input, separated by commas")
    backends: tuple = option((), help="names of backends, separated by commas; none: all available")

    def __post_init__(self):
        super().__post_init__()
        check_names("cells", self.cells, sorted(CELLS))
        check_names("dtype", self.dtype, DTYPES)
        check_backends(self.backends)


def check_backends(names: tuple[str, ...]) -> None:
    """Raises UsageError if a backend is unknown or given twice."""
    known = [entry.name for entry in backends.BACKENDS]
    if names:
        check_names("backends", names, [*known, *in_graphs(known, "cuda")])


def build_layer(name: str, config: SizesConfig) -> nn.Module:
    """Builds a cell by its name, or the baseline, in float32."""
    if name == BASELINE:
        module = nn.LSTM(config.input, config.hidden)
    else:
        sizes = {key: getattr(config, key) for key in OF_CELLS if key in cell_options(name)}
        module = build_cell(name, config.input, config.hidden, **sizes)
    with torch.no_grad():
        # Some maps start at zero, so the check would not see anything behind them.
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) * (0.02 / config.hidden**0.5)
    return module


def contenders_of(name: str, config: SizesConfig) -> list[Contender]:
    """Returns contenders for a layer on every requested backend in every requested dtype.

    Raises:
        UsageError: a cell has none of the requested backends.
    """
    master, contenders = build_layer(name, config).to(config.device), []
    for dtype in config.dtype:
        module = copy.deepcopy(master).to(DTYPES[dtype])
        if not isinstance(module, Cell):
            contenders.append(Contender((name, "torch", dtype), master, module, dtype))
            continue
        for backend in select_backends(name, module, config, dtype):
            forces = None if _only_loops(module, backend, config, dtype) else backend
            contenders.append(Contender((name, backend, dtype), master, module, dtype, forces))
    return contenders


def _only_loops(cell: Cell, backend: str, config: SizesConfig, dtype: str) -> bool:
    """Whether a cell runs as a loop unforced; then it is not forced, to have the products of training."""
    if backend != "reference" or config.device != "cpu":
        return False
    rows = explain(cell, config.length, config.batch, config.device, DTYPES[dtype])
    return next(name for name, runs, _ in rows if runs) == "reference"


def select_backends(name: str, cell: Cell, config, dtype: str) -> list[str]:
    """Returns the requested backends that can train a cell; all available ones if none are requested.

    On a GPU, backends whose loops can be recorded are listed a second time, as CUDA graphs.

    Raises:
        UsageError: the cell has none of the requested backends.
    """
    available = available_backends(cell, config.device, DTYPES[dtype])
    available = (*available[:-1], *in_graphs(available, config.device), available[-1])
    selected = [backend for backend in available if backend in (config.backends or available)]
    if not selected:
        raise UsageError(
            f"--backends {','.join(config.backends)}: {name} in {dtype} runs on {', '.join(available)} only"
        )
    return selected


def batch_for(config: SizesConfig, dtype: str) -> tuple[Tensor, Tensor]:
    """Returns a random input [T, B, C] and output gradient [T, B, H] on the device, the same at every call.

    They are rounded to all types that are timed, so that rounding them later causes no error.
    """
    draw = torch.Generator().manual_seed(1)
    widths = (config.input, config.hidden)
    drawn = [torch.randn((config.length, config.batch, width), generator=draw) for width in widths]
    for each in (*config.dtype, dtype):
        drawn = [tensor.to(DTYPES[each]) for tensor in drawn]
    return drawn[0].to(config.device), drawn[1].to(config.device)


def check_contenders(contenders: list[Contender], config: SizesConfig) -> dict[tuple, float]:
    """Returns the errors of contenders by their keys. Raises UsageError if one is too large."""
    x, gradient = batch_for(config, "float32")

    def collect(module: nn.Module) -> dict[str, Tensor]:
        kind = next(module.parameters()).dtype
        rows = ORACLE_ROWS if kind == torch.float64 else config.batch
        return pass_results(module, x.to(kind), gradient.to(kind), rows)

    return check(contenders, collect)


def pass_results(module: nn.Module, x_TBC: Tensor, gradient_TBH: Tensor, rows: int) -> dict[str, Tensor]:
    """Returns the output and all gradients of a pass, by name, reading ``rows`` sequences at a time."""
    module.zero_grad(set_to_none=True)
    x_TBC = x_TBC.detach().requires_grad_()
    outputs = []
    for x, gradient in zip(x_TBC.split(rows, dim=1), gradient_TBH.split(rows, dim=1), strict=True):
        y, _ = module(x)
        y.backward(gradient)
        outputs.append(y.detach())
    return with_gradients({"output": torch.cat(outputs, dim=1), "gradient of input": x_TBC.grad}, module)
