"""The line that shows how far a training is."""

import json
from types import SimpleNamespace

from rhhn_fairseq.analysis.training_logs import parse_line
from rhhn_fairseq.reproduce.plan import Budget, Run
from rhhn_fairseq.reproduce.progress import Progress
from rhhn_fairseq.reproduce.tables import TABLES

HA = TABLES["ha-ptb"]


def test_progress_knows_the_limits_of_the_recipe():
    assert Run(HA, HA.row("lstm_ptb")).limits() == {"max_epoch": 100}
    assert Run(HA, HA.row("lstm_ptb"), budget=Budget(updates=5)).limits() == {
        "max_epoch": 100,
        "max_update": 5,
    }
    typed = ("--max-epoch=3", "--lr", "1", "--max-update", "0")
    assert Run(HA, HA.row("lstm_ptb"), budget=Budget(updates=5), extra=typed).limits() == {"max_epoch": 3}


def test_progress_counts_the_nearest_limit():
    progress = Progress("x", {"max_epoch": 10, "max_update": 1000, "stop_time_hours": 1.0}, quiet=True)
    assert progress.share(1.0, 50, 36.0) == 0.1
    assert progress.share(1.0, 500, 36.0) == 0.5
    assert Progress("x", {}, quiet=True).share(1.0, 5, 1.0) is None


def test_progress_counts_the_hours_before_a_restart():
    progress = Progress("x", {"stop_time_hours": 10.0}, quiet=True)
    line = '{"epoch": 3, "update": 2.5, "loss": "1", "wall": "32400", "num_updates": "70"}'
    progress.show(parse_line(line))
    assert progress._bar.n == 0.9


def test_progress_shows_epochs_that_are_shorter_than_the_log_interval(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("rhhn_fairseq.reproduce.progress.time", clock)
    progress = Progress("x", {"max_epoch": 10}, quiet=True)
    shown = []
    progress._bar.set_postfix_str = lambda text, refresh: shown.append(text)
    for epoch in (1, 2, 3):
        clock.monotonic = lambda now=100.0 * epoch: now
        for subset, figure in (("valid", "bpc"), ("train", "wall")):
            line = {"epoch": epoch, f"{subset}_{figure}": "2.5", f"{subset}_num_updates": 50 * epoch}
            progress.show(parse_line(json.dumps(line)))
    assert progress._bar.n == 0.3
    assert shown[0] == "valid bpc 2.5, update 50" and shown[-1] == "valid bpc 2.5, update 150, 11:40 left"
