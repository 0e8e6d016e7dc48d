"""``scaling``: the time per token as length, width and batch double.

A token is one position of one sequence, so a pass of T steps over B sequences has T B of them. One
size doubles at a time, from the same initial sizes.

Shapes: T time, B batch, H hidden.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.bench.contenders import (
    BASELINE,
    MOST,
    SizesConfig,
    batch_for,
    check_contenders,
    check_names,
    contenders_of,
)
from rhhn_fairseq.bench.machine import measuring
from rhhn_fairseq.bench.report import Column, make_report, new_figure
from rhhn_fairseq.bench.timing import interleave, time_pass
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import CELLS

SIZES = {"T": "length", "H": "hidden", "B": "batch"}
"""The sizes that double, and their fields."""

# The time of a pass may grow as T to this power; the excess over 1 is the error of a run of a few rounds.
LINEAR = 1.1


@dataclass(frozen=True, kw_only=True)
class Config(SizesConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    hidden: int = option(128, help="initial width of the cells", low=1, high=MOST)
    batch: int = option(16, help="initial number of sequences in a batch", low=1, high=MOST)
    length: int = option(50, help="initial number of steps in a sequence", low=1, high=MOST)
    hyper_size: int = option(64, help="width of the hypernetworks; it stays constant", low=1, high=MOST)
    cells: tuple = option(("ln_hyperlstm",), help="names of cells, separated by commas")
    doublings: int = option(3, help="how many times each size doubles", low=1)

    def __post_init__(self):
        super().__post_init__()
        check_names("cells", self.cells, sorted(CELLS))

    def points(self) -> dict[tuple[str, int], "Config"]:
        """Returns the sizes of every measurement, by the size that doubles and the number of doublings."""
        return {
            (size, n): dataclasses.replace(self, **{field: getattr(self, field) * 2**n})
            for size, field in SIZES.items()
            for n in range(self.doublings + 1)
        }


SMOKE = dict(
    hidden=8,
    input=5,
    batch=2,
    length=4,
    hyper_size=4,
    hyper_embed_size=2,
    rhn_depth=2,
    repeats=1,
    doublings=1,
)

COLUMNS = (
    Column("cell", "cell"),
    Column("backend", "backend"),
    Column("type", "dtype"),
    Column("doubles", "size"),
    Column("T", "T", "d"),
    Column("H", "H", "d"),
    Column("B", "B", "d"),
    Column("total ms", "total_ms", ".2f"),
    Column("us a token", "token_us", ".3f"),
    Column("/ half the size", "growth", ".2f"),
    Column("time of a pass ~ size^", "exponent", ".2f"),
    Column("error", "error", ".1e"),
)


def run(config: Config) -> dict:
    """Checks and times every contender at every size.

    The notes say for each contender how its time grows with each size, and whether that is linear in T.

    Raises:
        UsageError: a cell gives wrong results, or memory runs out.
    """
    with measuring(config):
        contenders, errors, batches = {}, {}, {}
        for point, sizes in config.points().items():
            for name in (BASELINE, *config.cells):
                # The initial size is timed again for each scaled size, so that the ratio has one cause.
                layers = contenders_of(name, sizes)
                checked = check_contenders(layers, sizes)
                for contender in layers:
                    # What torch's LSTM runs on may change with its size.
                    backend = "" if name == BASELINE else contender.backend
                    which = (name, backend, contender.dtype)
                    contenders[which, point] = contender
                    errors[which, point] = checked[contender.key][contender.dtype]
            batches[point] = {dtype: batch_for(sizes, dtype) for dtype in config.dtype}

        def measure(key):
            with contenders[key].running() as module:
                return time_pass(module, *batches[key[1]][contenders[key].dtype])

        seconds = interleave(list(contenders), config.repeats, measure)
        rows, notes = [], []
        for which in dict.fromkeys(which for which, _ in contenders):
            exponents = {}
            for size in SIZES:
                times = [seconds[which, (size, n)].sum(axis=1) for n in range(config.doublings + 1)]
                exponents[size] = growth_exponent(times)
                for n, time in enumerate(times):
                    contender, sizes = contenders[which, (size, n)], config.points()[size, n]
                    rows.append(_row(contender, sizes, size, time) | {"error": errors[which, (size, n)]})
                    if n:
                        rows[-1]["growth"] = float(np.median(time / times[n - 1]))
                rows[-1]["exponent"] = exponents[size]
            notes.append(describe_growth(" ".join(filter(None, which)), exponents))
        return make_report("scaling", config, rows, notes)


def growth_exponent(times: list[np.ndarray]) -> float:
    """Returns p of time ~ size^p: the slope of a line through the logarithms, median over the rounds.

    Args:
        times: seconds [repeats] for each size, which doubles from one to the next.
    """
    doublings = np.arange(len(times))
    slopes = np.polyfit(doublings, np.log2(np.stack(times)), deg=1)[0]
    return float(np.median(slopes))


def describe_growth(title: str, exponents: dict[str, float]) -> str:
    """Returns a sentence about a contender's growth, which has to be linear in T."""
    powers = ", ".join(f"{size}^{exponent:.2f}" for size, exponent in exponents.items())
    verdict = "linear in T" if exponents["T"] <= LINEAR else f"NOT linear in T (more than T^{LINEAR})"
    return f"{title}: the time of a pass grows as {powers}; {verdict}"


def _row(contender, sizes: Config, size: str, seconds: np.ndarray) -> dict:
    """Returns the report's entry of one contender at one point."""
    values = {letter: getattr(sizes, field) for letter, field in SIZES.items()}
    return {
        "cell": contender.name,
        "backend": contender.backend,
        "dtype": contender.dtype,
        "size": size,
        **values,
        "total_ms": 1e3 * float(np.median(seconds)),
        "token_us": 1e6 * float(np.median(seconds)) / (values["T"] * values["B"]),
        "seconds": seconds.tolist(),
    }


def draw(report: dict):
    """Returns a figure of the time per token over each size, with a line for each contender."""
    figure, panels = new_figure(12, 4, columns=len(SIZES))
    for size, axes in zip(SIZES, panels, strict=True):
        lines = {}
        for row in report["rows"]:
            if row["size"] == size:
                name = f"{row['cell']} {row['backend']} {row['dtype']}"
                lines.setdefault(name, []).append((row[size], row["token_us"]))
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        sizes = sorted({number for points in lines.values() for number, _ in points})
        axes.set_xticks(sizes, [str(number) for number in sizes])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(size)
    panels[0].set_ylabel("microseconds a token")
    # Below the panels, where it covers no line.
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small"
    )
    return figure
