"""Runs fairseq-train within the tests' process, which spares the seconds that a process takes to start."""

import json
import logging
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq_cli import train as program

from helpers.cli import USER_DIR
from helpers.tiny_char_lm import write_corpus

# Two epochs of 22 updates with dropout; every loss is logged in full.
CHAR_LM = ["--task", "char_lm", "--arch", "char_lm", "--cell", "lstm", "--hidden-size", 8]
CHAR_LM += ["--recurrent-dropout", 0.2, "--criterion", "char_cross_entropy", "--disable-validation"]
CHAR_LM += ["--optimizer", "adam", "--lr", 0.01, "--clip-norm", 1, "--cpu", "--num-workers", 0]
CHAR_LM += ["--batch-size", 2, "--tokens-per-sample", 7, "--update-freq", 2, "--no-epoch-checkpoints"]
LOG = ["--log-format", "json", "--log-interval", 1]


@dataclass
class Log(logging.Handler):
    """What a run logged: its messages, and the records of its updates."""

    messages: list[str] = field(default_factory=list)
    updates: list[dict] = field(default_factory=list)

    def __post_init__(self):
        super().__init__(logging.INFO)

    def emit(self, record):
        message = record.getMessage()
        self.messages.append(message)
        if record.name == "train_inner" and message.startswith("{"):
            self.updates.append(json.loads(message))

    @property
    def losses(self) -> list[str]:
        return [record["loss"] for record in self.updates]

    __hash__ = logging.Handler.__hash__


class At(logging.Handler):
    """Acts once, at a record of the log that matches."""

    def __init__(self, pattern, act):
        super().__init__(logging.INFO)
        self.pattern, self.act = pattern, act

    def emit(self, record):
        if self.pattern and re.search(self.pattern, record.getMessage()):
            self.pattern = None
            self.act()


@contextmanager
def acting_at(pattern: str, act: Callable):
    """Calls ``act`` within the context at the first record of the log that matches; there has to be one."""
    handler = At(pattern, act)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.pattern is None


class Optimizer:
    """What a task's train_step needs of one."""

    def backward(self, loss):
        loss.backward()


def configuration(arguments):
    """What fairseq-train makes of a command line."""
    parser = options.get_training_parser()
    given = [str(argument) for argument in (*arguments, *LOG, "--user-dir", USER_DIR)]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))


def train(*arguments, log: Log | None = None) -> Log:
    """fairseq-train with these arguments, and its log; what it raises comes through."""
    cfg, log = configuration(arguments), log or Log()
    metrics.reset()
    root = logging.getLogger()
    level = root.level
    root.addHandler(log)
    root.setLevel(logging.INFO)
    try:
        distributed_utils.call_main(cfg, program.main)
    finally:
        root.removeHandler(log)
        root.setLevel(level)
    return log


def char_lm(folder: Path, save_dir: Path, *more) -> list:
    """The arguments that train a tiny character model, its corpus prepared in ``folder`` if it is not yet."""
    data = folder / "data"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder)
    return [data, *CHAR_LM, "--save-dir", save_dir, *more]
