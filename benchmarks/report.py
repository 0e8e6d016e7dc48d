"""Command lines and reports of the benchmarks.

A report is a dictionary of plain values: ``command``, ``machine``, ``settings``, ``rows`` (a dictionary for
each line of the table, by the headings) and ``notes`` (sentences below it).
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType

from tabulate import tabulate

from benchmarks.machine import BenchConfig, describe_machine
from rhhn_fairseq.cli.parsers import StrictParser, add_fields, read_fields
from rhhn_fairseq.cli.running import run
from rhhn_fairseq.files import check_output, replace_file

ROUNDS = "rounds"
"""What was measured in each round: in JSON, not in the table."""


def start(module: str) -> None:
    """Runs the benchmark of this name in ``sys.modules`` as a program, and exits with its status."""
    # fairseq's modules let the details of every library through.
    logging.getLogger().setLevel(logging.WARNING)
    sys.exit(run(lambda: main(sys.modules[module], sys.argv[1:])))


def main(module: ModuleType, argv: list[str]) -> None:
    """Measures what a command line asks for and prints the table.

    Raises:
        UsageError: a value that cannot work, or a contender that computes wrong results.
    """
    # An abbreviated --smoke would be accepted, but not seen below.
    parser = StrictParser(
        prog=f"python -m {module.__spec__.name}", description=module.__doc__, allow_abbrev=False
    )
    add_fields(parser, module.Config())
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    if "--smoke" in argv:
        parser.set_defaults(**module.SMOKE)
    args = parser.parse_args(argv)
    check_output("--json", args.json)
    show(module.run(read_fields(module.Config, args)), args.json)


def make_report(command: str, config: BenchConfig, rows: list[dict], notes: Sequence[str] = ()) -> dict:
    """Returns the report of a run; must be called while the run's threads are set."""
    machine, settings = describe_machine(config.device), asdict(config)
    return {"command": command, "machine": machine, "settings": settings, "rows": rows, "notes": list(notes)}


def show(report: dict, path: str | None) -> None:
    """Prints a report and writes it to ``path`` as JSON. Raises UsageError if the file system refuses."""
    print(render(report))
    if path is not None:
        with replace_file(path) as file:
            file.write((json.dumps(report, indent=2) + "\n").encode())


def render(report: dict) -> str:
    """Returns a Markdown table under a line about the machine and one about the settings."""
    lines = [_listed(report["machine"]), _listed(report["settings"]), ""]
    titles = dict.fromkeys(title for row in report["rows"] for title in row if title != ROUNDS)
    table = [[title, *(_cell(row.get(title)) for row in report["rows"])] for title in titles]
    # A column in which no row has a value is left out.
    table = [texts for texts in table if set(texts[1:]) != {"-"}]
    head, *body = zip(*table, strict=True)
    lines.append(tabulate(body, headers=head, tablefmt="github", disable_numparse=True))
    return "\n".join([*lines, *([""] if report["notes"] else []), *report["notes"]])


def _cell(value) -> str:
    """Returns a value as text: None as a dash, the median and range of a ratio as 1.25 (1.00 to 3.00)."""
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"
    if not isinstance(value, float):
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else value
    return f"{value:.1e}" if 0 < value < 0.001 else f"{value:.3f}" if value < 1 else f"{value:,.1f}"


def _listed(values: dict) -> str:
    texts = {key: ",".join(v) if isinstance(v, tuple | list) else v for key, v in values.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items() if text != "")
