"""Executes a run: prepare, train, evaluate, record. Every step resumes where an earlier attempt stopped."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
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

BPC = r"(\S+) bits per character, "


def execute(run: Run, path: Path, args: Namespace) -> Record:
    """Executes what is left of a run and returns its record, which is finished.

    A training that was stopped, by a signal or a power cut, resumes from its last checkpoint. A finished run
    with another budget is trained further and then evaluated again.

    Args:
        path: of the record. Checkpoints and logs are in the directory of that name without ".json".
        args: ``data``, ``from_dir``, ``device`` and ``threads`` (of torch on a CPU).

    Raises:
        UsageError: the corpus is missing, another process works on the run, or a program failed.
    """
    directory, scoring = path.with_suffix(""), run.table.scoring
    directory.mkdir(parents=True, exist_ok=True)
    refusal = f"{directory}: another process works on this run; wait for it, or give another --seeds"
    with lock(directory / ".lock", refusal):
        record = open_record(run, path, args)
        if record.state == "finished":
            return record
        place = corpora.prepare(run.table.corpus, args.data, args.from_dir)
        task = corpora.task_options(run.table.corpus, place)
        if "mnist_dir" in task:
            place = None
        if scoring.program == "eval_lm":
            record.corpus = CharVocabulary.load(place).corpus or ""
            if run.scale < 1:
                place = corpora.prepare_share(place, run.scale)
        if record.state in ("training", "failed"):
            train(plan.train_command(run, place, directory, task, args.device), record, path, args.threads)
        for figure, command in plan.evaluation_commands(run, place, directory, args.device).items():
            record.commands[figure] = shell_words(command)
            if figure not in record.figures:
                log = directory / "evaluation.log"
                record.figures[figure] = evaluate(command, pattern_of(scoring), args.threads, log)
                record.save(path)
        record.state = "finished"
        record.save(path)
        return record


def shell_words(command: list[str]) -> list[str]:
    """Returns a command as it is recorded, with ``python`` and the package's name in place of local paths."""
    names = {sys.executable: "python", plan.USER_DIR: Path(plan.USER_DIR).name}
    return [names.get(word, word) for word in command if word != "-P"]


def open_record(run: Run, path: Path, args: Namespace) -> Record:
    """Returns the record at ``path``, or a new one. Raises UsageError if that run had other options."""
    fresh = Record(
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
        device=records.describe_machine(args.device),
        threads=args.threads if args.device == "cpu" else 0,
    )
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
        done = {"updates": record.updates, "epochs": record.epochs, "hours": record.seconds / 3600}
        if any(done.get(name, 0) > limit for name, limit in run.budget.items()):
            raise UsageError(
                f"{path}: this run has been trained for {record.updates} updates, {record.epochs} epochs and "
                f"{done['hours']:.2f} h already; give another seed with --seeds, or another --runs"
            )
        record.options, record.budget = fresh.options, fresh.budget
        record.state, record.figures = "training", {}
    if record.state != "finished" and fresh.commit and fresh.commit not in record.commit.split(" and "):
        record.commit = " and ".join(filter(None, (record.commit, fresh.commit)))
    return record


def train(command: list[str], record: Record, path: Path, threads: int) -> None:
    """Trains, and writes the record to ``path`` after every epoch, so a stopped run shows how far it got.

    Raises:
        UsageError: the training failed, which the record then says.
    """
    record.state, record.problem, record.commands = "training", "", {"train": shell_words(command)}
    record.save(path)
    log = path.with_suffix("") / "train.log"
    try:
        with tqdm(desc=f"{record.table} {path.stem}", unit=" updates", disable=None) as bar:
            for line in output(command, threads, log):
                if (figures := parse_line(line)) is not None:
                    bar.n = figures.update
                    bar.set_postfix_str(f"epoch {figures.epoch}")
                    if figures.subset == TRAIN:
                        record.read_curve(log)
                        record.save(path)
        record.read_curve(log)
        record.state = "evaluating"
    except UsageError as error:
        record.state, record.problem = "failed", str(error)
        raise
    finally:
        record.save(path)


def pattern_of(scoring: Scoring) -> str:
    """Returns a regular expression of a figure in what an evaluation prints."""
    # fairseq-validate's lines lack the number of updates by which logs of trainings are read.
    validated = rf'"\w+_{scoring.metric}": "([^"]+)"'
    return {"eval_lm": BPC, "generate": r"BLEU4? = (\S+)", "validate": validated}[scoring.program]


def evaluate(command: list[str], pattern: str, threads: int, log: Path) -> float:
    """Runs an evaluation and returns the last figure that it prints.

    Raises:
        UsageError: the program failed, or printed no such figure.
    """
    figures = re.findall(pattern, "".join(output(command, threads, log)))
    if not figures:
        raise UsageError(f"{log}: has no figure")
    return float(figures[-1])


def output(command: list[str], threads: int, log: Path) -> Iterator[str]:
    """Runs a program of fairseq, and yields the lines that it prints, which a log gets too.

    However this process ends, the program then ends too and saves what it has.

    Raises:
        UsageError: the program failed, with the last line that it printed.
    """
    with (
        open(log, "a", buffering=1, opener=no_link) as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
            # A terminal's Ctrl-C goes to this process alone, which passes on one signal.
            process_group=0,
            preexec_fn=_follow_parent,
        ) as program,
    ):
        last = ""
        try:
            for line in program.stdout:
                file.write(line)
                last = line.strip() or last
                yield line
        except BaseException:
            program.terminate()
            raise
        finally:
            status = program.wait()
    if status:
        raise UsageError(last.removeprefix("error: ") or f"{log}: the program ended with status {status}")


def _follow_parent() -> None:
    """Makes the program end with its parent, so that no training runs unrecorded; on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of linux/prctl.h
