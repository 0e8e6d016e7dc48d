"""A program without its model or checkpoint ends in one line that says what to give; help needs neither."""

import pytest
from fairseq import options
from helpers.cli import USER_DIR, run_module
from helpers.config_files import ROOT
from helpers.programs import run

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


@pytest.mark.parametrize("arguments", [[], ["common.seed=2"]])
def test_hydra_names_a_missing_model(tmp_path, arguments):
    result = run_module("fairseq_cli.hydra_train", arguments, check=False, cwd=tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "error: no model is configured: choose a file by --config-name, or an architecture "
    )
    # Neither Hydra's files nor its warnings.
    assert result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("system", ["gnmt/lstm_gnmt_small", "char_lm/lstm_ptb"])
def test_hydra_names_missing_data(tmp_path, system):
    task, name = system.split("/")
    arguments = ["--config-dir", ROOT / "configs" / task, "--config-name", name]
    arguments += [f"common.user_dir={USER_DIR}", "common.cpu=true"]
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
