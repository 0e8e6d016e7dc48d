"""Executes a run: prepare, train, evaluate, record. Every step resumes where an earlier attempt stopped."""

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.machine import commit
from experiments import corpora, plan, records
from experiments.plan import Run
from experiments.records import Record
from experiments.tables import Scoring
from rhhn_fairseq.data.common.manifest import versions
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock, no_link
from rhhn_fairseq.inspection.training_logs import TRAIN, parse_line

logger = logging.getLogger(__name__)

LOG = "train.log"
EVALUATIONS = "evaluation.log"

BPC = r"(\S+) bits per character, "
_BLEU = r"BLEU4? = (\S+)"
_PARAMETERS = re.compile(r": ([\d,]+) parameters; ")
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_STOPS = {"num_updates": "updates", "cumulative_training_time": "hours", "early stop": "patience"}


@dataclass(frozen=True)
class Places:
    """The directories of runs.

    Attributes:
        runs: checkpoints, logs and records. data: prepared corpora.
        from_dir: the files of a corpus that is not downloaded.
    """

    runs: Path
    data: Path
    from_dir: Path | None = None

    def run(self, run: Run) -> Path:
        """The run's own directory."""
        return self.runs / run.table.name / run.name

    def record(self, run: Run) -> Path:
        """The run's record; it becomes one of the repository's only by ``--record``."""
        return self.runs / run.table.name / f"{run.name}.json"


def execute(run: Run, places: Places, threads: int = 1, device: str = "cpu") -> Record:
    """Executes what is left of a run and returns its record, which is finished or failed.

    A training that was stopped, by a signal or a power cut, resumes from its last checkpoint. A finished run
    with another budget is trained further and then evaluated again.

    Args:
        threads: of torch on a CPU. device: ``cpu`` or ``cuda``.

    Raises:
        UsageError: the corpus is missing, or another process works on the run.
    """
    directory, path = places.run(run), places.record(run)
    directory.mkdir(parents=True, exist_ok=True)
    refusal = (
        f"{directory}: another process works on this run; wait for it, or give another seed with --seeds"
    )
    with lock(directory / ".lock", refusal):
        record = _open_record(run, path, threads, device)
        wanted = {name for name, _, _ in run.table.scoring.figures()}
        if record.state == "finished" and wanted <= record.figures.keys():
            return record
        place = corpora.prepare(run.table.corpus, places.data, places.from_dir)
        task = corpora.task_options(run.table.corpus, place)
        if run.table.scoring.program == "eval_lm":
            record.corpus = CharVocabulary.load(place).corpus or ""
            if run.scale < 1:
                place = corpora.prepare_share(place, run.scale)
        if record.state in ("training", "failed"):
            record.state, record.problem = "training", ""
            command = plan.train_command(run, place, directory, task, device)
            record.commands = {"train": shell_words(command)}
            record.save(path)
            _train(run, command, directory, record, path, threads)
            record.save(path)
            if record.state == "failed":
                return record
        for figure, command in plan.evaluation_commands(run, place, directory, device).items():
            record.commands[figure] = shell_words(command)
            if figure not in record.figures:
                record.figures[figure] = _evaluate(run, figure, command, directory, threads)
                record.save(path)
        record.state = "finished"
        record.save(path)
        return record


def shell_words(command: list[str]) -> list[str]:
    """Returns a command as it is recorded, with ``python`` and the package's name in place of local paths."""
    names = {sys.executable: "python", plan.USER_DIR: Path(plan.USER_DIR).name}
    return [names.get(word, word) for word in command if word != "-P"]


def _open_record(run: Run, path: Path, threads: int, device: str) -> Record:
    fresh = _new_record(run, threads, device)
    if not path.exists():
        return fresh
    record = Record.load(path)
    old, new = record.options, fresh.options
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if set(changed) - set(plan.LIMITS.values()):
        raise UsageError(
            f"{path}: this run was started with other options ({', '.join(changed)}); give another "
            "seed with --seeds, or another --runs"
        )
    if changed:
        # The same training, longer or shorter.
        record.options, record.budget = fresh.options, fresh.budget
        record.state, record.figures = "training", {}
    if record.state != "finished" and fresh.commit and fresh.commit not in record.commit.split(" and "):
        record.commit = " and ".join(filter(None, (record.commit, fresh.commit)))
    return record


def _new_record(run: Run, threads: int, device: str) -> Record:
    return Record(
        table=run.table.name,
        row=run.row.name,
        arch=run.row.arch,
        seed=run.seed,
        scale=run.scale,
        precision=run.precision,
        options={**run.options(), **({"extra": list(run.extra)} if run.extra else {})},
        budget=dict(run.budget),
        commit=commit(),
        versions=versions(*records.PACKAGES),
        device=records.describe_machine(device),
        threads=threads if device == "cpu" else 0,
    )


def _train(run: Run, command: list[str], directory: Path, record: Record, path: Path, threads: int) -> None:
    """Trains, and writes the record to ``path`` after every epoch, so a stopped run shows how far it got."""
    log = directory / LOG
    last, before, trained = "", log.stat().st_size if log.exists() else 0, False
    bar = tqdm(desc=f"{run.table.name} {run.name}", unit=" updates", disable=None, dynamic_ncols=True)
    with open(log, "a", buffering=1, opener=no_link) as file, bar, Program(command, threads) as program:
        for line in program:
            file.write(line)
            last = line.strip() or last
            figures = parse_line(line)
            if figures is not None:
                trained = True
                bar.n = figures.update
                bar.set_postfix_str(f"epoch {figures.epoch}")
                if figures.subset == TRAIN:
                    record.read_curve(log)
                    record.save(path)
    content = log.read_bytes()
    if counts := _PARAMETERS.findall(content.decode(errors="replace")):
        record.parameters = int(counts[-1].replace(",", ""))
    if program.status:
        record.state, record.problem = "failed", last or f"fairseq-train ended with status {program.status}"
        record.stopped_by = ""
        with suppress(UsageError):
            record.read_curve(log)
        return
    # What ended this training, and not an earlier one in the same log, unless nothing was left to train.
    record.stopped_by = _stop(content[before if trained else 0 :].decode(errors="replace"))
    record.read_curve(log)
    record.state = "evaluating"


def _evaluate(run: Run, figure: str, command: list[str], directory: Path, threads: int) -> float:
    """Computes one figure of a trained model.

    Raises:
        UsageError: the program failed, or printed no such figure.
    """
    logger.info("%s %s: %s", run.table.name, run.name, figure)
    with Program(command, threads) as program:
        text = "".join(program)
    with open(directory / EVALUATIONS, "a", opener=no_link) as file:
        file.write(f"{figure}: {' '.join(shell_words(command))}\n{text}\n")
    value = None if program.status else _read_figure(run.table.scoring, text)
    if value is None:
        lines = text.strip().splitlines() or [f"ended with status {program.status}"]
        raise UsageError(f"{directory / EVALUATIONS}: no {figure}: {lines[-1]}")
    return value


def _read_figure(scoring: Scoring, text: str) -> float | None:
    """Returns the figure in what an evaluation printed; None if there is none."""
    # fairseq-validate's lines lack the number of updates by which logs of trainings are read.
    patterns = {"eval_lm": BPC, "generate": _BLEU, "validate": rf'"\w+_{scoring.metric}": "([^"]+)"'}
    matches = re.findall(patterns[scoring.program], text)
    return float(matches[-1]) if matches else None


class Program:
    """A program of fairseq and the lines that it prints; use it once, in ``with``.

    However this process ends, the program then ends too and saves what it has. Ctrl-C and SIGTERM reach it
    through ``__exit__``.

    Attributes:
        status: the exit status after ``with``.
    """

    def __init__(self, command: list[str], threads: int):
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            # A terminal's Ctrl-C goes to this process alone, which passes on one signal.
            start_new_session=True,
            preexec_fn=_follow_parent,
        )
        self.status = 0

    def __enter__(self) -> "Program":
        return self

    def __iter__(self) -> Iterator[str]:
        assert self._process.stdout is not None
        yield from self._process.stdout

    def __exit__(self, kind, *details) -> None:
        if kind is not None:
            self._process.send_signal(signal.SIGTERM)
        self.status = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _follow_parent() -> None:
    """Makes the program end with its parent, so that no training runs unrecorded, and share its priority.

    Linux schedules sessions of processes as groups, so a new session needs the parent's nice value itself.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))


def _stop(text: str) -> str:
    """Returns what ended the training, from fairseq's own words in its log."""
    for line in reversed(text.splitlines()):
        if "Stopping training due to" in line or "early stop since" in line:
            return next((stop for words, stop in _STOPS.items() if words in line), "epochs")
    return "epochs"
