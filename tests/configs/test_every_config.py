"""What holds for every file of configs/: its options, and the command of fairseq-train that does the same."""

import ast

import pytest
from helpers.config_files import (
    RECIPES,
    ROOT,
    assert_has_every_option,
    by_command_line,
    by_hydra,
    command,
    composed,
    resolved,
)

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
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

every_config = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")


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


@every_config
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
