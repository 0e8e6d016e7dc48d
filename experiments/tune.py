"""Compares cells at equal parameters, equal time and an equal search for good options, on a prepared text.

Examples:
  python -m experiments.tune data-bin/ptb lstm ln_hyperlstm hyperrhn --seconds 120 --trials 8
  python -m experiments.tune data-bin/ptb rhn:rhn-depth=5 lstm:layers=2 --parameters 300000

Every trial is kept, failures included. The same command continues where it was stopped; you may add
systems and trials to it. The table and its data are comparison.md and comparison.json in --directory.
"""

import argparse
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optuna
import optuna.storages.journal
from tqdm import tqdm

from benchmarks.machine import commit
from experiments import records
from experiments.plan import USER_DIR, flags
from experiments.running import BPC, Program
from experiments.systems import START, System, build, seconds_per_update, width_of
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.describe import count_parameters
from rhhn_fairseq.cli.parsers import StrictParser
from rhhn_fairseq.data.common.manifest import versions
from rhhn_fairseq.data.text.words import load_vocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock, no_link, replace_file
from rhhn_fairseq.inspection.training_logs import parse_line
from rhhn_fairseq.programs import interpreter

FEWEST_UPDATES = 2
RANDOM_TRIALS = 10
"""Trials before Optuna's TPE takes over from random search; its own default."""


class Tuning:
    """The search for one system's options, in a file that Optuna keeps.

    Every trial gets the same time, counted in updates: the seconds of the budget divided by those of one
    update, measured before the trial, so that what else the machine does changes no figure. With --symbols
    every trial reads the same text, which compares recipes of one cell.

    A trial is a dictionary: ``options`` of fairseq-train, ``parameters``, ``updates``,
    ``seconds_per_update``, ``bpc`` (valid, ``carry:32``; None if it failed) and ``problem``.

    Raises:
        UsageError: the directory's trials had other settings.
    """

    def __init__(self, system: System, args: argparse.Namespace, vocab_size: int):
        self.system, self.args, self.vocab_size = system, args, vocab_size
        self.directory = args.directory / re.sub(r"[^A-Za-z0-9_.=-]+", "_", system.name)
        self.directory.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = optuna.storages.journal.JournalFileBackend(str(self.directory / "trials.log"))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(file), study_name=system.name, load_if_exists=True
        )
        names = ("parameters", "seconds" if args.symbols is None else "symbols", "length", "seed", "data")
        settings = {name: getattr(args, name) for name in names} | {"data": str(args.data)}
        stored = self.study.user_attrs.get("settings", settings)
        if changed := ", ".join(f"{key} {stored[key]}" for key in stored if stored[key] != settings.get(key)):
            raise UsageError(
                f"{self.directory}: its trials have {changed}; give the same or another --directory"
            )
        self.study.set_user_attr("settings", settings)
        # A trial that was stopped is made again, with its options.
        state = optuna.trial.TrialState
        for trial in self.study.get_trials(states=(state.RUNNING,)):
            self.study.tell(trial.number, state=state.FAIL)
            self.study.enqueue_trial(trial.params)
        if not self.study.trials:
            self.study.enqueue_trial({name: START[name] for name in system.space()})

    def trials(self) -> list[dict]:
        """Returns the trials that ended, in order, without those that were stopped."""
        return [trial.user_attrs["trial"] for trial in self.study.trials if "trial" in trial.user_attrs]

    def best(self) -> dict | None:
        """Returns the trial with the fewest bits per character; None if all failed."""
        return min((t for t in self.trials() if t["bpc"] is not None), key=lambda t: t["bpc"], default=None)

    def run(self, show: Callable[[dict], None]) -> None:
        """Runs the remaining trials, and calls ``show`` after each."""
        while len(self.trials()) < self.args.trials:
            # A search that is resumed draws what an uninterrupted one would have drawn.
            seed = np.random.SeedSequence([self.args.seed, len(self.trials())]).generate_state(1)
            sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, seed=int(seed[0]))
            self.study.sampler = sampler
            trial = self.study.ask(self.system.space())
            options = {"cell": self.system.cell} | self.system.options | trial.params
            done = self._train(options, self.args.seed, self.directory / f"trial-{trial.number}.log")
            trial.set_user_attr("trial", done)
            failed = optuna.trial.TrialState.FAIL if done["bpc"] is None else None
            self.study.tell(trial, done["bpc"], state=failed)
            show(done)

    def repeat(self, trial: dict, seed: int) -> dict:
        """Trains a trial's options with another seed, and scores the model on the test split too.

        Returns:
            ``seed``, ``options``, and bits per character ``valid`` and ``test``; or ``problem`` in their
            place, if the training failed. Optuna's file keeps them, so that they are not made again.
        """
        figures = self.study.user_attrs.get(f"seed {seed}", {})
        if figures.get("options") != trial["options"]:
            directory = self.directory / f"seed-{seed}"
            directory.mkdir(exist_ok=True)
            # Left by an earlier trial, or by one that was stopped; fairseq would resume, or refuse to start.
            for left in directory.glob("checkpoint*.pt"):
                left.unlink()
            done = self._train(trial["options"], seed, directory / "train.log", directory, trial)
            figures = {"seed": seed, "options": trial["options"]}
            if done["bpc"] is None:
                figures["problem"] = done["problem"]
            else:
                figures |= {"valid": done["bpc"], "test": self._score(directory)}
            self.study.set_user_attr(f"seed {seed}", figures)
        return figures

    def _train(
        self, options: dict, seed: int, log: Path, save_dir: Path | None = None, like: dict | None = None
    ) -> dict:
        """Trains a model and returns the trial; with ``like``, for as many updates as that trial."""
        done = {"options": options, "parameters": 0, "updates": 0, "seconds_per_update": 0.0, "bpc": None}
        try:
            width = options.get("hidden_size") or width_of(options, self.args.parameters, self.vocab_size)
        except UsageError as error:
            return done | {"problem": str(error)}
        options = options | {"hidden_size": width}
        if like is not None:
            seconds, updates = like["seconds_per_update"], like["updates"]
        else:
            seconds = seconds_per_update(options, self.vocab_size, self.args.length)
            updates = int(self.args.seconds / seconds)
            if self.args.symbols is not None:
                updates = self.args.symbols // (options["batch_size"] * self.args.length)
            updates = max(FEWEST_UPDATES, updates)
        words = {"arch": "char_lm", "lr_scheduler": "polynomial_decay"} | options
        words |= {"tokens_per_sample": self.args.length, "seed": seed, "log_format": "json"}
        # Reading a batch takes microseconds; a process for it would be started for every validation.
        words |= {"num_workers": 0, "max_update": updates, "no_save": save_dir is None}
        # The rate goes to zero within the trial.
        words["total_num_update"] = updates if words["lr_scheduler"] == "polynomial_decay" else None
        if save_dir is not None:
            words |= {"save_dir": save_dir, "no_last_checkpoints": True, "no_save_optimizer_state": True}
        figures, last = [], ""
        with open(log, "w", buffering=1, opener=no_link) as file, self._program("train", words) as program:
            for line in program:
                file.write(line)
                last = line.strip() or last
                record = parse_line(line)
                if record is not None and record.subset == "valid" and "bpc" in record.figures:
                    figures.append(record.figures["bpc"])
        bpc = min(figures) if figures and not program.status else None
        problem = "" if bpc is not None else last or f"fairseq-train ended with status {program.status}"
        parameters = count_parameters(build(options, self.vocab_size, "meta"))
        done |= {"options": options, "parameters": parameters, "updates": updates}
        return done | {"seconds_per_update": seconds, "bpc": bpc, "problem": problem}

    def _program(self, name: str, words: dict) -> Program:
        command = interpreter("-m", f"fairseq_cli.{name}", str(self.args.data), "--user-dir", USER_DIR)
        return Program([*command, *flags(words | {"cpu": True})], threads=1)

    def _score(self, directory: Path) -> float:
        """Returns the bits per character of the test split. Raises UsageError if the program fails."""
        words = {"path": directory / "checkpoint_best.pt", "gen_subset": "test", "protocol": "carry:32"}
        with self._program("eval_lm", words) as running:
            text = "".join(running)
        figures = re.findall(BPC, text)
        if running.status or not figures:
            raise UsageError(f"{directory}: {(text.strip().splitlines() or ['no figure'])[-1]}")
        return float(figures[-1])


def run(args: argparse.Namespace, command: list[str]) -> None:
    """Executes a command line; finished work is not repeated.

    Raises:
        UsageError: anything that the user can fix; a system of which no trial succeeded, after the page was
            written.
    """
    systems = {system.name: system for system in map(System.parse, args.systems)}
    vocabulary = load_vocabulary(args.data)
    args.directory.mkdir(parents=True, exist_ok=True)
    with lock(args.directory / ".lock", f"{args.directory}: another process works here; wait for it"):
        size = len(vocabulary.model_indices())
        tunings = [Tuning(system, args, size) for system in systems.values()]
        left = [max(0, args.trials - len(tuning.trials())) for tuning in tunings]
        again = min(args.best, len(tunings)) * args.repeats
        longest = (sum(left) + again) * args.seconds / 60
        told = "" if args.symbols else f": at most about {longest:,.0f} minutes of updates"
        print(f"{sum(left)} trainings, then {again} with other seeds unless they are made{told}", flush=True)
        with tqdm(total=sum(left) + again, dynamic_ncols=True, unit="training") as bar:

            def show(done: dict) -> None:
                bar.set_postfix_str(done.get("problem") or f"valid {done.get('bpc', done.get('valid'))} bpc")
                bar.update()

            for tuning in tunings:
                bar.set_description(tuning.system.name)
                tuning.run(show)
            ranked = sorted((t for t in tunings if t.best()), key=lambda tuning: tuning.best()["bpc"])
            repeats: dict[str, list[dict]] = {name: [] for name in systems}
            for tuning in ranked[: args.best]:
                for seed in range(args.seed + 1, args.seed + args.repeats + 1):
                    bar.set_description(f"{tuning.system.name}, seed {seed}")
                    repeats[tuning.system.name].append(tuning.repeat(tuning.best(), seed))
                    show(repeats[tuning.system.name][-1])
        results = {
            "corpus": vocabulary.corpus or str(args.data),
            "budget": {name: getattr(args, name) for name in BUDGET},
            "seed": args.seed,
            "machine": records.describe_machine("cpu"),
            "versions": versions(*records.PACKAGES),
            "commit": commit(),
            "day": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "experiments.tune", *command]),
            "systems": [
                {"system": name, "trials": tuning.trials(), "repeats": repeats[name]}
                for name, tuning in zip(systems, tunings, strict=True)
            ],
        }
    records.write_json(args.directory / "comparison.json", results)
    with replace_file(args.directory / "comparison.md", follow=False) as file:
        file.write(render(results).encode())
    print(args.directory / "comparison.md")
    for tuning in tunings:
        if tuning.best() is None:
            raise UsageError(f"{tuning.system.name}: no trial succeeded ({tuning.trials()[-1]['problem']})")


BUDGET = ("parameters", "seconds", "trials", "length", "symbols")
HEADS = ["system", "parameters", "ms per update", "symbols read", "trials (failed)", "valid, best"]
HEADS += ["valid, median", "valid, other seeds", "test", "options of the best"]


def render(results: dict) -> str:
    """Returns the page of a comparison, whose data ``run`` stores as ``comparison.json``."""
    budget = results["budget"]
    by_time = budget["symbols"] is None
    each = f"{budget['seconds']:g} s of processor time" if by_time else f"{budget['symbols']:,} symbols"
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"# Systems at {budget['parameters']:,} parameters and equal {'time' if by_time else 'text'}",
        "",
        f"{results['corpus']}. Every system has at most {budget['parameters']:,} parameters, and "
        f"{budget['trials']} trials of {each}. The first trial has the starting values; those up to the "
        f"{RANDOM_TRIALS}th are drawn at random, the others by Optuna's TPE (seed {results['seed']}). The "
        "width follows from the parameters. Bits per character of the valid split, protocol carry:32. The "
        "figures of other seeds, and those of the test split, are of the best trial's options. No system has "
        "converged: the table compares what a short training gives.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    for entry in sorted(results["systems"], key=lambda entry: min(map(_bpc, entry["trials"]))):
        best, count = min(entry["trials"], key=_bpc), len(entry["trials"])
        good = [trial["bpc"] for trial in entry["trials"] if trial["bpc"] is not None]
        failed = f"{count} ({count - len(good)})"
        cells = [entry["system"], "", "", "", failed, "", "", "", "", best["problem"]]
        if good:
            shown = (
                f"{name.replace('_', ' ')} {format(value, '.3g') if isinstance(value, float) else value}"
                for name, value in best["options"].items()
                if name != "cell"
            )
            read = best["updates"] * best["options"]["batch_size"] * budget["length"]
            cells[1:4] = [f"{best['parameters']:,}", f"{1e3 * best['seconds_per_update']:.0f}", f"{read:,}"]
            cells[5:7] = [f"{best['bpc']:.4f}", f"{statistics.median(good):.4f}"]
            cells[7:9] = [_spread([r[n] for r in entry["repeats"] if n in r]) for n in ("valid", "test")]
            cells[9] = ", ".join(shown)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", f"{results['machine']}; {made}; commit {results['commit']}; {results['day']}; "]
    lines[-1] += f"`{results['command']}`. Every trial is in the JSON file beside this page."
    return "\n".join([*lines, ""])


def _bpc(trial: dict) -> float:
    return math.inf if trial["bpc"] is None else trial["bpc"]


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def main(argv=None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    description, _, rest = __doc__.partition("\n\n")
    parser = StrictParser(
        prog="python -m experiments.tune",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="directory that `rhhn prepare` made")
    add("systems", nargs="+", metavar="SYSTEM", help="CELL, or CELL:option=value,option=value")
    add("--parameters", type=int, default=1_000_000, help="largest number of a system (%(default)s)")
    add("--seconds", type=float, default=120.0, help="processor time of a trial (%(default)g)")
    add("--symbols", type=int, help="symbols that a trial reads; replaces --seconds")
    add("--trials", type=int, default=8, help="trials of every system (%(default)s)")
    add("--length", type=int, default=100, help="symbols of a lane in an update (%(default)s)")
    add("--best", type=int, default=4, help="systems trained again with other seeds (%(default)s)")
    add("--repeats", type=int, default=3, help="other seeds for each of these (%(default)s)")
    add("--seed", type=int, default=1, help="seed of the search (%(default)s)")
    add("--directory", type=Path, default=Path("runs/tune"), help="of the trials (%(default)s)")
    run(parser.parse_args(words), words)


if __name__ == "__main__":
    sys.exit(cli.run(main))
