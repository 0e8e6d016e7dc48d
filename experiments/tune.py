"""Compares cells at equal parameters, equal time and an equal search for good options, on a prepared text.

Examples:
  python -m experiments.tune data-bin/ptb lstm ln_hyperlstm hyperrhn --seconds 120 --trials 8
  python -m experiments.tune data-bin/ptb rhn:rhn-depth=5 lstm:layers=2 --parameters 300000

Every trial is kept, failures included. The same command continues where it was stopped; you may add
systems and trials to it. The table and its data are comparison.md and comparison.json in --directory.
"""

import argparse
import bisect
import dataclasses
import math
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
import torch
import torch.nn.functional as F
from fairseq import options as fairseq_options
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution as Choice
from optuna.distributions import FloatDistribution as Real
from optuna.distributions import IntDistribution as Whole
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tabulate import tabulate
from torch.utils.benchmark import Timer

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from benchmarks.machine import commit
from experiments import records, running
from experiments.plan import program
from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.describe import count_parameters
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.data.common.manifest import versions
from rhhn_fairseq.data.text.words import load_vocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock
from rhhn_fairseq.inspection.training_logs import parse_line
from rhhn_fairseq.models.char_lm import CharLM, CharLMConfig
from rhhn_fairseq.models.char_lm_table import BASE_RECIPE

# Widths are multiples of this, as processors' vectors are.
WIDTH_STEP, WIDEST = 4, 8192
TIMED_UPDATES = 5
RANDOM_TRIALS = 10
"""Trials before Optuna's TPE takes over from random search; its own default."""

# By the names of fairseq-train's options. Those of cells apply to the cells that have them.
SPACE: dict[str, BaseDistribution] = {
    "lr": Real(5e-4, 1e-2, log=True),
    "batch_size": Choice((16, 32, 64)),
    "output_dropout": Real(0.0, 0.3),
    "layers": Whole(1, 2),
    "rhn_depth": Whole(1, 4),
    "hyper_size": Choice((32, 64, 128)),
    "recurrent_dropout": Real(0.0, 0.3),
    "zoneout": Real(0.0, 0.2),
}
# The values of the first trial.
START = {"lr": 3e-3, "batch_size": 32, "output_dropout": 0.0, "layers": 1}
START |= {"rhn_depth": 2, "hyper_size": 64, "recurrent_dropout": 0.0, "zoneout": 0.0}


@dataclass(frozen=True)
class System:
    """A cell, with the options that are not searched.

    Attributes:
        name: the text that ``parse`` reads. options: of ``fairseq-train --arch char_lm``, by name.
    """

    name: str
    cell: str
    options: dict

    @classmethod
    def parse(cls, text: str) -> "System":
        """Reads ``CELL`` or ``CELL:option=value,option=value``.

        Raises:
            UsageError: no such cell or option, or a value that cannot work.
        """
        cell, _, rest = text.partition(":")
        if cell not in CELLS:
            raise UsageError(f"{text}: no cell {cell!r}, choose from {', '.join(sorted(CELLS))}")
        words = [f"--{word}" for word in rest.split(",") if word]
        line, parser = (
            [".", "--arch", "char_lm", "--cell", cell, *words],
            fairseq_options.get_training_parser(),
        )
        given = vars(fairseq_options.parse_args_and_arch(parser, line))
        options = {}
        for word in words:
            name = word.partition("=")[0].strip("-").replace("-", "_")
            options[name] = given[name][0] if isinstance(given[name], list) else given[name]
        system = cls(text, cell, options)
        # Wide enough for any hypernetwork. An option that the cell does not have is refused here.
        first = {"cell": cell} | {name: START[name] for name in system.space()} | options
        width = WIDTH_STEP * first.get("hyper_size", 1)
        build(first | {"hidden_size": width}, vocab_size=2, device="meta")
        return system

    def space(self) -> dict[str, BaseDistribution]:
        """Returns what is searched: options of every model, and those of SPACE that the cell has.

        Depth means the cell's own, if it has one, else layers; of the cell's dropouts, one is searched.
        """
        known = cell_options(self.cell)
        if self.cell == "hyper":
            main = cell_options(self.options.get("main_cell", known["main_cell"]))
            known = {name: known[name] for name in known if name.startswith("hyper_") or name in main}
        names = ["lr", "batch_size", "output_dropout", "rhn_depth" if "rhn_depth" in known else "layers"]
        names += ["hyper_size"] if "hyper_size" in known else []
        names += next(([name] for name in ("recurrent_dropout", "zoneout") if name in known), [])
        space = {name: SPACE[name] for name in names if name not in self.options}
        if self.cell == "grid_rhn" and "rhn_depth" in space:
            # It has at least two layers.
            space["rhn_depth"] = Whole(2, SPACE["rhn_depth"].high)
        return space


def build(options: dict, vocab_size: int, device: str = "cpu") -> CharLM:
    """Returns a model with these options of fairseq-train and random weights."""
    fields = {spec.name for spec in dataclasses.fields(CharLMConfig)}
    config = CharLMConfig(**{name: value for name, value in options.items() if name in fields})
    with torch.device(device):
        return CharLM.for_vocabulary(config, vocab_size)


def width_of(options: dict, parameters: int, vocab_size: int) -> int:
    """Returns the largest hidden size, a multiple of 4, with at most this many parameters.

    Raises:
        UsageError: the smallest model has more.
    """

    def count(width):
        return count_parameters(build(options | {"hidden_size": width}, vocab_size, "meta"))

    smallest = max(WIDTH_STEP, -(-options.get("hyper_size", 1) // WIDTH_STEP) * WIDTH_STEP)
    widths = range(smallest, WIDEST + 1, WIDTH_STEP)
    if count(smallest) > parameters:
        raise UsageError(
            f"--parameters {parameters:,}: {options['cell']} of width {smallest} has "
            f"{count(smallest):,} already"
        )
    return widths[bisect.bisect_right(widths, parameters, key=count) - 1]


def seconds_per_update(options: dict, vocab_size: int, length: int) -> float:
    """Returns the processor time of one update on random text with one thread, the mean of a few, in seconds.

    Trials have one thread, too. Processor time, because other programs may share the machine; one update is
    forward, backward and Adam.

    Args:
        length: symbols that each of ``batch_size`` lanes reads.
    """
    torch.manual_seed(0)
    model = build(options, vocab_size).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    entries = torch.randint(4, 4 + vocab_size, (options["batch_size"], length + 1))

    def update():
        logits, _ = model(entries[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), entries[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), BASE_RECIPE["clip_norm"])
        optimizer.step()

    timer = Timer("update()", globals={"update": update}, timer=time.process_time, num_threads=1)
    # Two more before these also set up memory and compiled code.
    return timer.timeit(TIMED_UPDATES).mean


class Tuning:
    """The search for one system's options, in a file that Optuna keeps.

    Every trial gets the same time, counted in updates: the seconds of the budget divided by those of one
    update, measured before the trial, so that what else the machine does changes no figure. With --symbols
    every trial reads the same text, which compares recipes of one cell.

    A trial is a dictionary: ``options`` of fairseq-train, ``parameters``, ``updates``,
    ``seconds_per_update``, ``bpc`` (valid, ``carry:32``; None if it failed) and ``problem``.
    """

    def __init__(self, system: System, args: argparse.Namespace, vocab_size: int):
        self.system, self.args, self.vocab_size = system, args, vocab_size
        budget = f"{args.seconds:g} s" if args.symbols is None else f"{args.symbols} symbols"
        # With other settings, another search begins in the same file.
        name = f"{system.name} of {args.parameters}, {budget}, {args.length}, {args.seed}, {args.data}"
        self.log = args.directory / f"{system.name}.log"
        storage = JournalStorage(JournalFileBackend(str(args.directory / "trials.log")))
        self.study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        # A trial that was stopped is made again, with its options.
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)
        if not self.study.trials:
            self.study.enqueue_trial({name: START[name] for name in system.space()})

    def trials(self) -> list[dict]:
        """Returns the trials that ended, in order, without those that were stopped."""
        return [trial.user_attrs["trial"] for trial in self.study.trials if "trial" in trial.user_attrs]

    def best(self) -> dict | None:
        """Returns the trial with the fewest bits per character; None if all failed."""
        return min((t for t in self.trials() if t["bpc"] is not None), key=_bpc, default=None)

    def run(self) -> None:
        """Runs the remaining trials, and prints the outcome of each."""
        while (count := len(self.trials())) < self.args.trials:
            # A search that is resumed draws what an uninterrupted one would have drawn.
            seed = np.random.SeedSequence([self.args.seed, count]).generate_state(1)
            self.study.sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, seed=int(seed[0]))
            trial = self.study.ask(self.system.space())
            done = self._try({"cell": self.system.cell} | self.system.options | trial.params)
            trial.set_user_attr("trial", done)
            self.study.tell(trial, done["bpc"], state=TrialState.FAIL if done["bpc"] is None else None)
            outcome = done["problem"] or f"valid {done['bpc']} bpc"
            print(f"{self.system.name}, trial {count + 1} of {self.args.trials}: {outcome}", flush=True)

    def repeat(self, trial: dict, seed: int) -> dict:
        """Trains a trial's options with another seed, and scores the model on the test split too.

        Returns:
            ``seed``, ``options``, and bits per character ``valid`` and ``test``; or ``problem`` in their
            place, if the training failed. Optuna's file keeps them, so that they are not made again.
        """
        figures = self.study.user_attrs.get(f"seed {seed}", {})
        if figures.get("options") != trial["options"]:
            with tempfile.TemporaryDirectory(dir=self.args.directory) as place:
                saving = {"save_dir": place, "no_last_checkpoints": True, "no_save_optimizer_state": True}
                done = self._train(trial["options"] | saving, seed, trial["updates"])
                figures = {"seed": seed, "options": trial["options"], "problem": done["problem"]}
                if done["bpc"] is not None:
                    words = {"path": f"{place}/checkpoint_best.pt", "gen_subset": "test", "cpu": True}
                    command = program("eval_lm", self.args.data, words | {"protocol": "carry:32"})
                    test = running.evaluate(command, running.BPC, 1, self.log)
                    figures |= {"valid": done["bpc"], "test": test}
            self.study.set_user_attr(f"seed {seed}", figures)
            print(f"{self.system.name}, seed {seed}: {figures}", flush=True)
        return figures

    def _try(self, options: dict) -> dict:
        """Trains within the budget, and returns the trial."""
        done = {"options": options, "parameters": 0, "updates": 0, "seconds_per_update": 0.0, "bpc": None}
        try:
            width = options.get("hidden_size") or width_of(options, self.args.parameters, self.vocab_size)
        except UsageError as error:
            return done | {"problem": str(error)}
        done["options"] = options = options | {"hidden_size": width}
        done["parameters"] = count_parameters(build(options, self.vocab_size, "meta"))
        done["seconds_per_update"] = seconds_per_update(options, self.vocab_size, self.args.length)
        updates = int(self.args.seconds / done["seconds_per_update"])
        if self.args.symbols is not None:
            updates = self.args.symbols // (options["batch_size"] * self.args.length)
        done["updates"] = max(2, updates)
        # Without a directory of its own, a trial would go on from an earlier training in "checkpoints".
        with tempfile.TemporaryDirectory(dir=self.args.directory) as place:
            words = options | {"no_save": True, "save_dir": place}
            return done | self._train(words, self.args.seed, done["updates"])

    def _train(self, options: dict, seed: int, updates: int) -> dict:
        """Trains a model; returns ``bpc`` and ``problem``."""
        words = {"arch": "char_lm", "lr_scheduler": "polynomial_decay"} | options
        words |= {"tokens_per_sample": self.args.length, "seed": seed, "log_format": "json"}
        # Reading a batch takes microseconds; a process for it would be started for every validation.
        words |= {"num_workers": 0, "max_update": updates, "cpu": True}
        # The rate goes to zero within the trial.
        words["total_num_update"] = updates if words["lr_scheduler"] == "polynomial_decay" else None
        try:
            printed = running.output(program("train", self.args.data, words), 1, self.log)
            lines = [line for line in map(parse_line, printed) if line and line.subset == "valid"]
            return {"bpc": min(line.figures["bpc"] for line in lines), "problem": ""}
        except UsageError as error:
            return {"bpc": None, "problem": str(error)}


def run(args: argparse.Namespace, command: list[str]) -> None:
    """Executes a command line; finished work is not repeated.

    Raises:
        UsageError: anything that the user can fix; a system of which no trial succeeded, after the page was
            written.
    """
    systems = {system.name: system for system in map(System.parse, args.systems)}
    vocabulary = load_vocabulary(args.data)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    args.directory.mkdir(parents=True, exist_ok=True)
    with lock(args.directory / ".lock", f"{args.directory}: another process works here; wait for it"):
        size = len(vocabulary.model_indices())
        tunings = [Tuning(system, args, size) for system in systems.values()]
        left = sum(max(0, args.trials - len(tuning.trials())) for tuning in tunings)
        again = min(args.best, len(tunings)) * args.repeats
        longest = (left + again) * args.seconds / 60
        told = "" if args.symbols else f": at most about {longest:,.0f} minutes of updates"
        print(f"{left} trainings, then {again} with other seeds unless they are made{told}", flush=True)
        for tuning in tunings:
            tuning.run()
        ranked = sorted((t for t in tunings if t.best()), key=lambda tuning: _bpc(tuning.best()))
        seeds = range(args.seed + 1, args.seed + args.repeats + 1)
        repeats = {t.system.name: [t.repeat(t.best(), seed) for seed in seeds] for t in ranked[: args.best]}
        results = {
            "corpus": vocabulary.corpus or str(args.data),
            "budget": {name: vars(args)[name] for name in "parameters seconds trials length symbols".split()},
            "seed": args.seed,
            "machine": records.describe_machine("cpu"),
            "versions": versions(*records.PACKAGES),
            "commit": commit(),
            "day": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "experiments.tune", *command]),
            "systems": [
                {"system": name, "trials": tuning.trials(), "repeats": repeats.get(name, [])}
                for name, tuning in zip(systems, tunings, strict=True)
            ],
        }
    records.write_json(args.directory / "comparison.json", results)
    (args.directory / "comparison.md").write_text(render(results), encoding="utf-8")
    print(args.directory / "comparison.md")
    for tuning in tunings:
        if tuning.best() is None:
            raise UsageError(f"{tuning.system.name}: no trial succeeded ({tuning.trials()[-1]['problem']})")


def render(results: dict) -> str:
    """Returns the page of a comparison, whose data ``run`` stores as ``comparison.json``."""
    budget, rows = results["budget"], []
    each = f"{budget['seconds']:g} s" if budget["symbols"] is None else f"{budget['symbols']:,} symbols"
    for entry in sorted(results["systems"], key=lambda entry: min(map(_bpc, entry["trials"]))):
        best = min(entry["trials"], key=_bpc)
        good = [trial["bpc"] for trial in entry["trials"] if trial["bpc"] is not None]
        row = {"system": entry["system"]}
        if good:
            read = best["updates"] * best["options"]["batch_size"] * budget["length"]
            row |= {"parameters": f"{best['parameters']:,}", "symbols read": f"{read:,}"}
            row |= {"ms per update": f"{1e3 * best['seconds_per_update']:.0f}"}
            row |= {"valid, best": f"{best['bpc']:.4f}", "valid, median": f"{statistics.median(good):.4f}"}
            for split, title in (("valid", "valid, other seeds"), ("test", "test")):
                if values := [repeat[split] for repeat in entry["repeats"] if split in repeat]:
                    row[title] = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        row["trials (failed)"] = f"{len(entry['trials'])} ({len(entry['trials']) - len(good)})"
        shown = {name.replace("_", " "): value for name, value in best["options"].items() if name != "cell"}
        row["options of the best"] = best["problem"].replace("|", "/") or ", ".join(
            f"{name} {format(value, '.3g') if isinstance(value, float) else value}"
            for name, value in shown.items()
        )
        rows.append(row)
    return f"""# Systems at {budget["parameters"]:,} parameters

{results["corpus"]}. Every system has {budget["trials"]} trials of {each}: the first with the starting
values, those up to the {RANDOM_TRIALS}th at random, the others by Optuna's TPE. Bits per character, protocol
carry:32. Other seeds and the test split have the best trial's options. No system has converged.

{tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)}

{results["machine"]}; {results["day"]}; `{results["command"]}`. Every trial is in the JSON file beside this.
"""


def _bpc(trial: dict) -> float:
    return math.inf if trial["bpc"] is None else trial["bpc"]


def main(argv=None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser("", __doc__)
    parser.prog, add = "python -m experiments.tune", parser.add_argument
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
