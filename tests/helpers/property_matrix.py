"""Prints the table of cells and properties: how many cases of tests/cells/test_cells.py passed for each pair.

Usage: python tests/helpers/property_matrix.py
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rhhn_fairseq.cells import CELLS


class Outcomes:
    """Counts the outcomes of parametrised tests by property and cell."""

    def __init__(self):
        self.counts: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and not report.skipped:
            return
        name, _, case = report.nodeid.split("::")[-1].partition("[")
        # The longest name that fits: `ln_lstm` is not `lstm`.
        cells = [cell for cell in CELLS if cell in case.rstrip("]").replace(",", "-").split("-")]
        if cells:
            self.counts[name.removeprefix("test_")][max(cells, key=len)][report.outcome] += 1


def main() -> int:
    outcomes = Outcomes()
    tests = Path(__file__).parents[1] / "cells" / "test_cells.py"
    status = pytest.main(["-q", "-p", "no:cacheprovider", str(tests)], plugins=[outcomes])
    print("| property | " + " | ".join(CELLS) + " |")
    print("|---|" + "---|" * len(CELLS))
    for name, cells in outcomes.counts.items():
        row = [_show(cells[cell]) for cell in CELLS]
        print(f"| {name.replace('_', ' ')} | " + " | ".join(row) + " |")
    return int(status)


def _show(counts: Counter) -> str:
    if counts["failed"]:
        return f"**{counts['failed']} failed**"
    return str(counts["passed"]) if counts["passed"] else "-"


if __name__ == "__main__":
    sys.exit(main())
