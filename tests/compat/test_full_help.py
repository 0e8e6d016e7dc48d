"""What ``--help`` of fairseq's programs lists."""

import pytest
from helpers.cli import USER_DIR, run_module


@pytest.mark.parametrize(
    ("program", "arguments", "listed", "not_listed"),
    [
        ("train", ["--arch", "hyperrhn_ptb"], ("--rhn-depth", "--batching", "--adam-betas"), ()),
        ("train", ["--arch=hyperlstm_gnmt"], ("--attention-size", "--label-smoothing"), ("--batching",)),
        ("train", [], ("--arch", "--lr"), ("--rhn-depth",)),
        ("eval_lm", ["--task", "char_lm"], ("--protocol", "--dynamic-eval"), ()),
    ],
)
def test_help_lists_the_options_of_what_is_named(tmp_path, program, arguments, listed, not_listed):
    """list_all_options: fairseq answers before it knows the options of model, task and criterion."""
    arguments = [*arguments, "--user-dir", USER_DIR, "--help"]
    text = run_module(f"fairseq_cli.{program}", arguments, cwd=tmp_path).stdout
    assert text.startswith("usage:")
    for option in listed:
        # The usage lines have it in brackets.
        assert f" {option} " in text
    assert not [option for option in not_listed if option in text]


def test_help_of_an_option_has_words_and_defaults_of_its_cells(tmp_path):
    arguments = ["--arch", "char_lm", "--user-dir", USER_DIR, "--help"]
    text = " ".join(run_module("fairseq_cli.train", arguments, cwd=tmp_path).stdout.split())
    assert "width of the embeddings z; default 4 (hyper, hyperlstm, ln_hyperlstm), 16 (hyperrnn)" in text
    assert "once per sequence: step, sequence; default step (hyper, hyperlstm," in text
    assert "drop units of the update n (Semeniuta et al.); default 0 (gru)" in text
