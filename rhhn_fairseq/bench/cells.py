"""``cells``: forward and backward of every cell on every backend in every dtype, compared with torch.nn.LSTM.

Shapes: T time, B batch, C input, H hidden.
"""

from dataclasses import dataclass

import numpy as np
import torch

from rhhn_fairseq.bench.contenders import (
    BASELINE,
    COMPILE,
    ON_REQUEST,
    Contender,
    SizesConfig,
    batch_for,
    build_layer,
    check_contenders,
    check_names,
    contenders_of,
)
from rhhn_fairseq.bench.external import find_externals
from rhhn_fairseq.bench.floors import Ceiling, SequentialFloor, matrix_flop, products_of
from rhhn_fairseq.bench.machine import DTYPES, measuring
from rhhn_fairseq.bench.report import Column, draw_bars, make_report
from rhhn_fairseq.bench.timing import interleave, ratio, time_pass
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import CELLS


@dataclass(frozen=True, kw_only=True)
class Config(SizesConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    cells: tuple = option(tuple(CELLS), help="names of cells, separated by commas")
    compile: str = option(
        "none", help="also time the reference under torch.compile: one step, or the sequence", choices=COMPILE
    )
    external_path: str = option("", help="directory of further packages to compare with")
    ceiling: int = option(4096, help="width of the square product that measures the GEMM peak", low=1)

    def __post_init__(self):
        super().__post_init__()
        check_names("cells", self.cells, sorted([*CELLS, *ON_REQUEST]))


PLAIN = {"hyperlstm": "lstm", "ln_hyperlstm": "ln_lstm", "hyperrhn": "rhn"}
"""The cell with fixed weights that corresponds to each cell with changing ones."""

SMOKE = dict(
    hidden=8,
    input=5,
    batch=3,
    length=4,
    hyper_size=4,
    hyper_embed_size=2,
    rhn_depth=2,
    repeats=2,
    ceiling=64,
)

COLUMNS = (
    Column("cell", "cell"),
    Column("backend", "backend"),
    Column("type", "dtype"),
    Column("parameters", "parameters", ",d"),
    Column("forward ms", "forward_ms", ".1f"),
    Column("backward ms", "backward_ms", ".1f"),
    Column("total ms", "total_ms", ".1f"),
    Column("/ nn.LSTM", "ratio", ".2f"),
    Column("min..max", "ratio_min ratio_max", ".2f"),
    Column("/ reference", "reference_ratio", ".2f"),
    Column("/ plain cell", "plain_ratio", ".2f"),
    Column("/ first type", "dtype_ratio", ".2f"),
    Column("GFLOP", "gflop", ".4g"),
    Column("GFLOP/s", "gflop_per_s", ".4g"),
    Column("% of GEMM floor", "gemm_percent", ".0f"),
    Column("% of sequential floor", "sequential_percent", ".0f"),
    Column("error", "error", ".1e"),
)


def run(config: Config) -> dict:
    """Checks and times all contenders; the rows begin with the baseline.

    Raises:
        UsageError: a cell gives wrong results, its sizes cannot work, or memory runs out.
    """
    with measuring(config):
        contenders, errors, notes = checked_contenders(config)
        floors = build_floors(config, {contender.like for contender in contenders})
        batches = {dtype: batch_for(config, dtype) for dtype in config.dtype}
        by_key = {contender.key: contender for contender in contenders}

        def measure(key):
            if key in floors:
                return floors[key].time()
            with by_key[key].running() as module:
                return time_pass(module, *batches[by_key[key].dtype])

        seconds = interleave([*by_key, *floors], config.repeats, measure)
        flop = {name: layer_flop(name, config) for name in {contender.like for contender in contenders}}
        rows = [_row(c, errors[c.key], seconds, flop[c.like], config) for c in contenders]
        for dtype in config.dtype:
            speed = np.median(floors["GEMM", dtype].flop / seconds["GEMM", dtype].sum(axis=1)) / 1e9
            notes.append(f"GEMM of {config.ceiling} in {dtype}: {speed:,.0f} GFLOP/s")
        return make_report("cells", config, rows, notes)


def checked_contenders(config: Config) -> tuple[list[Contender], dict, list[str]]:
    """Returns all contenders, their errors, and a note for each layer of another package that cannot run."""
    contenders, errors, notes = [], {}, []
    names = [BASELINE, *config.cells]
    externals = find_externals(torch.device(config.device).type, config.external_path)
    for name in [*names, *externals]:
        try:
            layers = contenders_of(name, config, config.compile)
            if layers:
                errors |= check_contenders(layers, config)
        except Exception as error:
            # A failure of another package is noted; a failure of this package ends the run.
            if name not in externals:
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            notes.append(f"{name} was left out: {reason}")
            continue
        contenders += layers
    return contenders, errors, notes


def build_floors(config: Config, names: set[str]) -> dict[tuple, Ceiling | SequentialFloor]:
    """Returns the GEMM ceiling by ("GEMM", type), and the sequential floors by (cell, type)."""
    floors = {}
    for dtype in config.dtype:
        kind = DTYPES[dtype]
        floors["GEMM", dtype] = Ceiling(config.ceiling, config.device, kind)
        for name in sorted(names):
            products = products_of(_on_meta(name, config), config.batch)
            floors[name, dtype] = SequentialFloor(products, config.length, config.device, kind)
    return floors


def layer_flop(name: str, config: Config) -> int:
    """Returns the number of operations in the matrix products of a cell's pass."""
    return matrix_flop(_on_meta(name, config), config.length, config.batch)


def _on_meta(name: str, config: Config):
    with torch.device("meta"):
        return build_layer(name, config)


def _row(contender: Contender, errors: dict, seconds: dict, flop: int, config: Config) -> dict:
    """Returns the report's entry of one contender, given the seconds of all."""
    name, dtype = contender.name, contender.dtype
    forward, backward = np.median(seconds[contender.key], axis=0)
    passes = {key: each.sum(axis=1) for key, each in seconds.items()}
    own = passes[contender.key]
    baseline = next(key for key in passes if key[0] == BASELINE and key[-1] == dtype)
    first = (name, contender.backend, config.dtype[0])
    if name == BASELINE:
        # torch chooses per type: without AVX-512, oneDNN has no LSTM in bfloat16.
        first = next(key for key in passes if key[0] == BASELINE and key[-1] == config.dtype[0])
    # The time that the pass's operations take at the ceiling's speed, in the same round.
    gemm = passes["GEMM", dtype] * flop / (2 * config.ceiling**3)

    def beside(key):
        return float(np.median(own / passes[key])) if key in passes and key != contender.key else None

    return {
        "cell": name,
        "backend": contender.backend,
        "dtype": dtype,
        "parameters": sum(p.numel() for p in contender.module.parameters()),
        "errors": errors,
        "error": errors[dtype],
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * backward,
        "total_ms": 1e3 * np.median(own),
        **ratio(own, passes[baseline]),
        "reference_ratio": beside((name, "reference", dtype)),
        "plain_ratio": beside((PLAIN.get(name), contender.backend, dtype)),
        "dtype_ratio": beside(first) if dtype != config.dtype[0] else None,
        "gflop": flop / 1e9,
        "gflop_per_s": flop / 1e9 / np.median(own),
        "gemm_percent": float(100 * np.median(gemm / own)),
        "sequential_percent": float(100 * np.median(passes[contender.like, dtype] / own)),
        "seconds": seconds[contender.key].tolist(),
    }


def draw(report: dict):
    """Returns a bar chart of the times relative to torch.nn.LSTM's."""
    return draw_bars(report, ("cell", "backend", "dtype"), "time of forward and backward / nn.LSTM")
