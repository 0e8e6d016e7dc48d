"""Short trainings that compare regularisers: every option changes the training, and a line is written."""

import gzip
import json
import random

import pytest

from experiments import regularisers

OPTIONS = ["out=0.5", "rec=0.5", "ar=9", "hyper_drop=0.5", "z_drop=0.5", "spread=1e6", "z=1e6"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a training of some options and returns its line."""
    folder, draw = tmp_path_factory.mktemp("ptb"), random.Random(1)
    for split, length in (("train", 1700), ("valid", 500)):
        text = "".join(draw.choices("abc ", (4, 3, 2, 1), k=length))
        (folder / f"ptb.{split}.txt.gz").write_bytes(gzip.compress(text.encode()))

    def call(*words):
        small = ["width=6", "hyper=3", "epochs=2", "batch=2", "share=1", *words]
        regularisers.main(folder, folder / "record.jsonl", *small)
        return json.loads((folder / "record.jsonl").read_text().splitlines()[-1])

    return call


@pytest.mark.slow
def test_trials(run):
    line = run()
    assert line["width"] == 6 and len(line["valid"]) == 2 and line["valid"][1] < 2.5
    again = run()
    assert all(line[key] == again[key] for key in ("train", "valid", "parameters"))
    assert run("cell=LSTM")["parameters"] < line["parameters"] < run("learned=1")["parameters"]
    for option in OPTIONS:
        assert run(option)["valid"] != line["valid"], option
