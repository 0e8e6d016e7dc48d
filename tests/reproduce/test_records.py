"""The record of a run: what is read from its log, its file, and the page of all records."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.reproduce import records, report, running
from rhhn_fairseq.reproduce.records import Cost, Record
from rhhn_fairseq.reproduce.tables import TABLES

HA, SU = TABLES["ha-ptb"], TABLES["su-ptb"]

LOG = """2026-01-01 | INFO | rhhn_fairseq.training | char_lm: 20,735 parameters; cpu, float32; LSTM on native
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
    assert (record.updates, record.epochs, record.seconds) == (15, 1, 9.0)
    assert record.cost() == Cost("lstm_ptb", "float32", 0.6, 10, "a processor", 1)


def test_parameters_are_read_from_the_line_that_sums_the_training_up():
    assert running._parameters(LOG) == 20_735
    assert running._parameters("nothing") is None


def test_of_several_validation_sets_the_first_is_the_curve(tmp_path, record):
    test = '{"epoch": 1, "test_loss": "9", "test_bpc": "9.9", "test_num_updates": "10"}\n'
    lines = LOG.splitlines(keepends=True)
    (tmp_path / "train.log").write_text("".join([*lines[:4], test, *lines[4:]]))
    record.read_curve(tmp_path / "train.log")
    assert [entry["valid"]["bpc"] for entry in record.curve] == [3.25]


def test_lines_that_a_restart_repeats_count_once(tmp_path, record):
    lines = LOG.splitlines(keepends=True)
    (tmp_path / "train.log").write_text("".join([*lines, lines[-1]]))
    before = record.seconds
    record.read_curve(tmp_path / "train.log")
    assert record.seconds == before


def test_an_epoch_that_was_cut_counts_by_its_updates(tmp_path, record):
    known = LOG.replace("LSTM on native", "LSTM on native; 10 updates an epoch, the first in 1.0 s")
    cut = '{"epoch": 2, "train_bpc": "3.1", "train_num_updates": "15", "train_train_wall": "3"}\n'
    (tmp_path / "train.log").write_text(known + cut)
    record.read_curve(tmp_path / "train.log")
    assert (record.updates, record.epochs, record.seconds) == (15, 1.5, 9.0)
    assert record.cost().updates_per_epoch == 10
    # It was not validated.
    assert record.curve[1]["train"] == {"bpc": 3.1} and record.curve[1]["valid"] == {}
    # fairseq restores the seconds of the epoch's beginning.
    rest = cut.replace('"15"', '"20"').replace('"3"', '"6"')
    (tmp_path / "train.log").write_text(known + cut + rest)
    record.read_curve(tmp_path / "train.log")
    assert (record.updates, record.epochs, record.seconds) == (20, 2, 12.0)
    assert [entry["updates"] for entry in record.curve] == [10, 20]


def test_an_epoch_that_was_cut_in_its_validation_keeps_its_figure(tmp_path, record):
    lines = LOG.replace(
        "LSTM on native", "LSTM on native; 10 updates an epoch, the first in 1.0 s"
    ).splitlines()
    rest = """{"epoch": 2, "update": 2.0, "bpc": "3.1", "num_updates": "20", "train_wall": "4"}
{"epoch": 2, "valid_bpc": "3.05", "valid_num_updates": "15"}
{"epoch": 2, "valid_bpc": "3.0", "valid_num_updates": "20"}
{"epoch": 3, "update": 3.0, "bpc": "2.9", "num_updates": "30", "train_wall": "5"}
{"epoch": 3, "train_bpc": "2.9", "train_num_updates": "30", "train_train_wall": "5", "train_wall": "9"}
"""
    (tmp_path / "train.log").write_text("\n".join([*lines, rest]))
    record.read_curve(tmp_path / "train.log")
    assert [entry["updates"] for entry in record.curve] == [10, 20, 30]
    assert record.curve[1] == {"epoch": 2, "updates": 20, "seconds": 13.0, "train": {}, "valid": {"bpc": 3.0}}
    assert (record.updates, record.epochs, record.seconds) == (30, 3, 18.0)


def test_a_record_is_read_as_it_was_written(tmp_path, record):
    record.save(tmp_path / "a" / "b.json")
    assert Record.load(tmp_path / "a" / "b.json") == record
    (tmp_path / "c.json").write_text('{"row": 1}')
    with pytest.raises(UsageError, match=r"c\.json: is no record of a run"):
        Record.load(tmp_path / "c.json")


def test_the_page_shows_paper_ours_difference_and_cost(tmp_path, record):
    record.figures = {"valid bpc carry": 1.4, "test bpc carry": 1.4}
    other = Record.load(_saved(record, tmp_path / "x.json"))
    other.seed, other.figures = 2, {"valid bpc carry": 1.5, "test bpc carry": 1.5}
    for run in (record, other):
        run.save(tmp_path / "runs" / "ha-ptb" / f"lstm_ptb-s{run.seed}.json")
    Cost("ln_lstm_ptb", "float32", 2.0, 1800, "a processor", 1).save(
        tmp_path / "runs" / "ha-ptb" / "costs" / "ln_lstm_ptb.json"
    )
    text = report.render(HA, tmp_path, "the command").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| lstm_ptb |"))
    assert "| 1.347 | 1.450 (1.400 to 1.500, 2 seeds) | +0.103 |" in row
    assert "| ln_lstm_ptb | float32, a processor, 1 thread | 2 | 1,800 | 1.00 | unknown |" in text
    assert "| ln_hyperlstm_ptb | 4,923,154 | 1.281 |  |  | 1.25 |  |  | not run |" in text
    assert "    the command" in text
    assert "    the command" in report.render(HA, tmp_path).read_text()


def test_each_scale_has_a_picture_if_it_has_a_curve(tmp_path, record):
    record.save(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    assert "![" not in report.render(HA, tmp_path).read_text() and not list(tmp_path.glob("*.png"))
    record.curve = [dict(record.curve[0], epoch=n, updates=10 * n) for n in (1, 2)]
    for scale in (1.0, 0.1):
        record.scale = scale
        record.save(tmp_path / "runs" / "ha-ptb" / f"lstm_ptb-x{scale:g}-s1.json")
    text = report.render(HA, tmp_path).read_text()
    for name in ("ha-ptb.png", "ha-ptb-x0.1.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    full, scaled = text.split("## Scaled by 0.1")
    assert "(ha-ptb.png)" in full and "(ha-ptb-x0.1.png)" in scaled


def test_a_picture_without_curves_is_deleted(tmp_path, record):
    for name in ("ha-ptb.png", "ha-ptb-x0.1.png", "ha-ptb_notes.png", "su-ptb.png"):
        (tmp_path / name).write_bytes(b"old")
    record.curve = [dict(record.curve[0], epoch=n, updates=10 * n) for n in (1, 2)]
    record.save(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    report.render(HA, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"ha-ptb.png", "ha-ptb_notes.png", "su-ptb.png"}
    (tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json").unlink()
    report.render(HA, tmp_path)
    assert not (tmp_path / "ha-ptb.png").exists()


def test_a_training_on_a_gpu_names_no_threads(tmp_path, record):
    record.device, record.threads = "NVIDIA H200", 0
    record.save(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    text = report.render(HA, tmp_path).read_text()
    assert "NVIDIA H200, float32" in text and "thread" not in text


def test_seeds_with_other_options_stand_in_rows_of_their_own(tmp_path, record):
    for seed, extra in ((1, []), (2, ["--lr", "0.1"]), (3, ["--batch-size", "1e2"])):
        record.seed, record.options, record.figures = seed, {"extra": extra}, {"test bpc carry": 1.0 + seed}
        record.save(tmp_path / "runs" / "ha-ptb" / f"lstm_ptb-s{seed}.json")
    text = report.render(HA, tmp_path).read_text()
    assert "seeds)" not in text
    assert len([line for line in text.splitlines() if line.startswith("| lstm_ptb | 4,254,050 ")]) == 3


def test_epochs_without_validation_are_left_out_beside_others(tmp_path, record):
    record.curve = [
        {"epoch": n, "updates": 10 * n, "seconds": 1.0, "train": {"bpc": 2.0}, "valid": valid}
        for n, valid in ((1, {}), (2, {"bpc": 1.9}))
    ]
    record.save(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    text = report.render(HA, tmp_path).read_text()
    assert "| 2 | 20 | 0.00 | 2 | 1.9 |" in text and "| 1 | 10 |" not in text


@pytest.mark.parametrize("epochs, shown", [(30, range(1, 31)), (31, range(1, 32, 2)), (62, range(2, 63, 3))])
def test_of_many_epochs_the_last_is_always_shown(tmp_path, record, epochs, shown):
    record.curve = [dict(record.curve[0], epoch=n, updates=10 * n) for n in range(1, epochs + 1)]
    record.save(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    text = report.render(HA, tmp_path).read_text()
    assert [int(n) for n in re.findall(r"^\| (\d+) \| \d", text, re.MULTILINE)] == list(shown)


def test_a_record_of_an_unknown_row_is_named(tmp_path, record):
    record.row = "rnn_ptb"
    record.save(tmp_path / "runs" / "ha-ptb" / "rnn_ptb-s1.json")
    with pytest.raises(UsageError, match=r"rnn_ptb-s1\.json: ha-ptb has no row rnn_ptb"):
        report.render(HA, tmp_path)


def test_hours_are_means_over_seeds_which_are_in_order(tmp_path, record):
    for seed, hours in ((10, 1), (2, 3)):
        record.seed, record.seconds = seed, 3600.0 * hours
        record.save(tmp_path / "runs" / "ha-ptb" / f"lstm_ptb-s{seed}.json")
    text = report.render(HA, tmp_path).read_text()
    assert "| 1 | 15 | 2.00 | unknown | float32 |" in text and "- lstm_ptb, seeds 2, 10; " in text


def test_seeds_of_other_budgets_stand_in_rows_of_their_own(tmp_path, record):
    for seed, figures, updates in (
        (1, {}, 0),
        (2, {"test bpc carry": 1.4}, 15),
        (3, {"test bpc carry": 1.5}, 15),
    ):
        record.seed, record.figures, record.updates, record.epochs = seed, figures, updates, updates / 10
        record.save(tmp_path / "runs" / "ha-ptb" / f"lstm_ptb-s{seed}.json")
    text = report.render(HA, tmp_path, "x").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| lstm_ptb | 4,254,050 | 1.347")]
    assert len(rows) == 2 and "1.450 (1.400 to 1.500, 2 seeds)" in rows[1] and "| 1.5 | 15 |" in rows[1]
    assert "| 0 | 0 |" in rows[0]


def test_the_share_of_the_paper_s_budget_counts_updates_where_they_are_known(record):
    record.updates, record.epochs = 7_500, 30
    row = TABLES["mnist"].row("pmnist_lstm")
    assert report.budget_share(row, record) == 0.075
    # A third of the batch is a third of the images.
    record.options = {"extra": ["--log-interval", "50", "--batch-size", "32"]}
    assert report.budget_share(row, record) == pytest.approx(0.024)
    record.options = {"extra": ["--max-sentences=16", "--update-freq", "2"]}
    assert report.budget_share(row, record) == pytest.approx(0.024)
    record.options = {"extra": ["--update-freq", "1,2"]}
    assert report.budget_share(row, record) == 0.075
    assert report.budget_share(SU.row("hyperrhn_ptb"), record) == 30 / 660


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100 %"), (0.995, "100 %"), (0.12, "12 %"), (0.0061, "0.61 %")]
)
def test_shares_of_the_budget(share, text):
    assert report._percent(share) == text


def test_the_page_names_runs_that_differ_in_their_seed_once(tmp_path, record):
    for seed in (1, 2):
        record.seed, record.commit = seed, f"commit{seed}"
        command = f"train --seed {seed} --save-dir runs/lstm_ptb-x0.1-s{seed}/checkpoints"
        record.commands, record.scale = {"train": command.split()}, 0.1
        record.versions = {"torch": "2.13.0"}
        record.save(tmp_path / "runs" / "ha-ptb" / f"lstm_ptb-x0.1-s{seed}.json")
    text = report.render(HA, tmp_path, "x").read_text()
    entry = next(line for line in text.splitlines() if line.startswith("- lstm_ptb"))
    assert entry.startswith("- lstm_ptb, seeds 1, 2; commit commit1, commit2; scale 0.1; ")
    assert "`train --seed SEED --save-dir runs/lstm_ptb-x0.1-sSEED/checkpoints`" in entry
    assert text.count("train --seed") == 1
    assert text.count("torch 2.13.0") == 1 and "All with torch 2.13.0." in text
    # The curve of a smaller training is in its record, and its cost and budget are not those of the row.
    assert "by epoch" not in text and "## Cost" not in text
    assert "| 1 | 15 | 0.00 |  | float32 |" in text


def test_the_rest_of_the_paper_s_budget(tmp_path):
    Cost("rhn_ptb", "float32", 3.6, 100, "a processor", 2, "random text").save(
        tmp_path / "runs" / "su-ptb" / "costs" / "rhn_ptb.json"
    )
    page = report.render(SU, tmp_path, "x").read_text()
    # 618 epochs of 100 updates of 3.6 s.
    assert "| 0.10 | 62 hours |" in page
    # No run, no command.
    assert "How it was made" not in page
    assert "| rhn_ptb | float32, a processor, 2 threads; random text | 3.6 |" in page


def test_the_rest_of_the_paper_s_budget_is_longer_with_smaller_batches(tmp_path):
    record = Record("mnist", "pmnist_lstm", "lstm_mnist", 1, 1.0, "float32", updates=7500, seconds=1500.0)
    record.options = {"extra": ["--batch-size", "50"]}
    record.save(tmp_path / "runs" / "mnist" / "pmnist_lstm-s1.json")
    text = report.render(TABLES["mnist"], tmp_path).read_text()
    # 100,000 updates of 100 images are 200,000 of 50: 192,500 are left, 0.2 s each.
    assert "| 0.2 |  |  | 11 hours |" in text


def test_the_cost_of_an_update_is_that_of_the_median_epoch(record):
    ends = zip((10, 20, 30, 40), (20.0, 42.0, 100.0, 121.0), strict=True)
    record.curve = [{"epoch": i, "updates": u, "seconds": s} for i, (u, s) in enumerate(ends, 1)]
    record.updates, record.seconds, record.remark = 40, 121.0, "one epoch was slow"
    assert record.cost().seconds_per_update == pytest.approx(2.15)
    assert record.cost().remark == "one epoch was slow"
    record.curve = record.curve[:1]
    assert record.cost().seconds_per_update == 121 / 40
    record.seconds = 0.0
    assert record.cost() is None


def test_a_remark_with_a_bar_or_a_new_line_does_not_break_the_table(tmp_path, record):
    record.remark = "two\n\nlines | a bar"
    record.save(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    cost = Cost("ln_lstm_ptb", "float32", 3.6, None, "a processor", 2, record.remark)
    cost.save(tmp_path / "runs" / "ha-ptb" / "costs" / "ln_lstm_ptb.json")
    text = report.render(TABLES["ha-ptb"], tmp_path).read_text()
    assert "| ln_lstm_ptb | float32, a processor, 2 threads; two lines \\| a bar | 3.6 |" in text
    assert "; two lines | a bar\n" in text


def test_a_cost_without_a_remark_is_read(tmp_path):
    cost = Cost("rhn_ptb", "float32", 3.6, None, "a processor", 2)
    values = dataclasses.asdict(cost)
    del values["remark"]
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert Cost.load(tmp_path / "old.json") == cost
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(UsageError, match="none.json: does not say what an update costs"):
        Cost.load(tmp_path / "none.json")


def _saved(record, path) -> Path:
    record.save(path)
    return path


def test_the_commit_is_the_package_s_own(tmp_path, monkeypatch):
    """An environment often lies in the repository of another project, which ignores it."""
    place = tmp_path / ".venv" / "records.py"
    place.parent.mkdir()
    place.touch()
    (tmp_path / ".gitignore").write_text(".venv\n")
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "theirs"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(records, "__file__", str(place))
    assert records.commit() == ""
    for words in (["add", "-f", ".venv"], [*who, "commit", "-q", "-m", "ours"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert re.fullmatch("[0-9a-f]{10}", records.commit())
