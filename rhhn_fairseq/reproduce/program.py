"""The program ``rhhn reproduce``: its options, and the runs that they ask for."""

import argparse
import math
import os
import shlex
import sys
import traceback
from pathlib import Path

import torch

from rhhn_fairseq.adaptations import ranges
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.lines import read_lines
from rhhn_fairseq.reproduce import report, running
from rhhn_fairseq.reproduce.plan import PRECISIONS, Budget, Run
from rhhn_fairseq.reproduce.running import Places
from rhhn_fairseq.reproduce.tables import TABLES, Table, table_of

LOWEST_PRIORITY = 19


def run(words: list[str], parser: argparse.ArgumentParser) -> None:
    """Executes a command line.

    Args:
        words: the command line after the program's name. parser: knows the program's name and what it does.

    Raises:
        UsageError: anything that the user can fix.
    """
    add_options(parser)
    args, extra = _parse(parser, words)
    if args.list:
        _list([table_of(args.table)] if args.table else list(TABLES.values()))
    elif args.queue:
        _refuse_options_beside_a_queue(args, extra, parser)
        _work_off(args.queue, parser, args.dry_run)
    elif args.table is None:
        raise UsageError(f"no table is named, choose from {', '.join(TABLES)}, or give --list")
    else:
        _reproduce(args, extra, words)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options."""
    add = parser.add_argument
    add("table", nargs="?", metavar="TABLE", help=f"one of {', '.join(TABLES)}")
    add("rows", nargs="*", metavar="ROW", help="rows of the table (default: all)")
    # What is done in place of a training.
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--list", action="store_true", help="print the tables, their rows and the papers' figures")
    instead("--render", action="store_true", help="write the page from the existing records, run nothing")
    instead("--dry-run", action="store_true", help="print the commands, run nothing")
    instead(
        "--adopt", nargs=2, type=Path, metavar=("LOG", "DIR"), help="record a training that was run by hand"
    )
    instead(
        "--cost",
        action="store_true",
        help="train a few updates of each row and record their time (default: 8 updates)",
    )
    add(
        "--queue",
        type=Path,
        metavar="FILE",
        help="run the lines of a file one after another, at low priority",
    )
    add(
        "--remark",
        default="",
        metavar="TEXT",
        help="a note for the reader, stored with the run or the cost",
    )
    add(
        "--seeds",
        nargs="+",
        type=_seed,
        default=[1],
        metavar="N",
        help="seeds; one run for each (default: 1)",
    )
    add("--epochs", type=int, metavar="N", help="stop after N epochs (default: the recipe's)")
    add("--updates", type=int, metavar="N", help="stop after N updates")
    add("--hours", type=float, metavar="H", help="stop after H hours of training")
    add("--patience", type=int, metavar="N", help="stop after N validations without a better figure")
    add(
        "--protocols",
        nargs="+",
        default=[],
        metavar="P",
        help="evaluate by these protocols only (default: all)",
    )
    add("--scale", type=float, default=1.0, metavar="S", help="shrink width, data and budget, in (0, 1]")
    add(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="type of the training (default: %(default)s)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of the training (default: %(default)s)",
    )
    add("--threads", type=int, default=1, metavar="N", help="threads of a training on the CPU (default: 1)")
    add("--from-dir", type=Path, metavar="DIR", help="directory of the corpus's files (default: download)")
    add(
        "--data",
        type=Path,
        default=Path("data-bin"),
        metavar="DIR",
        help="directory of prepared corpora (default: %(default)s)",
    )
    add(
        "--runs",
        type=Path,
        default=Path("runs/reproduce"),
        metavar="DIR",
        help="directory of checkpoints and logs (default: %(default)s)",
    )
    add(
        "--results",
        type=Path,
        default=Path("docs/results"),
        metavar="DIR",
        help="directory of records and pages (default: %(default)s)",
    )


def _seed(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        # argparse takes every word after --seeds for a seed.
        reason = f"{word} is not a whole number; give TABLE and every ROW before --seeds"
        raise argparse.ArgumentTypeError(reason) from None


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    extra: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, extra = words[:at], words[at + 1 :]
    args = parser.parse_args(words)
    for name, smallest in (("epochs", 1), ("updates", 1), ("patience", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise UsageError(f"--{name} {value} is too small, the smallest is {smallest}")
    if args.hours is not None and not 0 < args.hours < math.inf:
        raise UsageError(f"--hours {args.hours:g} is not a number above 0")
    if any(seed < 0 for seed in args.seeds):
        raise UsageError(f"--seeds {min(args.seeds)} is too small, the smallest is 0")
    ranges.check({"--seed": max(args.seeds)})
    return args, tuple(extra)


def _refuse_options_beside_a_queue(
    args: argparse.Namespace, extra: tuple[str, ...], parser: argparse.ArgumentParser
) -> None:
    """Raises UsageError for a table or an option, other than --dry-run, that the lines of the queue give."""
    if args.table:
        raise UsageError("--queue takes its tables and rows from the file; name none besides")
    if extra:
        raise UsageError(f"-- {shlex.join(extra)}: --queue takes its options from the file")
    options = [action for action in parser._actions if action.option_strings]
    for action in options:
        given = action.dest != "help" and getattr(args, action.dest) != action.default
        if given and action.dest not in ("queue", "dry_run"):
            raise UsageError(f"{action.option_strings[0]}: --queue takes its options from the file")


def _runs(args: argparse.Namespace, extra: tuple[str, ...]) -> list[Run]:
    """Returns the runs that a command line names; UsageError for unknown tables, rows and protocols."""
    table = table_of(args.table)
    if args.from_dir is not None and table.corpus == "none":
        raise UsageError(f"--from-dir {args.from_dir}: {table.name} reads no files, its data are generated")
    rows = [table.row(name) for name in args.rows] or list(table.rows)
    budget = Budget(args.epochs, args.updates, args.hours, args.patience)
    protocols = tuple(args.protocols)
    return [
        Run(table, row, seed, args.scale, args.precision, budget, extra, protocols)
        for seed in args.seeds
        for row in rows
    ]


def _reproduce(args: argparse.Namespace, extra: tuple[str, ...], words: list[str]) -> None:
    table, runs = table_of(args.table), _runs(args, extra)
    places = Places(args.runs, args.data, args.results, args.from_dir)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available() and not args.dry_run:
        raise UsageError("--device cuda: torch finds no GPU here; choose from auto, cpu")
    if args.dry_run:
        for run in runs:
            for command in running.commands(run, places, device):
                print(shlex.join(running.shell_words(command)))
        return
    if args.remark and args.render:
        raise UsageError("--remark is kept with a run or a cost, and --render makes neither")
    failed: list[str] = []
    # For the page: only a command with a run that came to its end.
    command = None
    if args.adopt and len(runs) != 1:
        raise UsageError(f"--adopt takes over one run, {len(runs)} are named; name one row and one seed")
    for run in [] if args.render else runs:
        try:
            if args.cost:
                cost = running.measure_cost(run, places, args.threads, device, args.remark)
                print(f"{table.name} {run.row.name}: {cost.seconds_per_update:.3g} s an update", flush=True)
                continue
            if args.adopt:
                record = running.adopt(run, places, *args.adopt, threads=args.threads, device=device)
            else:
                record = running.execute(run, places, args.threads, device)
        except UsageError as error:
            if len(runs) == 1:
                raise
            failed.append(run.name)
            print(f"{table.name} {run.name}: {error}", file=sys.stderr, flush=True)
            continue
        command = shlex.join(["rhhn", "reproduce", *words])
        if args.remark:
            record.remark = args.remark
            record.save(places.record(run))
        print(_summary(run, record), flush=True)
        failed += [run.name] if record.state == "failed" else []
    page = report.render(table, args.results, command)
    print(f"wrote {page}")
    if failed:
        raise UsageError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")


def _work_off(queue: Path, parser: argparse.ArgumentParser, dry_run: bool) -> None:
    """Executes every line of a queue in turn; a line that fails does not stop the next from running."""
    problems = []
    numbered = [(number, line.strip()) for number, line in enumerate(read_lines(queue), 1)]
    numbered = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    lines = [line for _, line in numbered]
    # A mistake in the last line is reported before hours of work on the first.
    parsed = [_parse_line(queue, number, line, parser) for number, line in numbered]
    if not dry_run:
        os.nice(LOWEST_PRIORITY)
    for number, (line, (args, extra, words)) in enumerate(zip(lines, parsed, strict=True), 1):
        print(f"[{number}/{len(lines)}] {line}", flush=True)
        args.dry_run |= dry_run
        try:
            _reproduce(args, extra, words)
        except Exception as error:
            if not isinstance(error, UsageError):
                traceback.print_exc()
            problems.append(f"{line}: {error}")
            print(f"failed: {error}", file=sys.stderr, flush=True)
    if problems:
        raise UsageError(f"{queue}: {len(problems)} of {len(lines)} lines failed; first: {problems[0]}")


def _parse_line(queue: Path, number: int, line: str, parser: argparse.ArgumentParser):
    """Returns the arguments of a line of the queue: parsed ones, those after --, and its words."""
    try:
        words = shlex.split(line)
        args, extra = _parse(parser, words)
        if args.queue or args.list or args.table is None:
            raise UsageError("names no table")
        _runs(args, extra)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{queue}: line {number}: {error}: {line}") from error
    except SystemExit as error:
        raise UsageError(f"{queue}: line {number} asks for help: {line}") from error
    return args, extra, words


def _list(tables: list[Table]) -> None:
    for table in tables:
        print(f"{table.name}: {table.title} ({table.scoring.unit})")
        for row in table.rows:
            figures = ", ".join(f"{name} {value:g}" for name, value in row.reported.items())
            budget = (
                f"{row.epochs:,} epochs" if row.epochs else f"{row.updates:,} updates" if row.updates else ""
            )
            print(f"  {row.name:<28} {row.parameters:>12,}  {'; '.join(filter(None, (figures, budget)))}")


def _summary(run: Run, record) -> str:
    figures = ", ".join(f"{name} {value:g}" for name, value in record.figures.items())
    done = f"{record.epochs} epochs, {record.updates:,} updates, {record.seconds / 3600:.2f} h"
    return (
        f"{run.table.name} {run.name}: {record.state}, {done}"
        + (f"; {figures}" if figures else "")
        + (f"; {record.problem}" if record.problem else "")
    )
