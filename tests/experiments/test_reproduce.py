"""Rows of the papers' tables: commands, runs that are interrupted, and records that nothing damages."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq.models import MODEL_REGISTRY
from helpers.cli import HANGS
from helpers.tiny_char_lm import write_corpus

from experiments import plan, reproduce, running
from experiments.plan import Run
from experiments.records import Record
from experiments.tables import TABLES
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.describe import build_empty, count_parameters
from rhhn_fairseq.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
ROWS = [(table, row) for table in TABLES.values() for row in table.rows]
HA, SU = TABLES["ha-ptb"], TABLES["su-ptb"]
EPOCH = '{"epoch": 1, "train_bpc": "3", "train_num_updates": "10", "train_train_wall": "6"}'


def a_run(**options) -> Run:
    return Run(HA, HA.row("lstm_ptb"), **options)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The directory of runs; those of the repository's records and pages are others. Nothing is prepared."""
    monkeypatch.setattr(reproduce, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(reproduce, "PAGES", tmp_path / "pages")
    monkeypatch.setattr(running.corpora, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(running.corpora, "task_options", lambda *_: {})
    monkeypatch.setattr(running.CharVocabulary, "load", lambda _: SimpleNamespace(corpus="a text"))
    monkeypatch.setattr(running, "train", None)
    return tmp_path / "runs"


CPU = Namespace(threads=1, device="cpu")


def finished(run, path, **figures) -> Record:
    record = running.open_record(run, path, CPU)
    record.state, record.figures = "finished", {"valid bpc carry": 1.0} | figures
    record.save(path)
    return record


@pytest.mark.parametrize("table, row", ROWS, ids=[f"{table.name}-{row.name}" for table, row in ROWS])
def test_a_row_is_an_architecture_with_figures_that_its_table_has(table, row):
    assert row.arch in MODEL_REGISTRY
    assert set(row.reported) <= {name for name, _, _ in table.scoring.figures()}
    assert count_parameters(build_empty(row.arch)) == row.parameters


def test_options_of_a_run_are_the_row_s_the_budget_s_and_the_seed():
    run = Run(SU, SU.row("hyperrhn_ptb"), seed=3, precision="bfloat16", budget={"epochs": 4, "hours": 1.5})
    options = {"arch": "hyperrhn_ptb", "seed": 3, "max_epoch": 4, "stop_time_hours": 1.5, "bf16": True}
    assert run.options() == options and run.name == "hyperrhn_ptb-s3"
    words = plan.program("train", Path("data"), {"a_b": 1, "c": True, "d": False, "e": None})
    assert words[2:4] == ["-m", "fairseq_cli.train"] and words[-4:] == ["data", "--a-b", "1", "--c"]
    scaled = Run(SU, SU.row("hyperrhn_ptb"), scale=0.1).options()
    assert (scaled["hidden_size"], scaled["hyper_size"], scaled["batch_size"]) == (100, 12, 26)
    assert scaled["max_epoch"] == 7


def test_a_published_recipe_may_be_changed():
    words = ["ha-ptb", "lstm_ptb", "--recipe", "published"]
    published, other = (
        reproduce._runs(HA, *reproduce._parse([*words, *more]))[0]
        for more in ([], ["--epochs", "1", "--precision", "float32", "--", "--lr", "0.001"])
    )
    assert published.budget == {"epochs": 25} and published.precision == "bfloat16"
    assert other.budget == published.budget | {"epochs": 1} and other.precision == "float32"
    assert other.extra == (*published.extra, "--lr", "0.001")


@pytest.mark.parametrize(
    "table, text, figure",
    [
        ("ha-ptb", "PTB, test, protocol carry: 1.250000 bits per character, perplexity 2.4", 1.25),
        ("copying", 'valid | {"valid_loss": "1.8", "valid_accuracy": "7.43", "valid_bsz": "9"}', 7.43),
        ("ha-wmt", "BLEU = 1.5 9.9/3.0\nBLEU = 38.95 66.1/44.0", 38.95),
        ("mnist", "Traceback", None),
    ],
)
def test_a_figure_is_read_from_what_the_evaluation_printed(tmp_path, table, text, figure):
    pattern, log = running.pattern_of(TABLES[table].scoring), tmp_path / "evaluation.log"
    if figure is None:
        with pytest.raises(UsageError, match="evaluation.log: has no figure"):
            running.evaluate(printing(text), pattern, 1, log)
    else:
        assert running.evaluate(printing(text), pattern, 1, log) == figure
        assert log.read_text().rstrip() == text
        with pytest.raises(UsageError, match=re.escape(text.splitlines()[-1])):
            running.evaluate(printing(text, status=1), pattern, 1, log)


def test_what_the_repository_has_recorded_is_not_trained(runs, tmp_path, capsys):
    path = tmp_path / "records" / "ha-ptb" / "lstm_ptb-s1.json"
    finished(a_run(), path)
    before = path.read_bytes()
    reproduce.main(["ha-ptb", "lstm_ptb", "--runs", str(tmp_path / "runs"), "--record"])
    assert capsys.readouterr().out.endswith("; recorded already, nothing trained\n")
    assert path.read_bytes() == before and not (tmp_path / "pages").exists()
    # Another recipe, type or budget is another run; so is the same one if it is asked for again.
    for more in (["--epochs", "3"], ["--precision", "bfloat16"], ["--again"], ["--", "--lr", "0.1"]):
        with pytest.raises(TypeError, match="not callable"):
            reproduce.main(["ha-ptb", "lstm_ptb", "--runs", str(tmp_path / more[-1]), *more])
    assert path.read_bytes() == before
    path.unlink()
    finished(a_run(budget={"epochs": 3}), path)
    with pytest.raises(TypeError, match="not callable"):
        reproduce.main(["ha-ptb", "lstm_ptb", "--runs", str(tmp_path / "without_a_budget")])


def test_a_run_becomes_a_record_of_the_repository_only_by_record(runs, tmp_path, monkeypatch):
    path = tmp_path / "records" / "ha-ptb" / "lstm_ptb-s1.json"
    record = finished(a_run(), a_run().record(runs), **{"test bpc carry": 1.2})
    words = ["ha-ptb", "lstm_ptb", "--runs", str(runs)]
    reproduce.main(words)
    assert not path.exists() and "1.200" in (runs / "ha-ptb.md").read_text()
    reproduce.main([*words, "--record", "a note"])
    assert Record.load(path).remark == "a note" and Record.load(path).figures == record.figures
    assert "- lstm_ptb: a note" in (tmp_path / "pages" / "ha-ptb.md").read_text()
    before = path.read_bytes()

    def fail(run, *_):
        raise UsageError("diverged")

    monkeypatch.setattr(running, "execute", fail)
    with pytest.raises(UsageError, match=r"1 of 1 runs failed: lstm_ptb-s1 \(diverged\)"):
        reproduce.main([*words, "--record"])
    assert path.read_bytes() == before


def test_a_record_is_opened_for_another_budget_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    record = finished(a_run(budget={"epochs": 2}), path)
    record.updates = 20
    record.save(path)
    assert running.open_record(a_run(budget={"epochs": 2}), path, CPU).state == "finished"
    longer = running.open_record(a_run(budget={"epochs": 3}), path, CPU)
    assert (longer.state, longer.figures, longer.options["max_epoch"]) == ("training", {}, 3)
    with pytest.raises(UsageError, match="has been trained for 20 updates"):
        running.open_record(a_run(budget={"updates": 19}), path, CPU)
    with pytest.raises(UsageError, match=r"started with other options \(bf16\)"):
        running.open_record(a_run(budget={"epochs": 2}, precision="bfloat16"), path, CPU)


def printing(*lines, status=0) -> list[str]:
    """A command that stands in for one of fairseq's."""
    return [sys.executable, "-c", f"print(*{lines!r}, sep='\\n'); raise SystemExit({status})"]


def trained(tmp_path, *lines, status=0) -> Record:
    (tmp_path / "record").mkdir(exist_ok=True)
    record = running.open_record(a_run(), tmp_path / "record.json", CPU)
    with contextlib.suppress(UsageError):
        running.train(printing(*lines, status=status), record, tmp_path / "record.json", 1)
    return Record.load(tmp_path / "record.json")


def test_how_a_training_ended_is_recorded(tmp_path):
    record = trained(tmp_path, EPOCH)
    assert (record.state, record.updates) == ("evaluating", 10)
    # The log goes on. A training with nothing left to do leaves what was recorded.
    assert trained(tmp_path, "nothing is left").updates == 10
    record = trained(tmp_path, EPOCH.replace("10", "20").replace("1,", "2,"), "ValueError: no", status=3)
    assert (record.state, record.problem, record.updates) == ("failed", "ValueError: no", 20)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ha-ptp"], "TABLE ha-ptp is unknown, did you mean ha-ptb"),
        (["ha-ptb", "lstm"], "ha-ptb has no row lstm, it has lstm_ptb"),
        (["ha-ptb", "lstm_ptb", "--scale", "2"], "--scale 2 is not in (0, 1]"),
        (["ha-iam", "lstm_900_iam"], "--from-dir"),
    ],
)
def test_mistakes_end_in_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    # Runs that fail have said so in a line of their own.
    assert cli.run(lambda: reproduce.main(arguments)) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def wait_for(done) -> None:
    end = time.monotonic() + HANGS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def processes_in(directory: Path) -> list[Path]:
    """Running processes whose command line names the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path] if os.fsencode(directory) in path.read_bytes() else []
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_and_a_finished_one_is_left_alone(tmp_path):
    for name in ("data", "corpus"):
        (tmp_path / name).mkdir()
    Path(write_corpus(tmp_path / "corpus")).rename(tmp_path / "data" / "ptb")
    words = ["ha-ptb", "lstm_ptb", "--epochs", "3", "--device", "cpu", "--data", tmp_path / "data"]
    words += ["--runs", tmp_path / "runs", "--", "--hidden-size", 16, "--batch-size", 2]
    words += ["--tokens-per-sample", 5, "--log-interval", 1, "--save-interval-updates", 10]
    command = [sys.executable, "-m", "experiments.reproduce", *map(str, words)]
    place = tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1"
    path, log = place.with_suffix(".json"), place / "train.log"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        wait_for(
            lambda: first.poll() is not None or log.exists() and '"num_updates": "70"' in log.read_text()
        )
        assert first.poll() is None
        first.kill()
    # The training ends with what ran it, and saves.
    wait_for(lambda: not processes_in(place))
    record = json.loads(path.read_text())
    # In the second epoch, the record has the first.
    assert (record["state"], record["epochs"]) == ("training", 1) and record["updates"] < 70
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS, check=False)
    assert result.returncode == 0, result.stderr
    record, before = Record.load(path), path.read_bytes()
    assert (record.state, record.epochs) == ("finished", 3)
    assert set(record.figures) == {"valid bpc carry", "test bpc carry"}
    assert "Loaded checkpoint" in log.read_text()
    # The small text of this test stands in for PTB, and the page says so.
    page = (tmp_path / "runs" / "ha-ptb.md").read_text()
    assert record.corpus.startswith("user text") and record.corpus in page
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=HANGS, check=True)
    assert path.read_bytes() == before
