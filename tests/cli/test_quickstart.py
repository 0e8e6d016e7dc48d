"""The first run: one line a stage, details in the log, failures with its last lines."""

import io
import os

import pytest

from rhhn_fairseq.cli import quickstart
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.errors import UsageError


@pytest.mark.slow
def test_a_command_that_fails_shows_its_last_lines(tmp_path, capsys):
    log = (tmp_path / "log").open("w+")
    with pytest.raises(UsageError, match=f"rhhn prepare failed with status 1; see {tmp_path / 'log'}"):
        list(quickstart.lines_of(["prepare", "text", "--input", "no.txt", "--dest", "x"], log))
    log.seek(0)
    (last,) = capsys.readouterr().err.splitlines()
    assert last.startswith("error: pass either --input with --split")
    assert log.read().endswith(last + "\n")


def test_the_line_follows_the_log(monkeypatch):
    monkeypatch.setattr(quickstart, "sample", lambda name, log: "def f():\n    return 1")
    output = io.StringIO()
    bar = quickstart.tqdm(total=None, file=output, disable=False, mininterval=0)
    monkeypatch.setattr(bar, "write", lambda text: output.write(text + "\n"))
    summary = "char_lm: 1,234 parameters; cpu, float32; LSTM on native; 40 updates an epoch"
    quickstart.follow(f"x | INFO | rhhn_fairseq.training | {summary}\n", "LSTM", bar, None)
    figures = '{"epoch": 1, "bpc": "3.21", "num_updates": "30"}'
    quickstart.follow(f"x | INFO | train_inner | {figures}\n", "LSTM", bar, None)
    assert (bar.total, bar.n, bar.postfix) == (120, 30, "3.21 bits per character")
    for subset, bits in (("valid", "2.4"), ("train", "2.5")):
        figures = f'{{"epoch": 2, "{subset}_bpc": "{bits}", "{subset}_num_updates": "80"}}'
        quickstart.follow(f"x | INFO | {subset} | {figures}\n", "LSTM", bar, None)
    assert "training  LSTM, 1,234 parameters, 3 epochs\n" in output.getvalue()
    assert "          epoch 2: 2.40 bits  def f():↵    return 1\n" in output.getvalue()


def test_the_programs_know_the_plugin_without_its_autoload(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RHHN_AUTOLOAD", "0")
    with (tmp_path / "log").open("w") as log, pytest.raises(UsageError, match="rhhn train failed"):
        quickstart.train("LSTM", log)
    # There is no text, but the architecture is known.
    assert f"{quickstart.DATA}/dict.txt" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "CHARACTERS", 40_000)
    sizes = "--cell ln_hyperlstm --hidden-size 16 --hyper-size 8 --hyper-embed-size 2"
    models = {"LN HyperLSTM": sizes.split(), "LSTM": "--cell lstm --hidden-size 16".split()}
    monkeypatch.setattr(quickstart, "MODELS", models)
    assert cli.run(lambda: quickstart.main([])) == 0
    shown = capfd.readouterr().out.splitlines()
    assert len(shown) < 24
    assert [line.split()[0] for line in shown[:3]] == ["details", "text", "training"]
    assert sum("bits  def " in line for line in shown) == 2 * quickstart.EPOCHS
    assert (tmp_path / "checkpoints/quickstart/changes.png").is_file()
    assert ("/bin/activate" in "".join(shown)) == ("VIRTUAL_ENV" not in os.environ)
    # What is trained is used again.
    assert cli.run(lambda: quickstart.main([])) == 0
    assert "trained before" in capfd.readouterr().out
