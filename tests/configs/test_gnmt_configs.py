"""configs/gnmt: each file says what --arch and its own comment say, and trains as it stands."""

import dataclasses
import random

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from helpers.cli import run_module
from helpers.config_files import (
    ROOT,
    by_hydra,
    comment,
    composed,
    effective,
    link_root,
    shared_command,
    train_tiny,
)
from omegaconf import OmegaConf

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.describe import count_parameters
from rhhn_fairseq.models.gnmt_table import ARCHITECTURES

CONFIGS = sorted((ROOT / "configs" / "gnmt").glob("*.yaml"))

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)

TINY = {"hidden_size": 8, "embed_dim": 6, "hyper_size": 4, "hyper_embed_size": 2}


def test_a_file_for_each_architecture():
    assert {by_hydra(path).model._name for path in CONFIGS} == set(ARCHITECTURES)
    assert {path.stem for path in CONFIGS} == {*ARCHITECTURES, "lstm_gnmt_sgd"}


@every_config
def test_model_is_that_of_the_architecture(path):
    cfg = composed(path)
    name = cfg.model._name
    config = OmegaConf.to_object(cfg.model)
    default = MODEL_DATACLASS_REGISTRY[name](_name=name)
    found, expected = (effective(dataclasses.asdict(c)) for c in (config, default))
    # The files write out what stands for --dropout.
    assert found.pop("output_dropout") == expected["dropout"] and expected.pop("output_dropout") is None
    assert found == expected
    with torch.device("meta"):
        model = MODEL_REGISTRY[name].for_vocabulary(config, ARCHITECTURES[name].vocab_size)
    assert count_parameters(model) == ARCHITECTURES[name].parameters
    assert f"Parameters: {ARCHITECTURES[name].parameters:,} with" in comment(path)


@every_config
def test_translations_in_the_comment_are_of_the_best_checkpoint(path):
    assert f"checkpoints/{path.stem}/checkpoint_best.pt" in shared_command(path, "fairseq-generate")


def test_recipes_of_the_papers():
    """Wu et al. 2016, section 8.3, as Ha et al. 2016 take it over."""
    for path in CONFIGS:
        cfg = composed(path)
        recipe = (
            cfg.optimizer._name,
            cfg.optimization.lr,
            cfg.optimization.clip_norm,
            cfg.dataset.batch_size,
        )
        if path.stem.endswith("_gnmt"):
            assert recipe == ("adam", [2e-4], 5.0, 128)
            assert (cfg.model.dropout, cfg.optimization.max_update) == (0.2, 1_000_000)
        elif path.stem.endswith("_sgd"):
            assert recipe == ("sgd", [0.5], 5.0, 128)
        else:
            assert cfg.criterion.label_smoothing == 0.1 and cfg.dataset.max_tokens == 2000


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory that looks like the repository's root to the commands in the comments."""
    root = link_root(tmp_path_factory.mktemp("root"))
    draw = random.Random(1)
    for split in ("train", "valid", "test"):
        lines = [" ".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(10)]
        for language in ("en", "fr"):
            (root / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    prefixes = [part for s in ("train", "valid", "test") for part in (f"--{s}pref", root / s)]
    (root / "data-bin").mkdir()
    arguments = ["-s", "en", "-t", "fr", "--joined-dictionary", *prefixes]
    run_module("fairseq_cli.preprocess", [*arguments, "--destdir", root / "data-bin" / "multi30k-en-fr"])
    (root / "data-bin" / "wmt14-en-fr").symlink_to(root / "data-bin" / "multi30k-en-fr")
    return root


def test_commands_in_the_comments_train_and_generate(workplace):
    (path,) = (path for path in CONFIGS if path.stem == "hyperlstm_gnmt_small")
    train_tiny(path, workplace, TINY)
    arguments = shared_command(path, "fairseq-generate")
    result = run_module("fairseq_cli.generate", arguments[: arguments.index(">")], cwd=workplace)
    assert result.stdout.count("\nH-") == 10


@pytest.mark.slow
def test_the_second_phase_starts_from_the_first_ones_weights(workplace):
    by_name = {path.stem: path for path in CONFIGS}
    first = train_tiny(by_name["lstm_gnmt"], workplace, TINY)
    second = train_tiny(by_name["lstm_gnmt_sgd"], workplace, TINY)
    assert second["optimizer_history"][-1]["optimizer_name"] == "SGD"
    # Two updates from there are near it; from new weights they would not be.
    key = "encoder.stack.cells.3.weight_x"
    assert (second["model"][key] - first["model"][key]).abs().max() < 0.01


@pytest.mark.slow
@every_config
def test_every_file_trains(path, workplace):
    if path.stem == "lstm_gnmt_sgd":
        pytest.skip("has a test of its own")
    train_tiny(path, workplace, TINY)
