"""The layers that are compared: torch.nn.LSTM, cells on their backends, compiled loops, other packages.

Shapes: T time, B batch, C input, H hidden.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from rhhn_fairseq.bench.external import EXTERNALS
from rhhn_fairseq.bench.machine import (
    DTYPES,
    BenchConfig,
    check_distinct,
    cudnn_for,
    first_calls,
    forced,
    in_graphs,
    lstm_algorithm,
)
from rhhn_fairseq.bench.parity import ORACLE_ROWS, checked, draw_batch, pass_results
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import build_cell, cell_options
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import available_backends, explain
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends

BASELINE = "nn.LSTM"

ON_REQUEST = {"hyperrnn_full": ("hyperrnn", {"hyper_form": "full"})}
"""Contenders that run only when they are named: the full HyperRNN has hyper_embed_size times the weights."""

COMPILE = ("none", "step", "sequence")

RECOMPILATIONS = 256

MOST = 10**6
"""Largest size of anything: of these, a layer alone would fill terabytes."""

OF_CELLS = ("hyper_size", "hyper_embed_size", "hyper_rank", "rhn_depth", "h_detach")
"""Fields of ``SizesConfig`` that are passed to the cells with options of these names."""


@dataclass(frozen=True, kw_only=True)
class SizesConfig(BenchConfig):
    """Sizes of single layers, and the backends and types they run on."""

    hidden: int = option(1000, help="width of the cells", low=1, high=MOST)
    input: int = option(50, help="width of the input", low=1, high=MOST)
    batch: int = option(128, help="sequences in a batch", low=1, high=MOST)
    length: int = option(50, help="steps of a sequence", low=1, high=MOST)
    hyper_size: int = option(128, help="width of the hypernetworks", low=1, high=MOST)
    hyper_embed_size: int = option(16, help="width of the embeddings z", low=1, high=MOST)
    hyper_rank: int = option(
        1, help="outer products that scale a matrix of HyperRHN, HyperLSTM", low=1, high=MOST
    )
    rhn_depth: int = option(7, help="layers in one step of the highway networks", low=1, high=1000)
    h_detach: float = option(0.0, help="the cells' probability of h-detach", low=0, high=1)
    dtype: tuple = option(("float32",), help="dtypes of weights and input, separated by commas")
    backends: tuple = option((), help="names of backends, separated by commas (default: all available)")
    recompute_steps: int = option(
        0,
        help="also run each cell's first backend with segments of this many steps, recomputed "
        "in the backward pass; see the cells' option of that name",
        low=0,
    )

    def __post_init__(self):
        super().__post_init__()
        check_names("dtype", self.dtype, DTYPES)
        check_distinct("backends", self.backends)


def check_names(option: str, names: tuple[str, ...], known) -> None:
    """Raises UsageError if there are no names, or one is unknown or given twice."""
    for name in names:
        if name not in known:
            raise UsageError(f"--{option} {name or repr(name)} is unknown, choose from {', '.join(known)}")
    if not names:
        raise UsageError(f"--{option} is empty, choose from {', '.join(known)}")
    check_distinct(option, names)


@dataclass(frozen=True)
class Contender:
    """A layer on a backend in a type.

    Attributes:
        name: the cell's, the baseline's or another package's. module: the layer on the device, in the type.
        master: the same weights in float32 on the CPU.
        forces: the backend that its cells must run on; None forces none.
        like: the cell with the same matrix products. compiling: see ``compiled``.
    """

    name: str
    backend: str
    dtype: str
    module: nn.Module
    master: nn.Module
    like: str
    forces: str | None = None
    compiling: str = "none"

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies it among the contenders of a run."""
        return self.name, self.backend, self.dtype

    @contextlib.contextmanager
    def running(self, dtype: str | None = None) -> Iterator[nn.Module]:
        """Yields its module, or a copy in another type, and forces its backend meanwhile."""
        module = self.module
        if dtype not in (None, self.dtype):
            device = next(module.parameters()).device
            module = compiled(copy.deepcopy(self.master).to(device, DTYPES[dtype]), self.compiling)
        with forced(self.forces), cudnn_for(dtype or self.dtype):
            yield module


def build_layer(name: str, config: SizesConfig) -> nn.Module:
    """Builds a layer by the name of a cell, the baseline or another package's, in float32 on the CPU."""
    if name == BASELINE:
        module = nn.LSTM(config.input, config.hidden)
    elif name in EXTERNALS:
        module = EXTERNALS[name].build(config)
    else:
        cell, options = ON_REQUEST.get(name, (name, {}))
        known = cell_options(cell)
        sizes = {key: getattr(config, key) for key in OF_CELLS}
        sizes = {key: value for key, value in sizes.items() if key in known}
        module = build_cell(cell, config.input, config.hidden, **sizes, **options)
    with torch.no_grad():
        # Some maps start at zero, so the check would not see anything behind them.
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) * (0.02 / config.hidden**0.5)
    return module


def like(name: str) -> str:
    """Returns the name of the cell with the same matrix products as a layer."""
    if name in EXTERNALS:
        return EXTERNALS[name].like
    return "lstm" if name == BASELINE else name


def contenders_of(name: str, config: SizesConfig, compiling: str = "none") -> list[Contender]:
    """Returns contenders for a layer on every requested backend in every requested dtype.

    Args:
        name: as ``build_layer`` takes it. compiling: adds a cell's reference under torch.compile, see
            ``compiled``.

    Raises:
        UsageError: a cell has none of the requested backends.
    """
    master, contenders = build_layer(name, config), []
    for dtype in config.dtype:
        if name in EXTERNALS and dtype not in EXTERNALS[name].dtypes:
            continue
        module = copy.deepcopy(master).to(config.device, DTYPES[dtype])
        common = dict(name=name, dtype=dtype, master=master, like=like(name))
        if isinstance(module, Cell):
            backends = select_backends(name, module, config, dtype)
            for backend in backends:
                forces = None if only_loops(module, backend, config, dtype) else backend
                contenders.append(Contender(**common, backend=backend, module=module, forces=forces))
            if config.recompute_steps:
                title = f"{backends[0]}, parts of {config.recompute_steps}"
                recomputing = common | dict(
                    module=recomputed(module, config), master=recomputed(master, config)
                )
                contenders.append(Contender(**recomputing, backend=title, forces=backends[0]))
            if compiling != "none":
                common["module"] = compiled(copy.deepcopy(module), compiling)
                title = f"compiled {compiling}"
                contenders.append(Contender(**common, backend=title, forces="reference", compiling=compiling))
        else:
            backend = "its own"
            if name == BASELINE:
                with cudnn_for(dtype):
                    backend = lstm_algorithm(module, batch_for(config, dtype)[0])
            contenders.append(Contender(**common, backend=backend, module=module))
    return contenders


def only_loops(cell: Cell, backend: str, config: SizesConfig, dtype: str) -> bool:
    """Whether a cell runs as a loop unforced; then it is not forced, to have the products of training."""
    if backend != "reference" or config.device != "cpu":
        return False
    rows = explain(cell, config.length, config.batch, config.device, DTYPES[dtype])
    return next(name for name, runs, _ in rows if runs) == "reference"


def recomputed(cell: Cell, config: SizesConfig) -> Cell:
    """Returns a copy of a cell that recomputes segments of a sequence in the backward pass."""
    cell = copy.deepcopy(cell)
    cell.config = replace(cell.config, recompute_steps=config.recompute_steps)
    return cell


def select_backends(name: str, cell: Cell, config: SizesConfig, dtype: str) -> list[str]:
    """Returns the requested backends that can train a cell; all available ones if none are requested.

    On a GPU, backends whose loops can be recorded are listed a second time, as CUDA graphs.

    Raises:
        UsageError: the cell has none of the requested backends, or one is unknown.
    """
    known = [entry.name for entry in backends.BACKENDS]
    known += in_graphs(known, "cuda")
    if unknown := [name for name in config.backends if name not in known]:
        raise UsageError(f"--backends {unknown[0]}: there is no such backend, choose from {', '.join(known)}")
    available = available_backends(cell, config.device, DTYPES[dtype])
    available = (*available[:-1], *in_graphs(available, config.device), available[-1])
    selected = [backend for backend in available if backend in (config.backends or available)]
    if not selected:
        raise UsageError(
            f"--backends {','.join(config.backends)}: {name} in {dtype} runs on {', '.join(available)} only"
        )
    return selected


def compiled(cell: Cell, what: str) -> Cell:
    """Makes a cell's reference run under torch.compile, in place, and returns the cell.

    Args:
        what: ``step`` compiles one step, called from Python's loop; ``sequence`` the whole unrolled loop,
            which takes many times as long to compile; ``none`` changes nothing.
    """
    if what != "none":
        # Beyond its limit torch runs uncompiled code; all cells of a class count towards one limit.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    if what == "sequence":

        def loop(x_TBC):
            state, plan = (
                cell.zero_state(x_TBC.shape[1], x_TBC.device, x_TBC.dtype),
                backends.make_plan("reference"),
            )
            return cell.run_pass(x_TBC, state, None, None, None, plan)

        # ``run_pass`` skips the choice of a backend, which cannot be traced.
        cell.forward = torch.compile(loop, dynamic=False)
    elif what == "step":
        for tensor in cell.modules():
            if isinstance(tensor, Cell):
                tensor.step = torch.compile(tensor.step, dynamic=False)
    return cell


def batch_for(config: SizesConfig, dtype: str):
    """Returns a random input [T, B, C] and output gradient [T, B, H] on the device in a type."""
    shape = (config.length, config.batch, config.input, config.hidden)
    x, gradient = (tensor.to(config.device, DTYPES[dtype]) for tensor in draw_batch(shape, config.dtype))
    return x, gradient


def check_contenders(contenders: list[Contender], config: SizesConfig) -> dict[tuple, dict[str, float]]:
    """Returns the errors by type of contenders that share their weights, against one float64 run.

    Contenders that are timed in another type are checked in float32 as well, which is the stricter check.

    Raises:
        UsageError: an error is too large to be rounding.
    """
    shape = (config.length, config.batch, config.input, config.hidden)
    x, gradient = (tensor.to(config.device) for tensor in draw_batch(shape, config.dtype))
    exact_module = copy.deepcopy(contenders[0].master).to(config.device).double()
    with forced("reference"):
        exact = pass_results(exact_module, x, gradient, ORACLE_ROWS)
    del exact_module
    errors: dict[tuple, dict[str, float]] = {}
    for contender in contenders:
        errors[contender.key] = {}
        for dtype in dict.fromkeys(["float32", contender.dtype]):
            known = errors.get((contender.name, contender.backend, dtype), {})
            if dtype in known:
                errors[contender.key][dtype] = known[dtype]
                continue
            kind = DTYPES[dtype]
            with contender.running(dtype) as module:
                for _ in range(first_calls(contender.forces)):
                    results = pass_results(module, x.to(kind), gradient.to(kind), config.batch)
            errors[contender.key][dtype] = checked(contender.name, results, exact, dtype)
        contender.module.zero_grad(set_to_none=True)
    return errors
