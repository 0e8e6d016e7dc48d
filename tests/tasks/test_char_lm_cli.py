"""Character language models through fairseq's own programs, each in a process of its own."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from helpers.cli import USER_DIR, fairseq_train, json_log, run_module

from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare

TEXT = "".join(f"line {n}: the quick brown fox jumps over {n * 7 % 13} lazy dogs\n" for n in range(40))

SMALL = ["--hidden-size", 16, "--hyper-size", 8, "--hyper-embed-size", 2]
MODEL = [
    "--arch",
    "char_lm",
    "--cell",
    "ln_hyperlstm",
    *SMALL,
    "--recurrent-dropout",
    0.2,
    "--input-dropout",
    0.1,
]
OPTIMIZER = ["--optimizer", "adam", "--lr", 0.01, "--clip-norm", 1.0]
COMMON = ["--task", "char_lm", "--criterion", "char_cross_entropy", *OPTIMIZER, "--cpu"]
LOG = ["--log-format", "json", "--log-interval", 1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    files = {}
    for split, text in (("train", TEXT), ("valid", TEXT[300:700]), ("test", TEXT[500:1100])):
        files[split] = [folder / f"{split}.txt"]
        files[split][0].write_text(text)
    prepare(text_files(files, as_bytes=False), folder / "data")
    return folder / "data"


def _arguments(corpus, save_dir, *options, model=MODEL):
    lanes = ["--batch-size", 4, "--tokens-per-sample", 20]
    return [corpus, *COMMON, *model, *lanes, *LOG, "--save-dir", save_dir, *options]


def _train(corpus, save_dir, *options, model=MODEL, **settings):
    return fairseq_train(_arguments(corpus, save_dir, *options, model=model), **settings)


def _losses(*results):
    """Bits per character of every update, and of every validation, over one or more runs in turn."""
    records = [record for result in results for record in json_log(result.stdout + result.stderr)]
    inner = [record["bpc"] for record in records if record["tag"] == "train_inner"]
    return inner, [record["valid_bpc"] for record in records if record["tag"] == "valid"]


def _parameters(save_dir):
    return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("uninterrupted")
    # Validating at the same places as the interrupted run, which costs random numbers nothing.
    result = _train(corpus, save_dir, "--max-epoch", 2, "--save-interval-updates", 13)
    return save_dir, result


def test_a_killed_run_resumes_in_mid_epoch_bit_for_bit(corpus, uninterrupted, tmp_path):
    whole_dir, whole = uninterrupted
    options = ["--max-epoch", 2, "--save-interval-updates", 13]
    killed = _kill_after_update(16, corpus, tmp_path, *options)
    assert "checkpoint_1_13.pt" in {path.name for path in tmp_path.iterdir()}
    second = _train(corpus, tmp_path, *options)
    # The killed program may have run ahead of what was read.
    loaded = int(re.search(r"Loaded checkpoint .* @ (\d+) updates", second.stdout + second.stderr)[1])
    losses, valid = _losses(whole)
    assert len(losses) > 40
    assert killed[:loaded] + _losses(second)[0] == losses
    assert _losses(second)[1][-1] == valid[-1]
    resumed, expected = _parameters(tmp_path), _parameters(whole_dir)
    assert resumed.keys() == expected.keys()
    for key in expected:
        assert torch.equal(resumed[key], expected[key]), key


def _kill_after_update(last, corpus, save_dir, *options):
    """Trains until update ``last`` is logged, sends SIGKILL, and returns all losses that it logged."""
    command = [sys.executable, "-u", "-m", "fairseq_cli.train", *_arguments(corpus, save_dir, *options)]
    process = subprocess.Popen(
        [*map(str, command), "--user-dir", USER_DIR],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    losses = []
    with process:
        for line in process.stdout:
            losses += [record["bpc"] for record in json_log(line) if record["tag"] == "train_inner"]
            if len(losses) == last:
                process.kill()
    assert process.returncode == -signal.SIGKILL
    return losses


def test_two_torchrun_workers_train_the_model_of_one_with_update_freq_2(corpus, tmp_path):
    options = ["--max-epoch", 1]
    one = _train(corpus, tmp_path / "one", *options, "--update-freq", 2)
    two = _train(corpus, tmp_path / "two", *options, workers=2, torchrun=True)
    losses_one, losses_two = _losses(one)[0], _losses(two)[0]
    assert len(losses_one) == len(losses_two) > 10
    # No difference was seen. The order in which two gradients are added is the backend's, so a loss may
    # round to the other side of the last of the four decimals that are logged.
    assert max(abs(a - b) for a, b in zip(losses_one, losses_two, strict=True)) <= 1.01e-4
    for key, expected in _parameters(tmp_path / "one").items():
        torch.testing.assert_close(_parameters(tmp_path / "two")[key], expected, rtol=0, atol=1e-5)


def test_two_workers_resume_in_mid_epoch(corpus, tmp_path):
    options = ["--max-epoch", 1, "--save-interval-updates", 7]
    whole = _train(corpus, tmp_path / "whole", *options, workers=2)
    first = _train(corpus, tmp_path / "parts", *options, "--max-update", 7, workers=2)
    second = _train(corpus, tmp_path / "parts", *options, workers=2)
    assert _losses(first, second)[0] == _losses(whole)[0]
    for key, expected in _parameters(tmp_path / "whole").items():
        assert torch.equal(_parameters(tmp_path / "parts")[key], expected), key
    # The saved lanes belong to two workers; one alone cannot go on with them.
    saved = tmp_path / "parts" / "checkpoint_1_7.pt"
    alone = _train(corpus, tmp_path / "alone", "--restore-file", saved, check=False)
    assert alone.returncode == 1
    (line,) = [line for line in alone.stderr.splitlines() if line.startswith("error:")]
    assert "lanes 8, groups 2" in line and "this run has lanes 4, groups 1" in line
    assert "Traceback" not in alone.stderr


def _evaluate(corpus, checkpoint, *options, check=True):
    arguments = [
        corpus,
        "--user-dir",
        USER_DIR,
        "--task",
        "char_lm",
        "--path",
        checkpoint,
        "--gen-subset",
        "test",
    ]
    return run_module("fairseq_cli.eval_lm", [*arguments, "--cpu", *options], check=check)


def test_evaluation_prints_its_figures_and_its_protocol(corpus, uninterrupted):
    checkpoint = uninterrupted[0] / "checkpoint_best.pt"
    found = {}
    for options in (
        (),
        ("--tokens-per-sample", 7),
        ("--protocol", "carry:3"),
        ("--protocol", "window:60/40"),
    ):
        result = _evaluate(corpus, checkpoint, *options)
        output = result.stdout + result.stderr
        (line,) = [line for line in output.splitlines() if "bits per character" in line]
        assert "| INFO | rhhn_fairseq" in line and "DEBUG" not in output
        assert "600 of 600 symbols scored (100.00 %), 0 unknown" in line and "accuracy" in line
        protocol = options[1] if options and options[0] == "--protocol" else "carry"
        assert f"protocol {protocol}:" in line and "Logging error" not in output
        bpc = float(re.search(r"([\d.]+) bits per character", line)[1])
        assert abs(bpc - float(re.search(r"Loss \(base 2\): ([\d.]+)", output)[1])) < 1e-3
        found[options] = bpc
    assert abs(found[()] - found["--tokens-per-sample", 7]) < 1e-6
    # 1,000 symbols of context reach back to the beginning of this text.
    assert abs(found[()] - found["--protocol", "carry:3"]) < 1e-5
    assert found["--protocol", "window:60/40"] != found[()]


def test_a_checkpoint_of_another_cell_is_refused(corpus, uninterrupted, tmp_path):
    checkpoint = uninterrupted[0] / "checkpoint_best.pt"
    result = _train(corpus, tmp_path, "--restore-file", checkpoint, "--hidden-size", 20, check=False)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert f"from checkpoint {checkpoint}; please ensure that the architectures match" in line
