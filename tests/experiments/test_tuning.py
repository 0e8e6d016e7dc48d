"""Comparisons at equal parameters and time: widths, options, trials that are kept, and the page."""

import json

import pytest
from helpers.cli import forked_output
from helpers.tiny_char_lm import write_corpus

from experiments import running, tune
from experiments.tune import SPACE, START, System, build, width_of
from rhhn_fairseq.cli.describe import count_parameters
from rhhn_fairseq.errors import UsageError

VOCABULARY = 14


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    monkeypatch.setattr(running, "output", forked_output)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    "text", ["lstm", "gru", "ln_hyperlstm:hyper-size=8", "hyperrhn:hyper-size=8,rhn-depth=3"]
)
def test_the_width_is_the_largest_that_fits(text):
    system = System.parse(text)
    options = {"cell": system.cell} | system.options
    width = width_of(options, 30_000, VOCABULARY)

    def count(width):
        return count_parameters(build(options | {"hidden_size": width}, VOCABULARY, "meta"))

    assert width % 4 == 0 and count(width) <= 30_000 < count(width + 4)


def test_what_is_given_is_not_searched():
    assert "hyper_size" in System.parse("hyperrhn").space()
    given = System.parse("hyperrhn:hyper-size=8,batch-size=16")
    assert given.options == {"hyper_size": 8, "batch_size": 16}
    assert not {"hyper_size", "batch_size"} & given.space().keys()
    assert given.name == "hyperrhn:hyper-size=8,batch-size=16" and System.parse(given.name) == given
    assert System.parse("rhn").space().keys() <= SPACE.keys()


def _tune_one(corpus, directory, trials):
    budget = "--parameters 2000 --symbols 400 --length 20 --best 1 --repeats 1".split()
    words = [corpus, "gru:batch-size=2", *budget, "--directory", str(directory)]
    tune.main([*words, "--trials", str(trials)])
    (entry,) = json.loads((directory / "comparison.json").read_text())["systems"]
    return entry


@pytest.mark.slow
def test_a_search_that_is_resumed_is_the_same_search(corpus, tmp_path):
    whole = _tune_one(corpus, tmp_path / "whole", 3)
    first = _tune_one(corpus, tmp_path / "resumed", 1)
    resumed = _tune_one(corpus, tmp_path / "resumed", 3)
    assert resumed["trials"][0] == first["trials"][0]
    options = [[trial["options"] for trial in entry["trials"]] for entry in (whole, resumed)]
    assert options[0] == options[1] and len({trial["lr"] for trial in options[0]}) == 3
    figures = [trial["bpc"] for trial in resumed["trials"]]
    assert all(figure is not None and figure < 4 for figure in figures)
    assert resumed["repeats"] == whole["repeats"] and resumed["repeats"][0]["test"] < 4


def _tune(corpus, directory, *more):
    systems = ["gru:batch-size=2", "hyperlstm:hyper-size=32"]
    budget = "--parameters 2000 --seconds 0.1 --trials 1 --length 20 --best 1 --repeats 1".split()
    # The page is written all the same.
    with pytest.raises(
        UsageError, match=r"^hyperlstm:hyper-size=32: no trial succeeded \(--parameters 2,000"
    ):
        tune.main([corpus, *systems, *budget, "--directory", str(directory), *more])
    return json.loads((directory / "comparison.json").read_text())["systems"]


@pytest.mark.slow
def test_trials_are_kept_and_the_best_is_repeated(corpus, tmp_path, capsys, monkeypatch):
    # A training that read this directory would be refused.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_last.pt").touch()
    monkeypatch.chdir(tmp_path)
    first = _tune(corpus, tmp_path)
    said = capsys.readouterr().out
    begins = "2 trainings, then 1 with other seeds unless they are made: at most about 0 minutes of updates\n"
    assert said.startswith(begins)
    gru, hyper = first
    assert len(gru["trials"]) == len(hyper["trials"]) == 1
    (trial,) = gru["trials"]
    assert trial["bpc"] < 4 and trial["parameters"] <= 2000 and trial["options"]["lr"] == START["lr"]
    (failed,) = hyper["trials"]
    assert failed["bpc"] is None and failed["problem"].startswith(
        "--parameters 2,000: hyperlstm of width 32 has"
    )
    assert [repeat["seed"] for repeat in gru["repeats"]] == [2] and not hyper["repeats"]
    page = (tmp_path / "comparison.md").read_text()
    (row,) = (line.split("|") for line in page.splitlines() if line.startswith("| hyperlstm:hyper-size=32"))
    assert [cell.strip()[:18] for cell in row if cell.strip()][1:] == ["1 (1)", "--parameters 2,000"]
    # The same command does nothing again; a second trial is added to the first.
    assert _tune(corpus, tmp_path) == first
    more = _tune(corpus, tmp_path, "--trials", "2", "--best", "0")
    assert [entry["trials"][0] for entry in more] == [trial, failed]
    assert more[0]["trials"][1]["options"]["lr"] != trial["options"]["lr"]
    # Other settings are another search, beside the first.
    other = "--parameters 2000 --length 20 --symbols 80 --trials 1 --repeats 0".split()
    tune.main([corpus, "gru:batch-size=2", *other, "--directory", str(tmp_path)])
    (entry,) = json.loads((tmp_path / "comparison.json").read_text())["systems"]
    assert len(entry["trials"]) == 1 and entry["trials"][0]["updates"] == 2
    assert _tune(corpus, tmp_path, "--trials", "2", "--best", "0") == more
