"""Times cells against torch.nn.LSTM of the same size, forward and backward, after checking them.

All contenders run in one process in turn, round after round, so that what else the machine does slows all
of them: their ratios can be trusted where their milliseconds cannot.

Shapes: T time, B batch, C input, H hidden.
"""

import contextlib
import copy
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from rhhn_fairseq.cells.base import Cell, check_fields, option
from rhhn_fairseq.cells.registry import CELLS, build_cell, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import backends

BASELINE = "nn.LSTM"

ON_REQUEST = {"hyperrnn_full": ("hyperrnn", {"hyper_form": "full"})}
"""Contenders that run only when they are named: the full HyperRNN has hyper_embed_size times the weights."""

SMOKE = dict(hidden=8, input=5, batch=3, length=4, hyper_size=4, hyper_embed_size=2, rhn_depth=2, repeats=2)
"""Sizes that try everything out within a second."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ORACLE_ROWS = 32
"""Sequences the float64 run reads at a time: the whole batch would take twice the memory of what is timed."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is timed and how; ``UsageError`` names a value that cannot work."""

    cells: tuple = option(tuple(CELLS), help="names of cells, separated by commas")
    hidden: int = option(1000, help="width of the cells", low=1)
    input: int = option(50, help="width of the input", low=1)
    batch: int = option(128, help="sequences in a batch", low=1)
    length: int = option(50, help="steps of a sequence", low=1)
    hyper_size: int = option(128, help="width of the hypernetworks", low=1)
    hyper_embed_size: int = option(16, help="width of the embeddings z", low=1)
    rhn_depth: int = option(7, help="layers in one step of the highway networks", low=1)
    repeats: int = option(7, help="rounds that count, after one that does not", low=1)
    threads: int = option(0, help="threads of the CPU, 0 for torch's own choice", low=0)
    device: str = option("cpu", help="cpu or cuda")
    dtype: str = option("float32", help="of weights and input", choices=tuple(DTYPES))

    def __post_init__(self):
        check_fields(self)
        known = [*CELLS, *ON_REQUEST]
        for name in self.cells:
            if name not in known:
                raise UsageError(f"unknown cell {name!r}, choose from {', '.join(sorted(known))}")
        if len(set(self.cells)) < len(self.cells):
            raise UsageError(f"Bench: cells={','.join(self.cells)} names a cell twice")
        _check_device(self.device)


def _check_device(text: str) -> None:
    """Raises UsageError unless torch can run on the device called ``text``."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"Bench: device={text!r} is unknown, choose from cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"Bench: device={text!r}, but torch finds {torch.cuda.device_count()} CUDA devices")


def matrix_flop(module: nn.Module, T: int, B: int) -> int:
    """Floating-point operations in the matrix products of one forward and backward pass.

    A row times an [in, out] matrix takes 2 in out operations. Each of the T B rows meets every matrix once,
    and the backward pass makes two products of the same size, one for the gradient to the row and one for
    the gradient to the matrix::

        6 T B sum(in out)

    The sum is over the parameters whose name, or whose list's name, begins with "weight", which is how cells
    and torch.nn call their matrices; with more than two dimensions they are stacks of matrices. Point-wise
    operations and normalisation are not counted, nor are products of activations with each other.
    """
    matrices = (
        parameter
        for name, parameter in module.named_parameters()
        if any(part.startswith("weight") for part in name.split("."))
    )
    return 6 * T * B * sum(matrix.numel() for matrix in matrices)


def build_contenders(config: BenchConfig) -> dict[str, nn.Module]:
    """The modules to time by name, the baseline first, in float32 on the CPU."""
    found = {BASELINE: nn.LSTM(config.input, config.hidden)}
    for name in config.cells:
        cell, options = ON_REQUEST.get(name, (name, {}))
        known = cell_options(cell)
        sizes = {key: getattr(config, key) for key in ("hyper_size", "hyper_embed_size", "rhn_depth")}
        sizes = {key: value for key, value in sizes.items() if key in known}
        found[name] = build_cell(cell, config.input, config.hidden, **sizes, **options)
    with torch.no_grad():
        for module in found.values():
            # Some maps start at zero, which would hide everything that lies behind them from the check.
            for parameter in module.parameters():
                parameter += torch.randn_like(parameter) * (0.02 / config.hidden**0.5)
    return found


@contextlib.contextmanager
def reference_backend() -> Iterator[None]:
    """Runs cells as the plain loop over their equations, whatever backend is preferred or forced."""
    before = os.environ.get("RHHN_KERNEL")
    os.environ["RHHN_KERNEL"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["RHHN_KERNEL"]
        else:
            os.environ["RHHN_KERNEL"] = before


def results(module: nn.Module, x_TBC: Tensor, gradient_TBH: Tensor, rows: int) -> dict[str, Tensor]:
    """The output and all gradients of a pass, by name, reading ``rows`` sequences at a time."""
    x_TBC = x_TBC.detach().requires_grad_()
    outputs = []
    for x, gradient in zip(x_TBC.split(rows, dim=1), gradient_TBH.split(rows, dim=1), strict=True):
        y, _ = module(x)
        y.backward(gradient)
        outputs.append(y.detach())
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    found = {"output": torch.cat(outputs, dim=1), "gradient of input": x_TBC.grad} | gradients
    return {name: part for name, part in found.items() if part is not None}


def largest_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error among tensors, in the Euclidean norm, and the name of that tensor.

    The norm looks past single elements, because a ReLU whose sum is nearly zero may go either way by
    rounding. The error is infinite where a tensor is missing or not finite.
    """
    worst = (0.0, "output")
    for name in found.keys() | exact.keys():
        error = float("inf")
        if name in found and name in exact:
            difference = (found[name].double() - exact[name]).norm()
            if difference == 0:
                continue
            error = (difference / exact[name].norm()).nan_to_num(nan=float("inf")).item()
        worst = max(worst, (error, name))
    return worst


# Measured at hidden 1000: in float32 up to 6e-6, but 1e-3 for an IRNN over 300 steps, where rounding decides
# a few ReLUs the other way; in bfloat16 up to 0.2 (LN HyperLSTM, 50 steps).
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.5}


def check(name: str, module: nn.Module, config: BenchConfig, dtypes: list[str]) -> dict[str, float]:
    """The error of a contender's output and gradients by type, against its own float64 run.

    Raises:
        UsageError: an error is too large to be rounding.
    """
    x, gradient = draw_batch(config, torch.float64)
    with reference_backend():
        exact = results(copy.deepcopy(module).to(config.device).double(), x, gradient, ORACLE_ROWS)
    errors = {}
    for dtype in dtypes:
        kind = DTYPES[dtype]
        single = copy.deepcopy(module).to(config.device, kind)
        found = results(single, x.to(kind), gradient.to(kind), config.batch)
        errors[dtype], where = largest_error(found, exact)
        if errors[dtype] > TOLERANCES[dtype]:
            raise UsageError(
                f"{name} is wrong and will not be timed: in {dtype} the {where} differs from float64 by "
                f"{errors[dtype]:.1e} of its norm, more than {TOLERANCES[dtype]:g}"
            )
    return errors


def draw_batch(config: BenchConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random input [T, B, C] and gradient to the output [T, B, H], the same at every call.

    They are rounded to the type that is timed before anything else, so that their own rounding is no error.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = [(config.length, config.batch, width) for width in (config.input, config.hidden)]
    drawn = (torch.randn(shape, generator=generator).to(DTYPES[config.dtype]) for shape in shapes)
    x_TBC, gradient_TBH = (part.to(config.device, dtype) for part in drawn)
    return x_TBC, gradient_TBH


def time_once(module: nn.Module, x_TBC: Tensor, gradient_TBH: Tensor) -> tuple[float, float]:
    """Seconds of one forward and one backward pass, to the input and all parameters, from no gradients."""

    def now():
        if x_TBC.is_cuda:
            torch.cuda.synchronize(x_TBC.device)
        return time.perf_counter()

    module.zero_grad(set_to_none=True)
    x_TBC = x_TBC.detach().requires_grad_()
    start = now()
    y, _ = module(x_TBC)
    middle = now()
    y.backward(gradient_TBH)
    return middle - start, now() - middle


def interleave(names: list[str], repeats: int, measure: Callable) -> dict[str, np.ndarray]:
    """Measures every name once a round, for ``repeats`` rounds after one that is thrown away.

    Args:
        measure: from a name to the seconds (forward, backward).

    Returns:
        seconds [repeats, 2] by name.
    """
    rounds = [[measure(name) for name in names] for _ in range(repeats + 1)][1:]
    return dict(zip(names, np.array(rounds).swapaxes(0, 1), strict=True))


def run(config: BenchConfig) -> dict:
    """Checks and times all contenders.

    Returns:
        a report of plain values: "machine", "settings" and "timings", one entry a contender, the baseline
        first.

    Raises:
        UsageError: a cell gives wrong results, its sizes cannot work, or memory does not suffice.
    """
    with _torch_settings(config), _enough_memory():
        contenders = build_contenders(config)
        total = len(contenders) * (config.repeats + 2)
        with tqdm(total=total, disable=None, leave=False, unit="pass") as progress:

            def told(name, value):
                progress.set_postfix_str(name)
                progress.update()
                return value

            # The float32 check is the sharp one, whatever type is timed.
            dtypes = list(dict.fromkeys(["float32", config.dtype]))
            errors = {
                name: told(name, check(name, module, config, dtypes)) for name, module in contenders.items()
            }
            kind = DTYPES[config.dtype]
            modules = {name: module.to(config.device, kind) for name, module in contenders.items()}
            x, gradient = draw_batch(config, kind)
            seconds = interleave(
                list(modules),
                config.repeats,
                lambda name: told(name, time_once(modules[name], x, gradient)),
            )
        timings = [_timing(name, modules[name], config, errors[name], seconds) for name in modules]
        return {"machine": describe_machine(config.device), "settings": asdict(config), "timings": timings}


def backend_of(module: nn.Module) -> str:
    """Name of the implementation that a contender ran on."""
    if not isinstance(module, Cell):
        return "torch"
    return os.environ.get("RHHN_KERNEL") or backends(module)[0]


def _timing(name, module, config, errors, seconds) -> dict:
    """The report's entry of one contender from the seconds of all."""
    passes = seconds[name].sum(axis=1)
    # Of the same round, so that a slow moment of the machine divides out.
    ratios = passes / seconds[BASELINE].sum(axis=1)
    gflop = matrix_flop(module, config.length, config.batch) / 1e9
    forward, backward = np.median(seconds[name], axis=0)
    return {
        "cell": name,
        "backend": backend_of(module),
        "parameters": sum(p.numel() for p in module.parameters()),
        "errors": errors,
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * backward,
        "total_ms": 1e3 * np.median(passes),
        "ratio": np.median(ratios),
        "ratio_min": ratios.min(),
        "ratio_max": ratios.max(),
        "gflop": gflop,
        "gflop_per_s": gflop / np.median(passes),
        "seconds": seconds[name].tolist(),
    }


@contextlib.contextmanager
def _torch_settings(config: BenchConfig) -> Iterator[None]:
    """The threads, precision and seed of a run; afterwards all are as before."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.set_num_threads(config.threads or threads)
    # cuDNN's LSTM rounds float32 to TF32 where torch's own matrix products, which the cells use, do not.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    """Turns torch's error about memory that cannot be had into a UsageError."""
    try:
        yield
    except RuntimeError as error:
        # On a GPU it is a class of its own, on the CPU a RuntimeError with one of two messages.
        signs = ("can't allocate memory", "not enough memory")
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in signs):
            raise
        raise UsageError(
            "Bench: not enough memory for these sizes, lower batch, length or hidden, or name fewer cells"
        ) from error


def describe_machine(device: str) -> dict[str, str | int]:
    """What the milliseconds depend on, beside the code."""
    found = {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def render(report: dict) -> str:
    """The report as a table, under a line about the machine and one about the sizes."""
    machine, settings = report["machine"], report["settings"]
    dtypes = list(report["timings"][0]["errors"])
    header = ["cell", "backend", "parameters", "forward ms", "backward ms", "total ms"]
    header += ["ratio", "min..max", "GFLOP", "GFLOP/s", *(f"error {dtype}" for dtype in dtypes)]
    rows = [header]
    for timing in report["timings"]:
        row = [timing["cell"], timing["backend"], f"{timing['parameters']:,}"]
        row += [f"{timing[key]:.1f}" for key in ("forward_ms", "backward_ms", "total_ms")]
        row += [f"{timing['ratio']:.2f}", f"{timing['ratio_min']:.2f}..{timing['ratio_max']:.2f}"]
        row += [f"{timing[key]:.4g}" for key in ("gflop", "gflop_per_s")]
        rows.append(row + [f"{timing['errors'][dtype]:.1e}" for dtype in dtypes])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        ", ".join(f"{key} {value}" for key, value in settings.items() if key not in ("cells", "threads")),
    ]
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def check_json_path(path: str) -> Path:
    """The path of a report to write, looked at before minutes are spent on what goes there.

    Raises:
        UsageError: it is a directory, or in none.
    """
    found = Path(path)
    if found.is_dir():
        raise UsageError(f"--json {path} is a directory, name a file")
    if not found.absolute().parent.is_dir():
        raise UsageError(f"--json {path}: there is no directory {found.absolute().parent}")
    return found


def write_json(report: dict, path: Path) -> None:
    """Writes a report beside ``path`` and renames it, so that no half of one is ever found there.

    Raises:
        UsageError: the file system refuses.
    """
    stage = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        stage.write_text(json.dumps(report, indent=2) + "\n")
        stage.replace(path)
    except OSError as error:
        raise UsageError(f"--json {path}: cannot be written ({error.strerror})") from error
    finally:
        stage.unlink(missing_ok=True)
