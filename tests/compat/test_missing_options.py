"""A program without its model or checkpoint ends in one line that says what to give; help needs neither."""

import pytest
from fairseq import options
from helpers.cli import USER_DIR, run_module
from helpers.programs import run
from helpers.tiny_char_lm import write_corpus

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NO_ARCH = "--arch is missing: name an architecture, such as ln_hyperlstm_ptb; docs/"
NO_DATA = "the data directory is missing: give one that rhhn prepare wrote, such as data-bin/ptb"
NO_PATH = "--path is missing: name a checkpoint, such as checkpoints/checkpoint_best.pt"


@pytest.mark.parametrize(
    "program, arguments, line",
    [
        ("train", [], NO_ARCH),
        ("train", ["data", "--task", "char_lm", "--max-update", 1], NO_ARCH),
        ("train", ["--arch", "hyperlstm_gnmt"], NO_DATA),
        ("train", ["nowhere", "--arch", "lstm_gnmt_small"], "nowhere: there is no such directory; name the "),
        ("eval_lm", ["data"], NO_PATH),
        ("generate", ["data", "--task", "gnmt_translation"], NO_PATH),
        ("interactive", ["data"], NO_PATH),
        ("validate", [], NO_PATH),
        ("validate", ["data", "--task", "char_lm", "--batch-size", 2], NO_PATH),
    ],
)
def test_what_is_missing_is_named(program, arguments, line):
    outcome = run(program, arguments)
    assert outcome.kind == "refused", outcome.text
    assert outcome.text.removeprefix("error: ").startswith(line)


@pytest.mark.parametrize(
    "options, line",
    [
        ("--criterion cross_entropy --best-checkpoint-metric bpc", "choose from loss, nll_loss, ppl"),
        ("--max-update 1 --dynamic-eval-lr 1e-3", "--dynamic-eval-lr goes with --dynamic-eval"),
        ("--dynamic-eval --dynamic-eval-lr -1e-4", "--dynamic-eval-lr -0.0001 --dynamic-eval-decay"),
        ("--hidden-size 0", "--hidden-size 0 is too small, the smallest is 1"),
    ],
)
def test_what_does_not_go_together_is_named(tmp_path, options, line):
    write_corpus(tmp_path)
    model = ["--arch", "char_lm", "--cell", "lstm", "--hidden-size", 8, "--batch-size", 2, "--lr", 0.01]
    given = [tmp_path / "data", *model, "--cpu", "--save-dir", tmp_path / "checkpoints", *options.split()]
    outcome = run("train", given)
    assert outcome.kind == "refused", outcome.text
    assert line in outcome.text


def test_a_text_is_no_data_directory(tmp_path):
    (tmp_path / "novel.txt").write_text("once\n")
    outcome = run("train", [tmp_path / "novel.txt", "--arch", "char_lm", "--cell", "lstm"])
    assert outcome.kind == "refused"
    assert "novel.txt is a file: prepare its text with rhhn prepare text --input" in outcome.text


@pytest.mark.parametrize("arguments", [[], ["common.seed=2"]])
def test_hydra_names_a_missing_model(tmp_path, arguments):
    result = run_module("fairseq_cli.hydra_train", arguments, check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: no model is configured: choose an architecture ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["gnmt", "char_lm"])
def test_hydra_names_missing_data(tmp_path, name):
    arguments = ["--config-name", name, f"common.user_dir={USER_DIR}", "common.cpu=true"]
    result = run_module("fairseq_cli.hydra_train", arguments, check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "error: task.data is not given: name the directory that "
    )
    assert "Warning" not in result.stderr


@pytest.mark.parametrize("program, option", [("train", "--save-dir"), ("validate", "--path")])
def test_help_needs_no_model(program, option):
    outcome = run(program, ["--help"])
    assert outcome.kind == "works" and option in outcome.text


def test_callers_may_add_the_checkpoint_later():
    parser = options.get_eval_lm_parser()
    assert options.parse_args_and_arch(parser, ["data"]).path is None
