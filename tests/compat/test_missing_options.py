"""A program without its model or checkpoint ends in one line that says what to give; help needs neither."""

import re

import pytest
from fairseq import options
from helpers.cli import USER_DIR, run_module
from helpers.programs import run
from helpers.tiny_char_lm import build_task, write_corpus

import rhhn_fairseq.plugin  # noqa: F401  (replaces the functions of fairseq)
from rhhn_fairseq.compat.names import check_best_metric
from rhhn_fairseq.errors import UsageError

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NO_ARCH = "--arch is missing: name an architecture, such as ln_hyperlstm_ptb; docs/"
NO_PATH = "--path is missing: name a checkpoint, such as checkpoints/checkpoint_best.pt"


@pytest.mark.parametrize(
    "program, arguments, line",
    [
        ("train", [], NO_ARCH),
        ("train", ["--arch", "hyperlstm_gnmt"], "the following arguments are required: data"),
        ("train", ["nowhere", "--arch", "lstm_gnmt_small"], "nowhere: No such file or directory"),
        ("eval_lm", ["data"], NO_PATH),
        ("validate", [], NO_PATH),
    ],
)
def test_what_is_missing_is_named(program, arguments, line):
    outcome = run(program, arguments)
    assert outcome.kind == "refused", outcome.text
    assert outcome.text.removeprefix("error: ").startswith(line)


def test_what_does_not_go_together_is_named(tmp_path):
    write_corpus(tmp_path)
    model = ["--arch", "char_lm", "--cell", "lstm", "--hidden-size", 8, "--batch-size", 2, "--lr", 0.01]
    given = ["--criterion", "cross_entropy", "--best-checkpoint-metric", "bpc"]
    outcome = run("train", [tmp_path / "data", *model, "--cpu", "--save-dir", tmp_path / "new", *given])
    assert outcome.kind == "refused", outcome.text
    assert "choose from loss, nll_loss, ppl" in outcome.text


def test_figures_of_fairseqs_other_tasks_are_theirs():
    check_best_metric("em_error", "nlu_finetuning", "label_smoothed_cross_entropy", ())
    with pytest.raises(UsageError, match="logs no such figure"):
        check_best_metric("em_error", "translation", "label_smoothed_cross_entropy", ())


def test_hydra_names_a_missing_model(tmp_path):
    result = run_module("fairseq_cli.hydra_train", [], check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: no model is configured: choose an architecture ")
    assert "Traceback" not in result.stderr


def test_hydra_names_missing_data(tmp_path):
    arguments = ["--config-name", "char_lm", f"common.user_dir={USER_DIR}", "common.cpu=true"]
    result = run_module("fairseq_cli.hydra_train", arguments, check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "error: task.data is not given: name the directory that "
    )
    assert "Warning" not in result.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "listed", "not_listed"),
    [
        ("train", "--help-all --arch hyperrhn_ptb", ("--rhn-depth", "--batching", "--adam-betas"), ()),
        ("train", "--help --arch hyperrhn_ptb", ("--cell", "--hyper-size", "--help-all"), ("--adam-betas",)),
        ("train", "--help", ("--arch", "--lr"), ("--cell",)),
        ("eval_lm", "--help --task char_lm", ("--protocol", "--dynamic-eval"), ()),
    ],
)
def test_help_lists_the_options_of_what_is_named(tmp_path, program, arguments, listed, not_listed):
    """fairseq answers before it knows the options of model, task and criterion."""
    short = arguments.startswith("--help ") and program == "train"
    arguments = [*arguments.split(), "--user-dir", USER_DIR]
    text = run_module(f"fairseq_cli.{program}", arguments, cwd=tmp_path).stdout
    assert text.startswith("usage:") and (not short or text.count("\n") <= 60)
    for option in listed:
        # The usage lines have it in brackets.
        assert f" {option} " in text
    assert not [option for option in not_listed if option in text]


@pytest.mark.parametrize(
    "parser, line, reason",
    [
        ("training", "--disable-validation --patience 2", "gives no figures"),
        ("training", "--disable-validation --keep-best-checkpoints 2", "gives no figures"),
        ("training", "--disable-validation --lr-scheduler reduce_lr_on_plateau", "gives no figures"),
        ("training", "--ema-decay 0.9", "without --store-ema"),
        ("training", "--num-shards 2", "torchrun divides"),
        ("training", "--task gnmt_translation --subword-nbest 16", "no effect without --subword-sampling"),
        ("validation", "--path x --task char_lm --num-shards 2", "torchrun divides"),
        ("interactive_generation", "--path x --num-shards 2", "of fairseq-generate"),
        ("interactive_generation", "--path x --score-reference", "scores a data directory"),
        ("generation", "--path x --replace-unk", "which binary data lack"),
        (
            "generation",
            "--task gnmt_translation --path x --score-reference --coverage-penalty 0.2",
            "by the length alone",
        ),
        ("generation", "--path x --constraints", "in the input of fairseq-interactive"),
        ("generation", "--path x --beam 2 --nbest 3", "--nbest 3 is more than --beam 2"),
        ("training", "--lr-scheduler polynomial_decay --force-anneal 2", "depends on where a training is"),
        ("training", "--task char_lm --combine-valid-subsets", "the splits of char_lm with --valid-subset"),
        ("generation", "--path x --beam 3 --diverse-beam-groups 2", "is no multiple of"),
    ],
)
def test_options_that_would_not_act_are_refused(parser, line, reason):
    model = {"training": "--arch lstm_lm", "generation": "--task translation"}
    model["interactive_generation"] = model["generation"]
    words = ["d", *model.get(parser, "").split(), *line.split()]
    with pytest.raises(UsageError, match=re.escape(reason)):
        options.parse_args_and_arch(getattr(options, f"get_{parser}_parser")(), words)


def test_options_of_a_learner_that_is_off_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--dynamic-eval-lr goes with --dynamic-eval"):
        build_task(write_corpus(tmp_path), dynamic_eval_lr=0.5)


def test_every_worker_of_torchrun_would_translate_everything(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="fairseq-generate runs without torchrun"):
        options.parse_args_and_arch(options.get_generation_parser(), "d --task translation --path x".split())
