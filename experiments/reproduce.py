"""Reproduces rows of the papers' tables: prepares, trains, evaluates, and shows the papers' figures beside.

Examples:
  python -m experiments.reproduce --list
  python -m experiments.reproduce ha-ptb ln_hyperlstm_ptb --epochs 25 --from-dir ~/ptb --seeds 2
  python -m experiments.reproduce ha-ptb lstm_ptb --recipe published --seeds 2
  python -m experiments.reproduce su-ptb --scale 0.1 --seeds 4

The same command resumes an interrupted run from its last checkpoint. Checkpoints, logs, records and a page go
to --runs. What the repository has recorded is not trained again, and changes only with --record and --render.
Options of fairseq-train may follow ``--``.
"""

import argparse
import sys
from pathlib import Path

import torch

from experiments import page, running
from experiments.plan import LIMITS, Run
from experiments.records import Record
from experiments.tables import TABLES, Table
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGES = ROOT / "experiments" / "records", ROOT / "docs" / "results"


def main(argv=None) -> None:
    """Executes a command line. Raises UsageError for anything that the user can fix."""
    args, extra = _parse(list(sys.argv[1:] if argv is None else argv))
    if args.list or args.table is None:
        for table in [TABLES[args.table]] if args.table else TABLES.values():
            _list(table)
        return
    table = TABLES[args.table]
    if args.render:
        print(f"wrote {page.render(table, RECORDS / table.name, PAGES)}")
        return
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    _execute(_runs(table, args, extra), args)


def _execute(runs: list[Run], args: argparse.Namespace) -> None:
    """Executes runs one after another, and renders the page of their records.

    Raises:
        UsageError: a run failed.
    """
    table, failed, trained = runs[0].table, [], False
    for run in runs:
        path, own = run.record(RECORDS), run.record(args.runs)
        if not args.again and not own.exists() and _is_recorded(run, path):
            print(f"{_summary(run, Record.load(path))}; recorded already, nothing trained", flush=True)
            continue
        try:
            record = running.execute(run, own, args)
        except UsageError as error:
            failed.append(f"{run.name} ({error})")
            print(f"{table.name} {run.name}: {error}", file=sys.stderr, flush=True)
            continue
        trained = True
        print(_summary(run, record), flush=True)
        if args.record:
            record.remark = args.record if isinstance(args.record, str) else record.remark
            record.save(path)
    if trained:
        places = (RECORDS, PAGES) if args.record else (args.runs, args.runs)
        print(f"wrote {page.render(table, places[0] / table.name, places[1])}")
    if failed:
        raise UsageError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")


def _is_recorded(run: Run, path: Path) -> bool:
    """Whether the repository has a finished record of a run with its recipe, number type and budget."""
    if not path.exists():
        return False
    record = Record.load(path)
    same_recipe = tuple(record.options.get("extra", ())) == run.extra and record.precision == run.precision
    return record.state == "finished" and same_recipe and record.budget == dict(run.budget)


def _parse(words: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    at = words.index("--") if "--" in words else len(words)
    parser = make_parser("", __doc__)
    parser.prog, add = "python -m experiments.reproduce", parser.add_argument
    add("table", nargs="?", metavar="TABLE", choices=TABLES, help=f"one of {', '.join(TABLES)}")
    add("rows", nargs="*", metavar="ROW", help="rows of the table (default: all)")
    add("--list", action="store_true", help="print the tables, their rows and the papers' figures")
    add("--render", action="store_true", help="write the repository's page from its records")
    help = "make the finished runs records of the repository, with a remark for the reader"
    add("--record", nargs="?", const=True, metavar="REMARK", help=help)
    add("--again", action="store_true", help="train what the repository has recorded, too")
    help = "the paper's, or that of the row's run in the repository, with its budget (default: paper)"
    add("--recipe", choices=("paper", "published"), default="paper", help=help)
    add("--seeds", nargs="+", type=int, default=[1], metavar="N", help="one run for each (default: 1)")
    add("--epochs", type=int, metavar="N", help="stop after N epochs (default: the recipe's)")
    add("--updates", type=int, metavar="N", help="stop after N updates")
    add("--hours", type=float, metavar="H", help="stop after H hours of training")
    add("--patience", type=int, metavar="N", help="stop after N validations without a better figure")
    add("--scale", type=float, default=1.0, metavar="S", help="shrink width, data and budget, in (0, 1]")
    add("--precision", choices=("float32", "bfloat16"), help="type of the training (default: float32)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the training")
    add("--threads", type=int, default=1, metavar="N", help="threads of a training on the CPU (default: 1)")
    add("--from-dir", type=Path, metavar="DIR", help="directory of the corpus's files (default: download)")
    add("--data", type=Path, default=Path("data-bin"), metavar="DIR", help="prepared corpora (%(default)s)")
    help = "directory of checkpoints, logs, records and pages (default: %(default)s)"
    add("--runs", type=Path, default=Path("runs/reproduce"), metavar="DIR", help=help)
    return parser.parse_args(words[:at]), tuple(words[at + 1 :])


def _runs(table: Table, args: argparse.Namespace, extra: tuple[str, ...]) -> list[Run]:
    """Returns the runs that a command line names; UsageError for unknown rows."""
    rows = [table.row(name) for name in args.rows] or list(table.rows)
    budget = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    recipes = {row.name: (args.precision or "float32", budget, extra) for row in rows}
    if args.recipe == "published":
        for name in recipes:
            precision, limits, further = _published(table, name, args.scale)
            recipes[name] = (args.precision or precision, limits | budget, (*further, *extra))
    return [Run(table, row, seed, args.scale, *recipes[row.name]) for seed in args.seeds for row in rows]


def _published(table: Table, row: str, scale: float) -> tuple[str, dict, tuple[str, ...]]:
    """Returns type, budget and further options of the repository's run of a row."""
    for record in page.read_records(table, RECORDS / table.name):
        if (record.row, record.scale) == (row, scale):
            return record.precision, record.budget, tuple(record.options.get("extra", ()))
    raise UsageError(f"--recipe published: the repository has no run of {row} at scale {scale:g}")


def _list(table: Table) -> None:
    """Prints the rows with the papers' figures and budgets, and what an epoch costs where it was measured."""
    print(f"{table.name}: {table.title} ({table.scoring.unit})")
    costs = page.costs_of(page.read_records(table, RECORDS / table.name), RECORDS / table.name)
    for row in table.rows:
        words = [f"{name} {value:g}" for name, value in row.reported.items()]
        words += [f"{n:,} {unit}" for n, unit in ((row.epochs, "epochs"), (row.updates, "updates")) if n]
        if cost := costs.get(row.name):
            hours = (cost.updates_per_epoch or 1) * cost.seconds_per_update / 3600
            each = "an epoch" if cost.updates_per_epoch else "an update"
            where = f"{cost.threads} thread" if cost.threads else cost.device
            words.append(f"{hours:.2g} h {each} ({where}, {cost.precision})")
        print(f"  {row.name:<28} {row.parameters:>12,}  {'; '.join(words)}")


def _summary(run: Run, record: Record) -> str:
    figures = ", ".join(f"{name} {value:g}" for name, value in record.figures.items())
    done = f"{record.epochs:g} epochs, {record.updates:,} updates, {record.seconds / 3600:.2f} h"
    return f"{run.table.name} {run.name}: {record.state}, {done}; {figures}"


if __name__ == "__main__":
    sys.exit(cli.run(main))
