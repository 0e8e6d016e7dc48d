"""Scaled rows, records that are opened again, and what a finished run still lacks."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.reproduce import records, report, running
from rhhn_fairseq.reproduce.plan import Budget, Run, sizes_of
from rhhn_fairseq.reproduce.records import Record
from rhhn_fairseq.reproduce.tables import TABLES


def _run(budget=None, **options) -> Run:
    table = TABLES["ha-ptb"]
    return Run(table, table.row("lstm_ptb"), budget=budget or Budget(), **options)


def _finished(run, path) -> None:
    record = running._new_record(run, 1, "cpu")
    record.state, record.figures = "finished", {"valid bpc carry": 1.0}
    record.save(path)


def test_the_smallest_sizes_of_a_scaled_run():
    copying = TABLES["copying"]
    options = Run(copying, copying.row("lstm_T100"), scale=0.01).options()
    assert (options["hidden_size"], options["batch_size"], options["length"]) == (8, 4, 1)
    assert _run(scale=0.1).options()["max_epoch"] == 4
    # 30 is rounded down.
    assert _run(scale=0.03).options()["hidden_size"] == 28


def test_the_sizes_of_a_run_are_the_row_s_unless_they_are_typed():
    assert sizes_of(_run()) == {"cell": "lstm", "hidden_size": 1000, "layers": 1}
    assert sizes_of(_run(scale=0.1))["hidden_size"] == 100
    for extra in (("--lr", "0.1", "--hidden-size", "16"), ("--hidden-size=16",)):
        assert sizes_of(_run(extra=extra)) == {"cell": "lstm", "layers": 1}


def test_a_record_is_opened_for_another_budget_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    _finished(_run(Budget(epochs=2)), path)
    assert running._open_record(_run(Budget(epochs=2)), path, 1, "cpu").state == "finished"
    longer = running._open_record(_run(Budget(epochs=3)), path, 1, "cpu")
    assert (longer.state, longer.figures, longer.options["max_epoch"]) == ("training", {}, 3)
    with pytest.raises(UsageError, match=r"started with other options \(bf16\)"):
        running._open_record(_run(Budget(epochs=2), precision="bfloat16"), path, 1, "cpu")


def test_a_finished_run_evaluates_the_figure_that_it_lacks(tmp_path, monkeypatch):
    places, asked = running.Places(tmp_path / "runs", tmp_path, tmp_path / "results"), []
    _finished(_run(), places.record(_run()))
    monkeypatch.setattr(running.corpora, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(running.corpora, "task_options", lambda *_: {})
    monkeypatch.setattr(running.CharVocabulary, "load", lambda _: SimpleNamespace(corpus="a text"))
    # Nothing may train again.
    monkeypatch.setattr(running, "_train", None)
    monkeypatch.setattr(running, "_evaluate", lambda run, figure, *_: asked.append(figure) or 2.0)
    record = running.execute(_run(), places)
    assert asked == ["test bpc carry"] and record.figures == {"valid bpc carry": 1.0, "test bpc carry": 2.0}


def test_nothing_is_left_of_a_budget_that_is_used_up(tmp_path):
    record = Record(
        "mnist", "pmnist_lstm", "lstm_mnist", 1, 1.0, "float32", updates=200_000, seconds=40_000.0
    )
    record.save(tmp_path / "runs" / "mnist" / "pmnist_lstm-s1.json")
    assert "| 0.2 |  |  | 0 hours |" in report.render(TABLES["mnist"], tmp_path).read_text()


EPOCH = '{"epoch": 1, "train_bpc": "3", "train_num_updates": "10", "train_train_wall": "6"}'
STOP = "Stopping training due to num_updates: 10 >= max_update: 10"


def _printing(*lines, status=0) -> list[str]:
    """A command that stands in for one of fairseq's."""
    return [sys.executable, "-c", f"print(*{lines!r}, sep='\\n'); raise SystemExit({status})"]


def _trained(tmp_path, *lines, status=0) -> Record:
    record = running._new_record(_run(), 1, "cpu")
    running._train(_run(), _printing(*lines, status=status), tmp_path, record, tmp_path / "record.json", 1)
    return record


def test_what_ended_the_last_training_is_recorded(tmp_path):
    record = _trained(tmp_path, EPOCH, STOP)
    assert (record.state, record.stopped_by, record.updates) == ("evaluating", "updates", 10)
    # The log goes on. A training with nothing left to do leaves what was recorded.
    assert _trained(tmp_path, "nothing is left").stopped_by == "updates"
    record = _trained(tmp_path, EPOCH.replace("10", "20").replace("1,", "2,"))
    assert (record.stopped_by, record.updates, record.epochs) == ("epochs", 20, 2)


def test_a_failed_training_has_its_last_line_and_what_it_trained(tmp_path):
    record = _trained(tmp_path, EPOCH, "ValueError: no", "", status=3)
    assert (record.state, record.problem, record.updates) == ("failed", "ValueError: no", 10)
    assert record.stopped_by == ""
    assert Record.load(tmp_path / "record.json").curve == record.curve
    (tmp_path / "train.log").unlink()
    assert _trained(tmp_path, "", status=3).problem == "fairseq-train ended with status 3"


def test_the_figure_of_a_failed_evaluation_does_not_count(tmp_path):
    line = "PTB, test, protocol carry: 1.250000 bits per character, perplexity 2.4"
    assert running._evaluate(_run(), "test bpc carry", _printing(line), tmp_path, 1) == 1.25
    with pytest.raises(UsageError, match="evaluation.log: no test bpc carry: PTB, test"):
        running._evaluate(_run(), "test bpc carry", _printing(line, status=1), tmp_path, 1)


def test_a_cost_whose_training_says_nothing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(running.corpora, "prepare", lambda *arguments: None)
    monkeypatch.setattr(running.plan, "train_command", lambda *arguments: _printing(status=3))
    places = running.Places(tmp_path, tmp_path, tmp_path)
    with pytest.raises(UsageError, match="^fairseq-train ended with status 3"):
        running.measure_cost(_run(), places, 1, "cpu")


def test_a_training_is_not_replaced_by_one_that_was_run_by_hand(tmp_path):
    (tmp_path / "checkpoint_best.pt").touch()
    places = running.Places(tmp_path / "runs", tmp_path, tmp_path / "results")
    path = places.record(_run())
    _finished(_run(), path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"{path}: this run has been trained"):
        running.adopt(_run(), places, tmp_path / "log", tmp_path, 1, "cpu")
    assert path.read_bytes() == before


def test_a_second_adoption_that_fails_leaves_the_first(tmp_path, monkeypatch):
    places, log = running.Places(tmp_path / "runs", tmp_path, tmp_path / "results"), tmp_path / "log"
    log.write_text('{"epoch": 1, "train_bpc": "2", "train_num_updates": "3"}\n')
    monkeypatch.setattr(running, "_check_sizes", lambda *_: None)
    monkeypatch.setattr(running.WeightsOnlyTorch, "load", lambda *_, **__: {})
    monkeypatch.setattr(running, "execute", lambda *_: "adopted")

    def adopt(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint_best.pt").touch()
        return running.adopt(_run(), places, log, tmp_path / name, 1, "cpu")

    def failing(*_):
        raise UsageError("no figure")

    link = places.run(_run()) / "checkpoints"
    assert adopt("first") == "adopted"
    before = places.record(_run()).read_bytes()
    monkeypatch.setattr(running, "execute", failing)
    log.write_text('{"epoch": 1, "train_bpc": "1", "train_num_updates": "3"}\n')
    with pytest.raises(UsageError, match="no figure"):
        adopt("second")
    assert places.record(_run()).read_bytes() == before and link.resolve() == tmp_path / "first"


def test_a_training_with_another_seed_is_not_adopted(tmp_path):
    places, log = running.Places(tmp_path / "runs", tmp_path, tmp_path / "results"), tmp_path / "log"
    log.write_text('{"epoch": 1, "train_bpc": "2", "train_num_updates": "3"}\n')
    cfg = {"model": sizes_of(_run()) | {"_name": "char_lm"}, "task": {"_name": "char_lm"}}
    cfg["common"] = {"seed": 7}
    torch.save({"cfg": cfg, "model": {}}, tmp_path / "checkpoint_best.pt")
    with pytest.raises(
        UsageError, match="checkpoint_best.pt: was trained with seed 7, not 1; give --seeds 7"
    ):
        running.adopt(_run(), places, log, tmp_path, 1, "cpu")
    assert not list((tmp_path / "results").rglob("*.json"))


@pytest.mark.parametrize("option", [None, "bf16", "memory_efficient_bf16", "fp16"])
def test_the_type_and_the_gpu_of_an_adopted_training_are_its_own(tmp_path, monkeypatch, option):
    places, log = running.Places(tmp_path / "runs", tmp_path, tmp_path / "results"), tmp_path / "log"
    line = "rank   0: capabilities =  9.0  ; total memory = 139.8 GB ; name = NVIDIA H200    \n"
    epoch = '{"epoch": 1, "train_bpc": "2", "train_num_updates": "3"}\n'
    log.write_text((line if option else "") + epoch)
    cfg = {"model": sizes_of(_run()) | {"_name": "char_lm"}, "task": {"_name": "char_lm"}}
    cfg["common"] = {option: True} if option else {}
    torch.save({"cfg": cfg, "model": {}}, tmp_path / "checkpoint_best.pt")
    monkeypatch.setattr(running, "execute", lambda run, places, *_: Record.load(places.record(run)))
    record = running.adopt(_run(), places, log, tmp_path, 2, "cpu")
    types = {None: "float32", "fp16": "float16"}
    assert record.precision == types.get(option, "bfloat16")
    assert record.options["bf16"] == (record.precision == "bfloat16")
    if option:
        assert (record.device, record.threads) == ("NVIDIA H200", 0)
    else:
        assert (record.device, record.threads) == (records.describe_machine("cpu"), 2)
