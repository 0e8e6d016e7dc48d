"""What a training says at its start: details in the log file, one line on the screen."""

import logging
import re

import pytest
import torch
from helpers.cli import USER_DIR, python, run_module
from helpers.in_process import Log, char_lm, train

from rhhn_fairseq.compat import logs


@pytest.mark.parametrize("name", ["fairseq_cli.train", "fairseq.trainer", "rhhn_fairseq.ops.backends"])
def test_details_are_in_the_file_alone(monkeypatch, tmp_path, name):
    monkeypatch.delenv("LOGLEVEL", raising=False)
    file = logging.FileHandler(tmp_path / "details.log")
    monkeypatch.setattr(logging.getLogger("fairseq_cli.train"), "handlers", [file])
    pattern = logs.DETAILS if name in logs.SOME_DETAILS else re.compile("")

    def is_shown(message, level=logging.INFO) -> bool:
        return logs._pass(pattern, logging.LogRecord(name, level, "", 1, message, (), None))

    details = {"common": {"seed": 1}}, torch.nn.Linear(1, 1), "num. shared model params: 7"
    assert not any(map(is_shown, details))
    assert is_shown("done training in 1 seconds") == (name in logs.SOME_DETAILS)
    assert is_shown("loading train data failed", logging.WARNING)
    monkeypatch.setenv("LOGLEVEL", "debug")
    assert all(map(is_shown, details))
    file.close()
    text = (tmp_path / "details.log").read_text()
    assert all(text.count(str(message)) == 1 for message in details)


@pytest.mark.slow
def test_a_notebook_keeps_its_root_logger():
    """A model that fairseq imports lets the details of every library through."""
    state = "import rhhn_fairseq.plugin; root = logging.getLogger(); print(root.level, len(root.handlers))"
    for given, kept in (("pass", "30 0"), ("logging.basicConfig(level='DEBUG')", "10 1")):
        assert python(f"import logging; {given}; {state}").stdout.splitlines()[-1] == kept


def test_one_line_sums_the_training_up(tmp_path):
    log = train(*char_lm(tmp_path, tmp_path / "checkpoints", "--max-epoch", 2), log=Log())
    lines = [message for message in log.messages if " updates an epoch" in message]
    assert len(lines) == 1
    assert re.fullmatch(
        r"char_lm: [\d,]+ parameters; cpu, float32; LSTM on \w+; 22 updates an epoch, the first in [\d.]+ s; "
        r"loss ([\d.]+)",
        lines[0],
    )


@pytest.mark.slow
def test_the_command_is_as_quiet_as_the_program(tmp_path):
    """``rhhn train`` loads the plugin itself, and keeps fairseq's details off the screen all the same."""
    screens = []
    for number, module in enumerate((["fairseq_cli.train"], ["rhhn_fairseq", "train"])):
        arguments = char_lm(tmp_path, tmp_path / str(number), "--max-update", 1, "--user-dir", USER_DIR)
        result = run_module(module[0], [*module[1:], *arguments])
        # Without times and figures.
        screens.append(re.findall(r"INFO \| ([\w.]+) \| ", result.stdout + result.stderr))
    assert screens[0] == screens[1] and "rhhn_fairseq.training" in screens[0]
