"""Compares cells at equal parameters, equal time and an equal search for good options, on a prepared text.

Examples:
  python -m experiments.tune data-bin/ptb lstm ln_hyperlstm hyperrhn --seconds 120 --trials 8
  python -m experiments.tune data-bin/ptb rhn:rhn-depth=5 lstm:layers=2 --parameters 300000

Every trial is kept, failures included. The same command continues where it was stopped; you may add
systems and trials to it.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from benchmarks.machine import commit, versions
from experiments import comparison, records
from experiments.study import Budget, Trial, Tuning
from experiments.systems import System
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.parsers import StrictParser
from rhhn_fairseq.compat import ranges
from rhhn_fairseq.data.text.words import load_vocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import make_directory
from rhhn_fairseq.staging import lock, replace_file

DEFAULT = Budget()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options."""
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="directory that `rhhn prepare` made")
    add("systems", nargs="+", metavar="SYSTEM", help="CELL, or CELL:option=value,option=value")
    add("--parameters", type=int, default=DEFAULT.parameters, help="largest number of a system (%(default)s)")
    add("--seconds", type=float, default=DEFAULT.seconds, help="processor time of a trial (%(default)g)")
    add("--symbols", type=int, help="symbols that a trial reads; replaces --seconds")
    add("--trials", type=int, default=DEFAULT.trials, help="trials of every system (%(default)s)")
    add("--length", type=int, default=DEFAULT.length, help="symbols of a lane in an update (%(default)s)")
    add("--best", type=int, default=4, help="systems trained again with other seeds (%(default)s)")
    add("--repeats", type=int, default=3, help="other seeds for each of these (%(default)s)")
    add("--seed", type=int, default=1, help="seed of the search (%(default)s)")
    add("--threads", type=int, default=1, help="threads of a training (%(default)s)")
    add("--directory", type=Path, default=Path("runs/tune"), help="of the trials (%(default)s)")
    add("--page", type=Path, metavar="FILE.md", help="also write the page here, and its data beside it")


def run(args: argparse.Namespace, command: list[str]) -> None:
    """Executes a command line; finished work is not repeated.

    Raises:
        UsageError: anything that the user can fix; a system of which no trial succeeded, after the page was
            written.
    """
    for name, smallest in (("best", 0), ("repeats", 0), ("threads", 1), ("seed", 0)):
        if getattr(args, name) < smallest:
            raise UsageError(f"--{name} {getattr(args, name)} is too small, the smallest is {smallest}")
    ranges.check({"--seed": args.seed + args.repeats})
    if args.page is not None and args.page.suffix != ".md":
        raise UsageError(
            f"--page {args.page}: a page ends in .md; its figures are written beside it as .json"
        )
    budget = Budget(args.parameters, args.seconds, args.trials, args.length, args.symbols)
    systems = [System.parse(text) for text in args.systems]
    names = [system.name for system in systems]
    if again := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{again[0]} is named twice")
    vocabulary = load_vocabulary(args.data)
    torch.set_num_threads(args.threads)
    make_directory(args.directory)
    with lock(args.directory / ".lock", f"{args.directory}: another process works here; wait for it"):
        tunings = [
            Tuning(system, budget, args.data, args.directory, args.seed, args.threads) for system in systems
        ]
        total = len(tunings) * budget.trials + min(args.best, len(tunings)) * args.repeats
        done = sum(len(tuning.trials()) for tuning in tunings)
        with tqdm(total=total, initial=done, dynamic_ncols=True, unit="training") as bar:
            for tuning in tunings:
                bar.set_description(tuning.system.name)
                tuning.run(lambda trial: _show(bar, trial))
            repeats = _repeat_best(tunings, args, bar)
        results = {
            "corpus": vocabulary.corpus or str(args.data),
            "budget": dataclasses.asdict(budget),
            "seed": args.seed,
            "machine": f"{records.describe_machine('cpu')}, threads of a training: {args.threads}",
            "versions": versions(),
            "commit": commit(),
            "day": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "experiments.tune", *command]),
            "systems": [
                comparison.entry_of(tuning.system, tuning.trials(), repeats.get(tuning.system.name, []))
                for tuning in tunings
            ],
        }
    page = args.directory / "comparison.md" if args.page is None else args.page
    records.write_json(page.with_suffix(".json"), results)
    with replace_file(page, follow=args.page is not None) as file:
        file.write(comparison.render(results).encode())
    print(page)
    for tuning in tunings:
        if tuning.best() is None:
            raise UsageError(f"{tuning.system.name}: no trial succeeded ({tuning.trials()[-1].problem})")


def _show(bar: tqdm, trial: Trial) -> None:
    bar.set_postfix_str(trial.problem if trial.bpc is None else f"valid {trial.bpc:.4f} bpc")
    bar.update()


def _repeat_best(tunings: list[Tuning], args: argparse.Namespace, bar: tqdm) -> dict[str, list[dict]]:
    """Trains the best systems with other seeds; returns the figures by the systems' names."""
    ranked = sorted(
        ((best.bpc, i) for i, tuning in enumerate(tunings) if (best := tuning.best()) is not None),
        key=lambda pair: pair[0],
    )
    repeats: dict[str, list[dict]] = {}
    for _, i in ranked[: args.best]:
        tuning = tunings[i]
        best = tuning.best()
        assert best is not None
        for k in range(1, args.repeats + 1):
            bar.set_description(f"{tuning.system.name}, seed {args.seed + k}")
            figures = tuning.repeat(best, args.seed + k)
            repeats.setdefault(tuning.system.name, []).append(figures)
            bar.set_postfix_str(figures.get("problem") or f"test {figures['test']:.4f} bpc")
            bar.update()
    return repeats


def main(argv=None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    description, _, rest = __doc__.partition("\n\n")
    parser = StrictParser(
        prog="python -m experiments.tune",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    run(parser.parse_args(words), words)


if __name__ == "__main__":
    sys.exit(cli.run(main))
