"""The time per token as length, width and batch double.

A token is one position of one sequence, so a pass of T steps over B sequences has T B of them. One
size doubles at a time, from the same initial sizes.

Shapes: T time, B batch, H hidden.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from benchmarks import cells
from benchmarks.contenders import BASELINE, SizesConfig, batch_for, check_contenders, contenders_of
from benchmarks.machine import MOST, measuring
from benchmarks.report import ROUNDS, make_report, start
from benchmarks.timing import interleave, time_pass
from rhhn_fairseq.cells.config import option

SIZES = {"T": "length", "H": "hidden", "B": "batch"}
"""The sizes that double, and their fields."""

# The time of a pass may grow as T to this power; the excess over 1 is the error of a run of a few rounds.
LINEAR = 1.1


@dataclass(frozen=True, kw_only=True)
class Config(SizesConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    hidden: int = option(128, help="initial width of the cells", low=1, high=MOST)
    batch: int = option(16, help="initial number of sequences in a batch", low=1, high=MOST)
    hyper_size: int = option(64, help="width of the hypernetworks; it stays constant", low=1, high=MOST)
    cells: tuple = option(("ln_hyperlstm",), help="names of cells, separated by commas")
    doublings: int = option(3, help="how many times each size doubles", low=1)

    def points(self) -> dict[tuple[str, int], "Config"]:
        """Returns the sizes of every measurement, by the size that doubles and the number of doublings."""
        return {
            (size, n): dataclasses.replace(self, **{field: getattr(self, field) * 2**n})
            for size, field in SIZES.items()
            for n in range(self.doublings + 1)
        }


SMOKE = cells.SMOKE | dict(repeats=1, doublings=1)


def run(config: Config) -> dict:
    """Checks and times every contender at every size.

    The notes say for each contender how its time grows with each size, and whether that is linear in T.

    Raises:
        UsageError: a cell gives wrong results.
    """
    with measuring(config):
        # The initial size is timed again for each scaled size, so that the ratio has one cause.
        contenders, batches, errors, points = {}, {}, {}, config.points()
        for point, sizes in points.items():
            for name in (BASELINE, *config.cells):
                layers = contenders_of(name, sizes)
                checked = check_contenders(layers, sizes)
                for layer in layers:
                    contenders[layer.key, point], errors[layer.key, point] = layer, checked[layer.key]
            batches |= {(point, dtype): batch_for(sizes, dtype) for dtype in config.dtype}

        def measure(key):
            with contenders[key].running() as module:
                return time_pass(module, *batches[key[1], key[0][-1]])

        seconds = interleave(list(contenders), config.repeats, measure)
        rows, notes = [], []
        for which in dict.fromkeys(which for which, _ in contenders):
            exponents = {}
            for size in SIZES:
                times = [seconds[which, (size, n)].sum(axis=1) for n in range(config.doublings + 1)]
                exponents[size] = growth_exponent(times)
                for n, time in enumerate(times):
                    sizes, total = points[size, n], float(np.median(time))
                    rows.append(
                        dict(zip(("cell", "backend", "type"), which, strict=True))
                        | {"doubles": size}
                        | {letter: getattr(sizes, field) for letter, field in SIZES.items()}
                        | {"total ms": 1e3 * total, "us a token": 1e6 * total / (sizes.length * sizes.batch)}
                        | {"error": errors[which, (size, n)], ROUNDS: time.tolist()}
                    )
            notes.append(describe_growth(" ".join(which), exponents))
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


if __name__ == "__main__":
    start(__name__)
