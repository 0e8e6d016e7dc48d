"""The record of a run: what is read from its log, its file, and the page of all records."""

from dataclasses import asdict
from pathlib import Path

import pytest

from experiments import page
from experiments.records import Cost, Record, write_json
from experiments.tables import TABLES
from rhhn_fairseq.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
HA = TABLES["ha-ptb"]

LOG = """2026 | INFO | rhhn_fairseq.training | char_lm: 4,254,050 parameters; cpu, float32; LSTM on native
{"epoch": 1, "update": 0.5, "bpc": "4.0", "num_updates": "5", "train_wall": "3"}
{"epoch": 1, "update": 1.0, "bpc": "3.5", "num_updates": "10", "train_wall": "3"}
{"epoch": 1, "valid_loss": "3", "valid_bpc": "3.25", "valid_num_updates": "10"}
{"epoch": 1, "train_bpc": "3.75", "train_num_updates": "10", "train_train_wall": "6", "train_wall": "9"}
{"epoch": 2, "update": 1.5, "bpc": "3.2", "num_updates": "15", "train_wall": "3"}
"""


@pytest.fixture
def record(tmp_path) -> Record:
    (tmp_path / "train.log").write_text(LOG)
    record = Record("ha-ptb", "lstm_ptb", "lstm_ptb", 1, 1.0, "float32", device="a processor")
    record.read_curve(tmp_path / "train.log")
    return record


def test_the_curve_has_an_entry_an_epoch_and_what_is_begun_counts(record):
    assert [entry["epoch"] for entry in record.curve] == [1]
    assert record.curve[0]["valid"]["bpc"] == 3.25 and record.curve[0]["train"]["bpc"] == 3.75
    assert (record.parameters, record.updates, record.epochs, record.seconds) == (4_254_050, 15, 1, 9.0)
    assert record.cost() == Cost("lstm_ptb", "float32", 0.6, 10, "a processor", 1)


def test_an_epoch_that_a_signal_ended_in_its_validation_counts(tmp_path, record):
    """fairseq then prints no training line for it."""
    whole, cut = tmp_path / "whole.log", tmp_path / "cut.log"
    end = '{"epoch": 2, "train_bpc": "3.1", "train_num_updates": "20", "train_train_wall": "6"}\n'
    whole.write_text(LOG + end)
    cut.write_text(
        "\n".join(line for line in (LOG + end).splitlines() if '"train_num_updates": "10"' not in line)
    )
    found = []
    for log in (whole, cut):
        record.read_curve(log)
        found.append((record.updates, record.seconds, [(e["epoch"], e["valid"]) for e in record.curve]))
    assert found[0] == found[1] and len(record.curve) == 2


def test_a_record_is_read_as_it_was_written(tmp_path, record):
    record.save(tmp_path / "a" / "b.json")
    assert Record.load(tmp_path / "a" / "b.json") == record


def test_the_page_shows_paper_ours_difference_and_cost(tmp_path, record):
    record.figures = {"valid bpc carry": 1.4, "test bpc carry": 1.4}
    record.remark = "half the rate; the rest is in the record"
    record.save(tmp_path / "lstm_ptb-s1.json")
    record.seed, record.figures = 2, {"valid bpc carry": 1.5}
    record.save(tmp_path / "lstm_ptb-s2.json")
    # Seeds of another budget or other options stand in rows of their own.
    record.seed, record.options = 3, {"extra": ["--lr", "0.1"]}
    record.save(tmp_path / "lstm_ptb-s3.json")
    write_json(tmp_path / "costs" / "ln_lstm_ptb.json", asdict(Cost("", "float32", 36.0, 100, "a GPU", 0)))
    text = page.render(HA, tmp_path, tmp_path / "pages").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| lstm_ptb ")]
    assert len(rows) == 2 and "- lstm_ptb: half the rate\n" in text
    figures = "1.450 (+0.103, 1.400 to 1.500) | 1.400 (+0.088, 1 of 2 seeds)"
    assert rows[0] == f"| lstm_ptb | {figures} | 2 |"
    assert "In every row: parameters 4,254,050; valid bpc carry: paper 1.347; " in text
    assert "\n| ln_lstm_ptb | 4,264,050 | 1.3 | 1.267 | 36 | 1.00 | float32, a GPU |\n" in text
    record.row = "rnn_ptb"
    record.save(tmp_path / "rnn_ptb-s1.json")
    with pytest.raises(UsageError, match=r"rnn_ptb-s1\.json: ha-ptb has no row rnn_ptb"):
        page.render(HA, tmp_path, tmp_path / "pages")


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_the_pages_of_the_repository_are_those_of_its_records(table, tmp_path):
    """Figures that somebody edits by hand, or a record that is damaged, show here."""
    own = ROOT / "docs" / "results" / f"{table.name}.md"
    rendered = page.render(table, ROOT / "experiments" / "records" / table.name, tmp_path)
    assert rendered.read_text() == own.read_text()
    for picture in tmp_path.glob("*.png"):
        assert (own.parent / picture.name).exists() and f"({picture.name})" in own.read_text()


def test_the_share_of_the_paper_s_budget_counts_smaller_batches_for_less(record):
    mnist = TABLES["mnist"]
    row = mnist.row("pmnist_lstm")
    run = Record("mnist", row.name, row.arch, 1, 1.0, "float32", updates=50_000)
    assert page.budget_share(row, run) == 0.5
    for extra in (["--batch-size", "50"], ["--batch-size=50"]):
        run.options = {"extra": extra}
        assert page.budget_share(row, run) == 0.25
    assert page.budget_share(HA.row("lstm_ptb"), record) is None
