"""Trials of one system. Each is a training whose options, time and figure Optuna keeps in a file.

Every trial gets the same time, counted in updates: the seconds of the budget divided by those of one update,
measured before the trial. What else the machine does during a trial changes no figure. With a budget of
symbols, every trial reads the same text, which compares recipes of one cell.
"""

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.plan import USER_DIR, flags
from experiments.records import write_json
from experiments.running import Program
from experiments.systems import System, build, seconds_per_update, width_of
from rhhn_fairseq.cli.describing import count_parameters
from rhhn_fairseq.data.text.words import load_vocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import make_directory, read_json
from rhhn_fairseq.inspection.training_logs import parse_line
from rhhn_fairseq.programs import interpreter
from rhhn_fairseq.staging import no_link

FEWEST_UPDATES = 2
RANDOM_TRIALS = 10
"""Trials before Optuna's TPE takes over from random search; its own default."""
VALID = "valid"
_BPC = re.compile(r"(\S+) bits per character, ")


@dataclass(frozen=True)
class Budget:
    """The budget that every system gets.

    Attributes:
        parameters: upper limit. seconds: processor time for the updates of a trial. trials: per system.
        symbols: symbols read in a trial, in place of ``seconds``; None to use ``seconds``.
        length: symbols a lane reads in an update.
    """

    parameters: int = 1_000_000
    seconds: float = 120.0
    trials: int = 8
    length: int = 100
    symbols: int | None = None

    def __post_init__(self):
        for name, smallest in (("parameters", 1), ("trials", 1), ("length", 1), ("symbols", 1)):
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise UsageError(f"--{name} {value} is too small, the smallest is {smallest}")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds {self.seconds:g} is not a number above 0")

    def updates(self, seconds_per_update: float, batch_size: int) -> int:
        """Returns the number of updates of a trial."""
        if self.symbols is None:
            return max(FEWEST_UPDATES, int(self.seconds / seconds_per_update))
        return max(FEWEST_UPDATES, self.symbols // (batch_size * self.length))

    def settings(self) -> dict:
        """Returns the settings that all trials of a directory share."""
        budget = {"seconds": self.seconds} if self.symbols is None else {"symbols": self.symbols}
        return {"parameters": self.parameters} | budget | {"length": self.length}


@dataclass(frozen=True)
class Trial:
    """A training that has ended.

    Attributes:
        options: of fairseq-train. parameters, updates, seconds_per_update: of the training.
        bpc: valid bits per character, ``carry:32``; None if it failed. problem: why it failed, else "".
    """

    options: dict
    parameters: int
    updates: int
    seconds_per_update: float
    bpc: float | None
    problem: str = ""


class Tuning:
    """The search for one system's options.

    Args:
        data: a directory that ``rhhn prepare`` made. directory: holds the trials of all systems.
        seed: of the search and of its trainings. threads: of a training.

    Raises:
        UsageError: Optuna is missing, or the directory's trials had other settings.
    """

    def __init__(
        self, system: System, budget: Budget, data: Path, directory: Path, seed: int, threads: int = 1
    ):
        with needed_for("experiments.tune needs"):
            self._optuna = importlib.import_module("optuna")
            journal = importlib.import_module("optuna.storages.journal")
        self.system, self.budget, self.data = system, budget, data
        self.seed, self.threads = seed, threads
        self.vocab_size = len(load_vocabulary(data).model_indices())
        self.directory = directory / re.sub(r"[^A-Za-z0-9_.=-]+", "_", system.name)
        make_directory(self.directory)
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        storage = self._optuna.storages.JournalStorage(
            journal.JournalFileBackend(str(self.directory / "trials.log"))
        )
        self.study = self._optuna.create_study(storage=storage, study_name=system.name, load_if_exists=True)
        self._check_settings()
        self._resume()

    def _check_settings(self) -> None:
        """Raises UsageError if the directory's trials had other settings than this search."""
        settings = self.budget.settings() | {"seed": self.seed, "data": str(self.data)}
        settings["threads"] = self.threads
        stored = self.study.user_attrs.get("settings")
        if stored is None:
            self.study.set_user_attr("settings", settings)
        elif (stored := {"threads": self.threads} | stored) != settings:
            changed = ", ".join(f"{key} {stored[key]}" for key in stored if stored[key] != settings.get(key))
            raise UsageError(
                f"{self.directory}: its trials have {changed}; give the same or another --directory"
            )

    def _resume(self) -> None:
        """Enqueues a new trial with the options of each trial that was stopped."""
        state = self._optuna.trial.TrialState
        for trial in self.study.get_trials(states=(state.RUNNING,)):
            self.study.tell(trial.number, state=state.FAIL)
            self.study.enqueue_trial(trial.params)
        if not self.study.trials:
            self.study.enqueue_trial({name: axis.start for name, axis in self.system.space().items()})

    def trials(self) -> list[Trial]:
        """Returns the trials that ended, in order, without those that were stopped."""
        ended = [trial.user_attrs["trial"] for trial in self.study.trials if "trial" in trial.user_attrs]
        return [Trial(**values) for values in ended]

    def best(self) -> Trial | None:
        """Returns the trial with the fewest bits per character; None if all failed."""
        return min((t for t in self.trials() if t.bpc is not None), key=lambda t: t.bpc or 0.0, default=None)

    def run(self, show: Callable[[Trial], None]) -> None:
        """Runs the remaining trials.

        Args:
            show: called after each.
        """
        while len(self.trials()) < self.budget.trials:
            # A search that is resumed draws what an uninterrupted one would have drawn.
            seed = np.random.SeedSequence([self.seed, len(self.trials())]).generate_state(1)
            self.study.sampler = self._optuna.samplers.TPESampler(
                n_startup_trials=RANDOM_TRIALS, seed=int(seed[0])
            )
            trial = self.study.ask()
            options = {"cell": self.system.cell} | self.system.options
            options |= {name: axis.draw(trial, name) for name, axis in self.system.space().items()}
            done = self._train(options, self.seed, self.directory / f"trial-{trial.number}.log", None)
            trial.set_user_attr("trial", done.__dict__)
            if done.bpc is None:
                self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(trial, done.bpc)
            show(done)

    def repeat(self, trial: Trial, seed: int) -> dict[str, Any]:
        """Trains a trial's options with another seed; keeps the model and scores it on the test split too.

        Earlier results are read from their file.

        Returns:
            ``seed``, ``options``, and bits per character ``valid`` and ``test``; or ``problem`` in their
            place, if the training failed.

        Raises:
            UsageError: a program that scores the model failed.
        """
        directory = self.directory / f"seed-{seed}"
        directory.mkdir(exist_ok=True)
        path = directory / "figures.json"
        own = ("cell", *self.system.options, *self.system.space())
        options = {name: value for name, value in trial.options.items() if name in own}
        figures = read_json(path) if path.exists() else {}
        if figures.get("options") != options:
            done = self._train(options, seed, directory / "train.log", directory, trial)
            figures = {"seed": seed, "options": options}
            if done.bpc is None:
                figures["problem"] = done.problem
            else:
                figures |= {"valid": done.bpc, "test": self._score(directory)}
            write_json(path, figures)
        return figures

    def _train(
        self, options: dict, seed: int, log: Path, save_dir: Path | None, like: Trial | None = None
    ) -> Trial:
        """Trains a model; with ``like``, for as many updates as that trial."""
        try:
            options = options | {"hidden_size": width_of(options, self.budget.parameters, self.vocab_size)}
            parameters = count_parameters(build(options, self.vocab_size, "meta"))
        except UsageError as error:
            return Trial(options, 0, 0, 0.0, None, str(error))
        if like is None:
            seconds = seconds_per_update(options, self.vocab_size, self.budget.length)
            updates = self.budget.updates(seconds, options["batch_size"])
        else:
            seconds, updates = like.seconds_per_update, like.updates
        if save_dir is not None:
            # An earlier trial, or one that was stopped, left them; fairseq would resume, or refuse to start.
            for left in save_dir.glob("checkpoint*.pt"):
                left.unlink()
        command = self._train_command(options, updates, seed, save_dir)
        figures, last = [], ""
        with open(log, "w", buffering=1, opener=no_link) as file, Program(command, self.threads) as program:
            for line in program:
                file.write(line)
                last = line.strip() or last
                record = parse_line(line)
                if record is not None and record.subset == VALID and "bpc" in record.figures:
                    figures.append(record.figures["bpc"])
        bpc = min(figures) if figures and not program.status else None
        problem = "" if bpc is not None else last or f"fairseq-train ended with status {program.status}"
        return Trial(options, parameters, updates, seconds, bpc, problem)

    def _train_command(self, options: dict, updates: int, seed: int, save_dir: Path | None) -> list[str]:
        words: dict[str, object] = {"arch": "char_lm"} | options
        words |= {"tokens_per_sample": self.budget.length, "seed": seed, "cpu": True, "log_format": "json"}
        # Reading a batch takes microseconds; a process for it would be started for every validation.
        words["num_workers"] = 0
        words["max_update"] = updates
        # The rate goes to zero within the trial.
        if words.setdefault("lr_scheduler", "polynomial_decay") == "polynomial_decay":
            words["total_num_update"] = updates
        if save_dir is None:
            words["no_save"] = True
        else:
            words |= {"save_dir": save_dir, "no_last_checkpoints": True, "no_save_optimizer_state": True}
        program = interpreter("-m", "fairseq_cli.train", str(self.data), "--user-dir", USER_DIR)
        return [*program, *flags(words)]

    def _score(self, directory: Path) -> float:
        words = {"path": directory / "checkpoint_best.pt", "gen_subset": "test", "cpu": True}
        words |= {"protocol": "carry:32"}
        program = interpreter("-m", "fairseq_cli.eval_lm", str(self.data), "--user-dir", USER_DIR)
        with Program([*program, *flags(words)], self.threads) as running:
            text = "".join(running)
        figures = _BPC.findall(text)
        if running.status or not figures:
            raise UsageError(f"{directory}: {(text.strip().splitlines() or ['no figure'])[-1]}")
        return float(figures[-1])
