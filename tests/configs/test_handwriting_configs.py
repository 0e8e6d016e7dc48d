"""configs/handwriting: each file says what --arch and its own comment say, and trains as it stands."""

import dataclasses

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from helpers.cli import run_module
from helpers.config_files import (
    ROOT,
    command,
    comment,
    composed,
    effective,
    link_root,
    train_tiny,
)
from helpers.tiny_handwriting import prepare_words
from omegaconf import OmegaConf

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.describe import count_parameters
from rhhn_fairseq.models.handwriting_table import ARCHITECTURES

CONFIGS = sorted((ROOT / "configs" / "handwriting").glob("*.yaml"))

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)

TINY = {"hidden_size": 8, "hyper_size": 4, "hyper_embed_size": 2, "mixtures": 2}


def test_a_file_for_each_architecture():
    assert {path.stem for path in CONFIGS} == set(ARCHITECTURES)


@every_config
def test_model_is_that_of_the_architecture(path):
    cfg = composed(path)
    config = OmegaConf.to_object(cfg.model)
    assert cfg.model._name == path.stem
    default = MODEL_DATACLASS_REGISTRY[path.stem](_name=path.stem)
    assert effective(dataclasses.asdict(config)) == effective(dataclasses.asdict(default))
    with torch.device("meta"):
        model = MODEL_REGISTRY[path.stem].for_vocabulary(config, 1)
    assert count_parameters(model) == ARCHITECTURES[path.stem].parameters


@every_config
def test_comment_tells_the_row_of_the_table(path):
    row, text = ARCHITECTURES[path.stem], comment(path)
    assert f"Parameters: {row.parameters:,}; the paper prints {row.count}." in text
    assert f"Expected: {row.loss:,} nats per sequence" in text
    assert f"checkpoints/{path.stem}/checkpoint_best.pt" in command(path, "fairseq-validate")


@every_config
def test_recipe_of_the_paper(path):
    cfg = composed(path)
    recipe = (cfg.optimizer._name, cfg.optimization.lr, cfg.optimization.clip_norm, cfg.dataset.batch_size)
    assert recipe == ("adam", [1e-4], 5.0, 32)
    rates = (cfg.model.recurrent_dropout, cfg.model.output_dropout, cfg.task.scale_augment)
    assert rates == (0.05, 0.05, 0.1) and cfg.model.mixtures == 20


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory that looks like the repository's root to the commands in the comments."""
    root = link_root(tmp_path_factory.mktemp("root"))
    prepare_words(root / "data-bin" / "iam")
    return root


@pytest.mark.slow
@every_config
def test_commands_in_the_comment_train_and_validate(path, workplace):
    train_tiny(path, workplace, TINY)
    result = run_module("fairseq_cli.validate", command(path, "fairseq-validate"), cwd=workplace)
    assert result.stderr.count("nats_seq") + result.stdout.count("nats_seq") >= 2
