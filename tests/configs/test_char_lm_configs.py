"""configs/char_lm: each file says what --arch and its own comment say, and trains as it stands."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from helpers.cli import run_module
from helpers.config_files import (
    ROOT,
    by_hydra,
    command,
    comment,
    composed,
    effective,
    link_root,
)
from omegaconf import OmegaConf

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.describe import count_parameters
from rhhn_fairseq.models.char_lm_table import ARCHITECTURES

CONFIGS = ROOT / "configs" / "char_lm"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_config = pytest.mark.parametrize("name", NAMES)

TINY = {"hidden_size": 8, "hyper_size": 4, "hyper_embed_size": 2, "rhn_depth": 2}

TRAIN_SEVERAL = """
import json, sys
from fairseq_cli.hydra_train import cli_main

for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    cli_main()
"""


def of(name) -> Path:
    return CONFIGS / f"{name}.yaml"


def tiny(name) -> list[str]:
    """Overrides that make the training of a file a matter of milliseconds; none needs a plus sign."""
    sizes = [f"model.{key}={value}" for key, value in TINY.items() if key in by_hydra(of(name)).model]
    rest = ["task.tokens_per_sample=5", "dataset.batch_size=2", "optimization.max_update=2"]
    return [*sizes, *rest, "dataset.num_workers=0"]


def check_trained(checkpoint: Path, name) -> None:
    state = load_checkpoint_to_cpu(str(checkpoint))
    assert state["optimizer_history"][-1]["num_updates"] == 2
    assert state["cfg"]["model"]["_name"] == name
    assert state["model"]["weight_out"].shape[0] == TINY["hidden_size"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A directory that looks like the repository's root to the commands in the comments."""
    root = link_root(tmp_path_factory.mktemp("root"))
    texts = {}
    for split, lines in (("train", 30), ("valid", 6), ("test", 6)):
        texts[split] = [root.parent / f"{split}.txt"]
        texts[split][0].write_text("weights that change as the network reads\n" * lines)
    for corpus in ("ptb", "enwik8"):
        prepare(text_files(texts, False), root / "data-bin" / corpus)
    return root


def test_one_file_for_each_architecture():
    assert set(NAMES) == set(ARCHITECTURES)


@every_config
def test_model_is_that_of_the_architecture(name):
    cfg = composed(of(name))
    assert cfg.model._name == name
    config = OmegaConf.to_object(cfg.model)
    default = MODEL_DATACLASS_REGISTRY[name](_name=name)
    assert effective(dataclasses.asdict(config)) == effective(dataclasses.asdict(default))
    with torch.device("meta"):
        model = MODEL_REGISTRY[name].for_vocabulary(config, ARCHITECTURES[name].vocab_size)
    assert count_parameters(model) == ARCHITECTURES[name].parameters


@every_config
def test_comment_tells_the_row_of_the_table(name):
    row, text = ARCHITECTURES[name], comment(of(name))
    printed = f"; the paper prints {row.printed}" if row.printed else ""
    assert f"Parameters: {row.parameters:,}{printed}." in text
    digits = 2 if "Suarez" in row.source else 3
    scores = (("valid", row.valid), ("test", row.test))
    expected = " and ".join(f"{split} {bits:.{digits}f}" for split, bits in scores if bits)
    expected = f"{expected} bits per character" if expected else "the paper has no figures for it"
    expected = row.measured or expected
    assert f"Expected: {expected}." in text
    assert f"{row.vocab_size} symbols." in text
    evaluation = command(of(name), "fairseq-eval-lm")
    assert f"Protocol: {evaluation[evaluation.index('--protocol') + 1]}," in text
    assert f"{composed(of(name)).checkpoint.save_dir}/checkpoint_best.pt" in evaluation


def test_recipes_of_the_papers():
    """The settings that the model's table does not hold (Ha et al. 2016, sections 4.1-2; Suarez 2017)."""
    for name, row in ARCHITECTURES.items():
        cfg = composed(of(name))
        recipe = (cfg.optimizer._name, cfg.optimization.clip_norm, cfg.dataset.batch_size, cfg.task.batching)
        if "Suarez" in row.source:
            assert recipe == ("adam_l1", 10.0, 256, "windows")
        elif "full_size" in row.source:
            # Penn Treebank, 5,101,618 symbols, has 399 updates of 128 lanes of 100, and 798 of 64 lanes.
            lanes, rate, epochs, warm_up = (
                (64, 2e-3, 4, 200) if name == "hyperrhn_1000_modern" else (128, 4e-3, 40, 100)
            )
            assert recipe == ("adam", 1.0, lanes, "lanes")
            assert cfg.optimization.lr == [rate] and cfg.optimization.max_epoch == epochs
            assert cfg.lr_scheduler.warmup_updates == warm_up
            assert cfg.lr_scheduler.total_num_update == epochs * 399 * 128 // lanes
            assert cfg.criterion.activation_reg == (0.0 if name == "ln_hyperlstm_1000_modern" else 1.0)
            continue
        elif row.measured:
            # One epoch of Penn Treebank: 5,101,618 symbols in 16 lanes of 100.
            assert recipe == ("adam", 1.0, 16, "lanes")
            rate, warm_up = ([8e-3], 100) if name == "hyperrhn_modern" else ([1.2e-2], 0)
            assert cfg.optimization.lr == rate and cfg.lr_scheduler.warmup_updates == warm_up
            assert cfg.lr_scheduler.total_num_update == 3189
            assert cfg.criterion.activation_reg == 1.0
            continue
        else:
            assert recipe == ("adam", 1.0, 128, "lanes")
        length = 250 if "enwik8" in row.source else 100
        length = {"ln_hyperlstm_2048_enwik8": 300, "rhn_enwik8": 50}.get(name, length)
        assert cfg.task.tokens_per_sample == length
        # The author's repository trains its RHN at half the rate.
        assert cfg.optimization.lr == [5e-4 if name == "rhn_ptb" else 1e-3]


def test_commands_in_the_comment_train_and_evaluate(workplace):
    name = "ln_hyperlstm_ptb"
    arguments = [*command(of(name), "fairseq-hydra-train"), *tiny(name)]
    run_module("fairseq_cli.hydra_train", arguments, cwd=workplace)
    checkpoint = workplace / "checkpoints" / name / "checkpoint_best.pt"
    check_trained(checkpoint, name)
    # Neither Hydra's output directory nor its log.
    assert not (workplace / "outputs").exists() and not list(workplace.glob("*.log"))
    result = run_module("fairseq_cli.eval_lm", command(of(name), "fairseq-eval-lm"), cwd=workplace)
    assert "test, protocol carry: " in result.stderr
    assert "246 of 246 symbols scored (100.00 %), 0 unknown" in result.stderr


@pytest.mark.slow
def test_every_file_trains(workplace, tmp_path):
    """All of them in one process, which imports fairseq once."""
    runs = []
    for name in NAMES:
        arguments = [*command(of(name), "fairseq-hydra-train"), *tiny(name)]
        runs.append([*arguments, f"checkpoint.save_dir={tmp_path / name}"])
    (workplace / "train_several.py").write_text(TRAIN_SEVERAL)
    run_module("train_several", [json.dumps(runs)], cwd=workplace)
    for name in NAMES:
        check_trained(tmp_path / name / "checkpoint_last.pt", name)
