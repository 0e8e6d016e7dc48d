"""The record of a run: one JSON file with what was run, where, for how long, and what came out."""

import dataclasses
import itertools
import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.machine import cpu_model
from rhhn_fairseq.files import read_json, replace_file
from rhhn_fairseq.inspection.training_logs import TRAIN, TRAIN_INNER, read_log

PACKAGES = ("torch", "fairseq", "numpy", "sentencepiece", "sacrebleu")
# Of the figures in fairseq's log, those that describe the machine or the run, not the model.
MACHINE = {"wps", "ups", "wpb", "bsz", "train_wall", "wall", "gb_free", "clip", "lr", "gnorm", "loss_scale"}


@dataclass(frozen=True)
class Cost:
    """The cost of an update of a row on a machine.

    Attributes:
        seconds_per_update: a median, or the mean of a short run. updates_per_epoch: None if it is not known.
        threads: of torch on a CPU; 0 on a GPU. remark: what a reader needs to know about it.
    """

    row: str
    precision: str
    seconds_per_update: float
    updates_per_epoch: int | None
    device: str
    threads: int
    remark: str = ""


@dataclass
class Record:
    """What is known about a run.

    Attributes:
        state: ``training``, ``evaluating``, ``finished`` or ``failed``. problem: why it failed, else "".
        options: options of fairseq-train besides the architecture's recipe.
        commands: the training's and the evaluations' command lines.
        parameters: the trained ones. updates, epochs: done; an epoch that was cut counts by its updates.
        updates_per_epoch: None if the log does not say. seconds: of the updates, without validation.
        curve: one entry per epoch with ``epoch``, ``updates``, ``seconds``, ``train`` and ``valid``.
        figures: by the names of ``Scoring.figures``. threads: of torch on a CPU; 0 on a GPU.
        remark: what a reader needs to know about this run.
        corpus: what the data directory says that it holds; "" if it does not.
    """

    table: str
    row: str
    arch: str
    seed: int
    scale: float
    precision: str
    state: str = "training"
    problem: str = ""
    options: dict = field(default_factory=dict)
    budget: dict = field(default_factory=dict)
    commands: dict = field(default_factory=dict)
    parameters: int | None = None
    updates: int = 0
    epochs: float = 0
    updates_per_epoch: int | None = None
    seconds: float = 0.0
    curve: list = field(default_factory=list)
    figures: dict = field(default_factory=dict)
    commit: str = ""
    versions: dict = field(default_factory=dict)
    device: str = ""
    threads: int = 1
    remark: str = ""
    corpus: str = ""

    def save(self, path: Path) -> None:
        """Writes the record to a file beside ``path`` that is then renamed."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Reads the record in a file; older ones say more."""
        names = {spec.name for spec in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in read_json(path).items() if name in names})

    def cost(self) -> Cost | None:
        """Returns what an update took; None before the first.

        That is the median over the epochs, of which other programs may have slowed some; with fewer than
        three, the mean.
        """
        if not self.updates or not self.seconds:
            return None
        ends = [(0, 0.0), *((entry["updates"], entry["seconds"]) for entry in self.curve)]
        means = [(s - before) / (u - done) for (done, before), (u, s) in itertools.pairwise(ends)]
        seconds = statistics.median(means) if len(means) > 2 else self.seconds / self.updates
        epoch = self.updates_per_epoch or (self.curve[0]["updates"] if self.curve else None)
        return Cost(self.row, self.precision, seconds, epoch, self.device, self.threads, self.remark)

    def read_curve(self, log: Path) -> None:
        """Reads size, updates, epochs, seconds and curve from the training's log."""
        records, text = read_log(log), log.read_text(errors="replace")
        counts = (
            re.findall(r": ([\d,]+) parameters; ", text),
            re.findall(r"; ([\d,]+) updates an epoch", text),
        )
        self.parameters, self.updates_per_epoch = (
            int(found[-1].replace(",", "")) if found else None for found in counts
        )
        # An epoch that was cut and continued has two lines, of which the second counts all of its seconds.
        last_of = {record.epoch or -record.update: record for record in records if record.subset == TRAIN}
        ends = {record.update: record for record in last_of.values()}
        validations = [record for record in records if record.subset not in (TRAIN, TRAIN_INNER)]
        # Of several subsets, the one that fairseq validates first.
        valid = {record.update: record for record in validations if record.subset == validations[0].subset}
        named = {record.epoch or 0 for record in last_of.values()}
        for update, record in valid.items():
            # A signal at the end of an epoch leaves its validation without a training line.
            if record.epoch and record.epoch not in named and record.epoch < max(named, default=0):
                within = [one for one in records if (one.subset, one.epoch) == (TRAIN_INNER, record.epoch)]
                wall = sum(one.figures.get("train_wall", 0.0) for one in within)
                ends[update] = dataclasses.replace(record, subset=TRAIN, figures={"train_wall": wall})
        self.curve, seconds = [], 0.0
        for update in sorted(ends):
            seconds += ends[update].figures.get("train_wall", 0.0)
            entry = {"epoch": ends[update].epoch, "updates": update, "seconds": round(seconds, 1)}
            for name, line in (("train", ends[update]), ("valid", valid.get(update))):
                figures = line.figures if line else {}
                entry[name] = {name: value for name, value in figures.items() if name not in MACHINE}
            self.curve.append(entry)
        done = self.curve[-1]["updates"] if self.curve else 0
        # Lines within an epoch count from the line before.
        inner = {record.update: record for record in records if record.subset == TRAIN_INNER}
        late = [record for update, record in sorted(inner.items()) if update > done]
        self.seconds = round(seconds + sum(record.figures.get("train_wall", 0.0) for record in late), 1)
        self.updates = max([done, *(record.update for record in late)])
        self.epochs = max((entry["epoch"] or 0 for entry in self.curve), default=0)
        if self.updates_per_epoch and done < self.epochs * self.updates_per_epoch:
            self.epochs = round(done / self.updates_per_epoch, 2)


def describe_machine(device: str) -> str:
    """Returns the name of the processor or GPU that trains."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    features = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}{features}"


def write_json(path: Path, values: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path, follow=False) as file:
        file.write(json.dumps(values, indent=1).encode("utf-8") + b"\n")
