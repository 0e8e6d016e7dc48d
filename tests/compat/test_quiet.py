"""What a training says at its start: details in the log file, one line on the screen."""

import functools
import logging
import re

import pytest
import torch
from helpers.cli import USER_DIR, run_module
from helpers.in_process import Log, char_lm, train

from rhhn_fairseq.compat import quiet


class Screen(logging.Handler):
    """Keeps the messages that it is given."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def said(monkeypatch, tmp_path):
    """Logs a record through the filter of its logger; what is then on the screen, and in the file."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    screen, file = Screen(), logging.FileHandler(tmp_path / "details.log")
    program = logging.getLogger("fairseq_cli.train")
    monkeypatch.setattr(program, "handlers", [file])

    def log(name: str, message, level=logging.INFO) -> tuple[list[str], str]:
        logger = logging.getLogger(name)
        details = functools.partial(quiet._pass, re.compile(quiet.DETAILS[name] or ""))
        monkeypatch.setattr(logger, "filters", [details])
        logger.addHandler(screen)
        before = logger.level
        # By its method: a logger remembers what it is enabled for.
        logger.setLevel(logging.INFO)
        try:
            logger.log(level, message)
        finally:
            logger.setLevel(before)
            logger.removeHandler(screen)
        return screen.messages, (tmp_path / "details.log").read_text()

    yield log
    file.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fairseq_cli.train", {"common": {"seed": 1}}),
        ("fairseq_cli.train", torch.nn.Linear(1, 1)),
        ("fairseq_cli.train", "num. shared model params: 7"),
        ("fairseq.trainer", "loading train data for epoch 1"),
        ("rhhn_fairseq.ops.backends", "LSTM runs on the native backend"),
    ],
)
def test_details_are_in_the_file_alone(said, name, message):
    screen, file = said(name, message)
    assert screen == []
    assert file.count(str(message)) == 1


def test_everything_else_is_on_the_screen(said, monkeypatch):
    assert said("fairseq_cli.train", "done training in 1 seconds")[0] == ["done training in 1 seconds"]
    assert said("fairseq.trainer", "loading train data failed", logging.WARNING)[0][1:]
    monkeypatch.setenv("LOGLEVEL", "debug")
    assert "num. shared model params: 7" in said("fairseq_cli.train", "num. shared model params: 7")[0]


def test_one_line_sums_the_training_up(tmp_path):
    log = train(*char_lm(tmp_path, tmp_path / "checkpoints", "--max-epoch", 2), log=Log())
    lines = [message for message in log.messages if " updates an epoch" in message]
    assert len(lines) == 1
    assert re.fullmatch(
        r"char_lm: [\d,]+ parameters; cpu, float32; LSTM on \w+; 22 updates an epoch, the first in [\d.]+ s; "
        r"loss ([\d.]+)",
        lines[0],
    )


def test_the_command_is_as_quiet_as_the_program(tmp_path):
    """``rhhn train`` loads the plugin itself, and keeps fairseq's details off the screen all the same."""
    screens = []
    for number, module in enumerate((["fairseq_cli.train"], ["rhhn_fairseq", "train"])):
        arguments = char_lm(tmp_path, tmp_path / str(number), "--max-update", 1, "--user-dir", USER_DIR)
        result = run_module(module[0], [*module[1:], *arguments])
        # Without times and figures.
        screens.append(re.findall(r"INFO \| ([\w.]+) \| ", result.stdout + result.stderr))
    assert screens[0] == screens[1] and "rhhn_fairseq.training" in screens[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--max-epoch", 1, "--total-num-update", 50], "training ends after 22 updates, before the learning"),
        (
            ["--max-update", 9, "--total-num-update", 4],
            "the learning rate is 0 from update 4 on, and training",
        ),
        (["--max-epoch", 1, "--total-num-update", 22], None),
    ],
)
def test_a_schedule_of_another_length_is_told(tmp_path, options, line):
    schedule = ["--lr-scheduler", "polynomial_decay", *options]
    messages = train(*char_lm(tmp_path, tmp_path / "run", *schedule)).messages
    lines = [message for message in messages if "give --total-num-update" in message]
    assert len(lines) == (line is not None) and all(one.startswith(line) for one in lines)
