"""What every file of configs/ composes to, and that fairseq-train can do the same training.

One file of tests, because one process then composes each configuration once.
"""

import ast
import json
import shutil

import pytest
from helpers.cli import USER_DIR, run_module
from helpers.config_files import (
    RECIPES,
    ROOT,
    SNAPSHOT,
    assert_has_every_option,
    by_command_line,
    by_hydra,
    command,
    composed,
    recipe_values,
    resolved,
)

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.adaptations.hydra_recipes import check_recipe
from rhhn_fairseq.data.problems.registry import PROBLEMS
from rhhn_fairseq.models.char_lm import CharLMBaseConfig
from rhhn_fairseq.models.classifier import ClassifierBaseConfig
from rhhn_fairseq.models.gnmt import GNMTBaseConfig
from rhhn_fairseq.models.handwriting import HandwritingBaseConfig

MODELS = {
    "char_lm": CharLMBaseConfig,
    "gnmt": GNMTBaseConfig,
    "handwriting": HandwritingBaseConfig,
    "synthetic": ClassifierBaseConfig,
}

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Each task, optimizer, scheduler and criterion, and every cell with options of its own. The others differ in
# values, which the snapshot has.
QUICK = {
    *("lstm_ptb", "ln_hyperlstm_2layer_ptb", "ln_hyperlstm_modern", "ln_hyperlstm_2048_enwik8", "rhn_enwik8"),
    *("rhn_ptb", "hyperrhn_ptb", "hyper_gru_rhn_ptb", "rolled_hyperrhn_ptb", "mingru_ptb", "lstm_gnmt"),
    *("lstm_gnmt_sgd", "hyperlstm_gnmt_iwslt", "hyperrhn_gnmt_small", "lstm_900_iam", "lstm_3x400_iam"),
}

every_config = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")


def test_the_snapshot_has_every_file():
    names = {f"{path.parent.name}/{path.stem}" for path in RECIPES}
    assert json.loads(SNAPSHOT.read_text()).keys() == names


@every_config
def test_composes_to_what_is_written_down(path):
    """A change that is meant is written down by ``PYTHONPATH=tests python -m helpers.config_files``."""
    expected = json.loads(SNAPSHOT.read_text())[f"{path.parent.name}/{path.stem}"]
    assert json.loads(json.dumps(recipe_values(path))) == expected


@every_config
def test_no_value_is_given_twice(path):
    check_recipe(path)


def test_a_value_given_twice_ends_training(tmp_path):
    """Through fairseq-hydra-train, which would else train with the other value."""
    shutil.copytree(ROOT / "configs" / "synthetic", tmp_path / "configs")
    recipe = tmp_path / "configs" / "elman_xor.yaml"
    recipe.write_text(recipe.read_text() + "criterion: {_name: cross_entropy}\n")
    arguments = ["--config-dir", tmp_path / "configs", "--config-name", "elman_xor"]
    result = run_module(
        "fairseq_cli.hydra_train", [*arguments, f"common.user_dir={USER_DIR}"], cwd=tmp_path, check=False
    )
    assert result.returncode == 1
    assert f"error: {recipe} gives criterion._name, and " in result.stderr
    assert "Traceback" not in result.stderr


@every_config
def test_every_option_of_the_model_can_be_overridden(path):
    assert_has_every_option(by_hydra(path).model, MODELS[path.parent.name])


def _fill_in_translation(by_command, by_file):
    by_command["model"]["output_dropout"] = by_command["model"]["dropout"]
    optimizer = by_command["optimizer"]
    if by_file["optimizer"]["_name"] == "sgd":
        # fairseq's SGD has no configuration of its own: it reads the whole command line.
        by_command["optimizer"] = {"_name": optimizer.optimizer} | {
            key: getattr(optimizer, key) for key in ("lr", "momentum", "weight_decay")
        }
    else:
        optimizer["adam_betas"] = list(ast.literal_eval(optimizer["adam_betas"]))


def _fill_in_problem(by_command, by_file):
    task = by_command["task"]
    for option, default in PROBLEMS[by_file["task"]["problem"]].options.items():
        if task[option] is None:
            task[option] = default


@pytest.mark.parametrize(
    "path",
    [
        path
        if path.stem in QUICK or path.parent.name == "synthetic"
        else pytest.param(path, marks=pytest.mark.slow)
        for path in RECIPES
    ],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_command_without_hydra_is_the_same_training(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    by_command, by_file = by_command_line(path), resolved(composed(path))
    # The score of translations, which no training looks at; the command line cannot leave it out.
    del by_file["scoring"], by_command["scoring"]
    fill_in = {"gnmt": _fill_in_translation, "synthetic": _fill_in_problem}.get(path.parent.name)
    if fill_in is not None:
        fill_in(by_command, by_file)
    assert by_file.keys() == by_command.keys()
    for section, values in by_file.items():
        assert values == by_command[section], section


@every_config
def test_the_comment_has_the_command_of_the_file(path):
    arguments = command(path, "fairseq-hydra-train")
    assert arguments[:4] == ["--config-dir", f"configs/{path.parent.name}", "--config-name", path.stem]
