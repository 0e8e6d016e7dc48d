"""Which backend runs a cell over a sequence: the table of backends, the choice, and the reasons for it.

``Cell.forward`` calls ``select`` once per pass. It returns a ``Plan``, which is passed to everything that
has to know how the pass runs. ``explain`` gives the reasons.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native, policy, triton
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.ops.buffers import AUTOCASTING
from rhhn_fairseq.ops.matmul import gemm

logger = logging.getLogger(__name__)

STEP_ROWS = 32
"""Rows up to which a single step on the CPU is faster without the setup of a fused operation.

Measured at 512 units with two threads: the loop takes 0.7 to 1.0 times the operation's time with 1 to 20
rows, 0.9 to 1.2 times with 80 rows. With a gradient, at 64 units and 8 rows, 0.5 to 0.7 times.
"""

NARROW = 384
"""Units up to which torch.nn runs a plain LSTM or GRU faster on a CPU.

Measured forward and backward with 1 to 256 sequences and two threads of an AMD EPYC (Zen 5): an LSTM takes
0.6 to 1.0 times the time of the fused operation (above, 1.0 to 1.6 times), a GRU 0.8 to 1.06 times that of
the loop.
"""

L2_WEIGHTS = 1 << 18
"""Numbers in all recurrent matrices up to which they stay in a core's own cache."""

L3_WEIGHTS = 15 << 18
"""Numbers in all recurrent matrices up to which they stay in the cache that cores share."""

L3_ROWS = 4
"""Sequences that a thread needs if matrices are in the shared cache: it reads them once for so many."""

SEQUENCE_STEPS = 4
"""Steps from which packing the matrices for one call pays off."""

MEASURED_ON_GPU = (torch.float32, torch.bfloat16)
"""Types of operands in which the Triton kernels were faster than ``aten`` (docs/results/speed.md)."""


class Request(NamedTuple):
    """A pass of a cell: everything that the choice depends on.

    Attributes:
        cell: name of the cell's class.
        operation: the fused operation that the cell has, or None.
        steps, rows: T and B. hidden_size: H.
        device: where. dtype: of the operands.
        grad: whether a gradient is recorded.
        extras: what the pass asks for that torch.nn lacks, such as "padding masks".
        rounds: what rounds float32 operands, see ``rounding``; None for nothing.
        wide_state: whether a state has a wider type than the operands.
        few_rows: whether ``gemm`` has a few-row product for the recurrent matrix.
        forced: the backend that must be used, or None.
        needs_steps: what only the loop over the cell's step can do, in words, such as "torch.func"; or None.
    """

    cell: str
    operation: str | None
    steps: int
    rows: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    grad: bool
    extras: tuple[str, ...] = ()
    rounds: str | None = None
    wide_state: bool = False
    few_rows: bool = False
    forced: str | None = None
    needs_steps: str | None = None

    @property
    def is_small(self) -> bool:
        """Whether this is a single step of few rows on the CPU."""
        single = self.steps == 1 and self.rows <= STEP_ROWS and self.device.type == "cpu"
        # A state of a wider type would come back rounded.
        return single and (not self.wide_state or self.rounds == "autocast")


class Plan(NamedTuple):
    """How a pass runs.

    Attributes:
        backend: a name of the table. gemm: implementation of large products, see ``gemm.select_gemm``.
        is_fused: whether the cell's operation runs the pass.
        is_single_step: whether this is a step of decoding for few rows, which needs no fused operation.
        records: whether the operation runs as a CUDA graph.
        name: for the operations, which need no more than the backend and ``gemm``; see ``plan_named``.
    """

    backend: str
    gemm: str = "torch"
    is_fused: bool = False
    is_single_step: bool = False
    records: bool = False
    name: str = ""

    def fits_one_call(self, steps: int, rows: int, weights: int, dtype: torch.dtype) -> bool:
        """Whether compiled code runs many steps in one call, each thread its own sequences.

        No thread then waits for another, but each thread reads every matrix, so the matrices must stay in
        its cache.

        Args:
            weights: numbers in all recurrent matrices.
        """
        if self.backend != "native" or steps < SEQUENCE_STEPS or not native.runs_sequences(dtype):
            return False
        if weights <= L2_WEIGHTS:
            return True
        each = rows // torch.get_num_threads()
        return self.gemm == "native" and weights <= L3_WEIGHTS and each >= L3_ROWS


@functools.cache
def make_plan(backend: str, gemm: str = "torch", is_single_step: bool = False, records: bool = False) -> Plan:
    """Returns a plan, including the fields that follow from the arguments."""
    return Plan(backend, gemm, backend in FUSED_BACKENDS, is_single_step, records, f"{backend}, {gemm}")


def plan_named(name: str) -> Plan:
    """Returns a plan by its name, for the operations: torch gives them no objects of this package."""
    if name in PLANS:
        return PLANS[name]
    if native.library() is None:
        return make_plan("aten")
    return make_plan("native", gemm.select_gemm(torch.float32, torch.device("cpu")))


TRACED = Plan("traced", is_fused=True, name="traced")
"""The plan of a compiled or exported operation on the CPU: the machine that runs it decides the rest."""


def _nothing(request: Request) -> None:
    return None


class Backend(NamedTuple):
    """A row of the table.

    Attributes:
        name: what RHHN_KERNEL takes. description: one line.
        operations: the fused operations it has; empty for every cell.
        dtypes: of operands; empty for all.
        obstacle: why it cannot run a pass on its device, or None.
        drawback: why another row is preferred although it could, or None.
    """

    name: str
    description: str
    operations: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    obstacle: Callable[[Request], str | None] = _nothing
    drawback: Callable[[Request], str | None] = _nothing

    def lacks(self, operation: str | None, dtype: torch.dtype, cell: str = "this cell") -> str | None:
        """Returns what it lacks for a cell's operation and a type of operands; None if it has both."""
        if self.operations and operation not in self.operations:
            return f"{self.name} has no operation for {cell}"
        if self.dtypes and dtype not in self.dtypes:
            return f"{self.name} has no kernels for {str(dtype).removeprefix('torch.')}"
        return None

    def refusal(self, request: Request) -> str | None:
        """Returns why it cannot run a pass; None if it can."""
        if request.needs_steps and self.name != "reference":
            return f'{request.needs_steps} needs the loop over the cell\'s step, backend="reference"'
        return self.lacks(request.operation, request.dtype, request.cell) or self.obstacle(request)


def _native_obstacle(request: Request) -> str | None:
    if request.device.type != "cpu":
        return "native runs on the CPU only"
    return None if native.library() is not None else "the compiled kernels are not built"


def _native_drawback(request: Request) -> str | None:
    plain = request.operation == "lstm" and not request.extras
    if request.is_small:
        if plain and request.few_rows and not request.grad:
            return None
        return f"the setup of a fused operation costs more than a single step of up to {STEP_ROWS} rows"
    return f"torch_nn is faster up to {NARROW} units" if plain and not _torch_nn_drawback(request) else None


def _torch_nn_obstacle(request: Request) -> str | None:
    if request.operation not in ("lstm", "gru"):
        return "torch.nn has LSTM and GRU only"
    if request.dtype == torch.float16 and request.device.type == "cpu" and request.rounds == "autocast":
        return "torch.nn has no float16 under autocast on a CPU"
    pieces = [("padding masks",)] if request.device.type == "cuda" else [("padding masks",), ("resets",)]
    if request.operation == "gru" and request.extras in pieces:
        return None
    return f"torch.nn has no {request.extras[0]}" if request.extras else None


def _torch_nn_drawback(request: Request) -> str | None:
    if request.device.type == "cuda":
        return "torch casts to float16 what cuDNN reads" if request.rounds == "autocast to bfloat16" else None
    if request.device.type != "cpu":
        return "measured on CPUs and CUDA devices only"
    if request.is_small:
        return None
    if request.dtype != torch.float32 or request.rounds:
        return "its states would not be float32"
    return f"slower than this package beyond {NARROW} units" if request.hidden_size > NARROW else None


def _triton_drawback(request: Request) -> str | None:
    if request.device.type != "cuda":
        return "an interpreter runs it here; RHHN_KERNEL=triton asks for it"
    if torch.version.hip is not None:
        return "measured on NVIDIA's GPUs only; RHHN_KERNEL=triton asks for it"
    if request.dtype not in MEASURED_ON_GPU:
        return "measured in float32 and bfloat16 only; RHHN_KERNEL=triton asks for it"
    return None


def _aten_drawback(request: Request) -> str | None:
    return "the loop is faster for a single step of few rows" if request.is_small else None


FUSED = ("lstm", "hyper_lstm", "highway")
HALF = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

BACKENDS = (
    Backend(
        "native",
        "fused operation, compiled C++ for point-wise work and products",
        FUSED,
        tuple(native.DTYPES),
        _native_obstacle,
        _native_drawback,
    ),
    Backend(
        "torch_nn",
        "torch.nn's LSTM and GRU (cuDNN on a GPU)",
        obstacle=_torch_nn_obstacle,
        drawback=_torch_nn_drawback,
    ),
    Backend(
        "triton",
        "fused operation, Triton kernels for point-wise work",
        FUSED,
        HALF,
        lambda request: triton.obstacle(request.device),
        _triton_drawback,
    ),
    Backend(
        "aten",
        "fused operation, torch operations for point-wise work",
        (*FUSED, "linear_scan"),
        HALF,
        drawback=_aten_drawback,
    ),
    Backend("reference", "loop over the cell's step"),
)
"""All backends in order of preference: the first row without a refusal or drawback runs."""

NAMES = tuple(backend.name for backend in BACKENDS)
FUSED_BACKENDS = tuple(backend.name for backend in BACKENDS if set(FUSED) <= set(backend.operations))


PLANS = {
    plan.name: plan for plan in itertools.starmap(make_plan, itertools.product(FUSED_BACKENDS, policy.GEMMS))
}
"""The plans of operations, except ``TRACED``, by their names."""


@functools.lru_cache(maxsize=4096)
def _select(request: Request) -> tuple[str, bool]:
    """Returns the backend of a pass, and whether it is a single step, too small for a fused operation."""
    for backend in BACKENDS:
        if request.forced not in (None, backend.name):
            continue
        refusal = backend.refusal(request)
        if request.forced and refusal:
            runs = ", ".join(available(request))
            raise UsageError(f"{_forced_by(request)}: {request.cell} runs on {runs} only; {refusal}")
        if request.forced or not (refusal or backend.drawback(request)):
            return backend.name, request.is_small and not request.forced
    raise UsageError(f"{_forced_by(request)} is unknown, choose from {', '.join(NAMES)}")


def _forced_by(request: Request) -> str:
    """Returns what forces a backend, in words: the environment, or else the attribute of the cell."""
    name = policy.KERNEL if policy.current().kernel == request.forced else f"{request.cell}.backend"
    return f"{name}={request.forced}"


def available(request: Request) -> tuple[str, ...]:
    """Returns the names of the backends that can run a pass, in the order of the table."""
    return tuple(backend.name for backend in BACKENDS if backend.refusal(request) is None)


def select(request: Request) -> Plan:
    """Returns how a pass runs; logs it once for every cell, device, type and backend.

    Raises:
        UsageError: the forced backend is unknown or cannot run this pass.
    """
    name, single = _select(request)
    note = ", for single steps of few rows" if single else ""
    recorded = name in FUSED_BACKENDS and request.operation in FUSED
    records = recorded and policy.current().graphs and graphs.possible(request.device)
    if records:
        note += ", as CUDA graphs"
    RUNNING[request.cell] = name
    _log_once(request.cell, request.device.type, request.dtype, name, note)
    # ``request.rounds`` covers the other conditions of ``gemm.select_gemm``. "high" rounds nothing on a CPU.
    plain = name == "native" and request.dtype == torch.float32 and request.rounds in (None, "high")
    gemm_name = gemm.preferred(policy.current().matmul) if plain else "torch"
    return make_plan(name, gemm_name, single, records)


def select_traced(
    operation: str | None, device: torch.device, dtype: torch.dtype, forced: str | None
) -> Plan:
    """Returns how a compiled or exported pass runs: a fused operation as one node, else the unrolled loop.

    It neither queries the machine nor stores anything, so that torch can trace it. ONNX has no operation of
    this package and always gets the loop.

    Args:
        operation: the fused operation that the cell has, or None. forced: the backend that must be used.
    """
    if forced is not None:
        _check_traced(operation, device, dtype, forced)
    if forced in ("reference", "torch_nn"):
        return Plan(forced)
    if torch.onnx.is_in_onnx_export() or operation not in (*FUSED, "linear_scan"):
        return Plan("reference")
    if forced is None and operation in FUSED and device.type == "cpu" and dtype in native.DTYPES:
        return TRACED
    name = forced or "aten"
    return Plan(name, is_fused=True, name=f"{name}, torch")


def _check_traced(operation: str | None, device: torch.device, dtype: torch.dtype, forced: str) -> None:
    """Raises UsageError if a forced backend cannot run a compiled pass."""
    if forced not in NAMES:
        raise UsageError(f"backend {forced} is unknown, choose from {', '.join(NAMES)}")
    if reason := BACKENDS[NAMES.index(forced)].lacks(operation, dtype):
        raise UsageError(f"backend {reason}")
    if device.type != {"native": "cpu", "triton": "cuda"}.get(forced, device.type):
        raise UsageError(f"backend {forced} does not compile for {device.type}")


def explain(request: Request) -> list[tuple[str, bool, str]]:
    """Returns every backend, whether it is the one that runs, and a one-line reason for or against it."""
    rows, selected = [], None
    for backend in BACKENDS:
        refusal, drawback = backend.refusal(request), backend.drawback(request)
        if request.forced is not None and refusal is None:
            runs = backend.name == request.forced
            reason = "forced" if runs else f"{request.forced} is forced"
        else:
            runs = not (refusal or drawback or selected)
            reason = refusal or drawback or (selected and f"{selected} comes first") or backend.description
        selected = backend.name if runs else selected
        rows.append((backend.name, runs, reason))
    return rows


RUNNING: dict[str, str] = {}
"""The backend that was selected last, by the name of the cell's class."""


@functools.cache
def _log_once(cell: str, device: str, dtype: torch.dtype, name: str, note: str) -> None:
    logger.info("%s runs on the %s backend (%s, %s)%s", cell, name, device, dtype, note)


def rounding(device: torch.device) -> str | None:
    """Returns what rounds float32 operands: autocast, torch's precision ("high", "medium") or None."""
    if device.type in AUTOCASTING and torch.is_autocast_enabled(device.type):
        bfloat16 = torch.get_autocast_dtype(device.type) == torch.bfloat16
        return "autocast to bfloat16" if bfloat16 and device.type == "cuda" else "autocast"
    precision = gemm.matmul_precision(device.type)
    return None if precision == "highest" else precision


def format_rows(rows: Sequence[tuple[str, bool, str]]) -> str:
    """Formats the rows of ``explain`` as lines, with the one that runs marked."""
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {'*' if runs else ' '} {name:{width}}  {reason}" for name, runs, reason in rows)
