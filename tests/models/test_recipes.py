"""An architecture brings what it is trained with, and what the user gives takes precedence."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from helpers.cli import USER_DIR, run_module
from helpers.tiny_char_lm import write_corpus
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.cli.describe import build_empty, count_parameters, describe
from rhhn_fairseq.compat.command_line import given_options
from rhhn_fairseq.compat.recipes import (
    fill_tree,
    keys_of_the_user,
    recipe_of,
)
from rhhn_fairseq.models import char_lm_table, classifier_table, gnmt_table, handwriting_table
from rhhn_fairseq.models.handwriting import Handwriting, HandwritingConfig
from rhhn_fairseq.models.options import Architecture

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TABLES = (char_lm_table, gnmt_table, handwriting_table, classifier_table)
ARCHITECTURES = [name for table in TABLES for name in table.ARCHITECTURES]
BASES = ["char_lm", "gnmt", "handwriting", "classifier"]


def parse(*arguments):
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, [str(argument) for argument in arguments])


def data_of(arch) -> list[str]:
    """DATA, which all architectures need but those for synthetic problems."""
    return [] if recipe_of(arch, {})["task"] == "synthetic" else ["data"]


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *BASES])
def test_an_architecture_alone_is_a_whole_training(arch):
    args = parse(*data_of(arch), "--arch", arch)
    recipe = recipe_of(arch, {})
    assert {"task", "criterion", "optimizer", "lr_scheduler", "lr", "clip_norm"} <= set(recipe)
    found = {name: getattr(args, name) for name in recipe}
    assert found == recipe
    assert args.batch_size or args.max_tokens
    assert args.max_epoch or args.max_update


def row_of(arch) -> Architecture:
    return next(table.ARCHITECTURES[arch] for table in TABLES if arch in table.ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_has_the_parameters_of_its_table(arch):
    row, model, text = row_of(arch), build_empty(arch), describe(arch)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert count_parameters(model) == row.parameters and f"{row.parameters:,} (equal)" in text
    assert ("figures:" in text) == (row.source is not None)
    assert row.source is None or f"figures:    {row.reported()}" in text


def test_models_that_stand_in_no_table_are_described():
    assert describe("classifier").startswith("classifier: Classifier\n")
    assert describe("char_lm", 50).startswith("char_lm: ")


GIVEN = [
    ("--lr=5e-4", {"lr": [5e-4], "optimizer": "adam", "clip_norm": 1.0}),
    ("--batch-size 3", {"batch_size": 3, "batch_size_valid": 3, "max_tokens": None}),
    ("--max-tokens 900", {"max_tokens": 900, "batch_size": None}),
    ("--max-update 7", {"max_update": 7, "max_epoch": 0}),
    ("--optimizer adam_l1", {"optimizer": "adam_l1", "lr": [1e-3], "clip_norm": 0.0}),
    ("--keep-last-epochs 2", {"keep_last_epochs": 2, "no_epoch_checkpoints": False}),
    # A value that reads as an option's name is no option.
    ("--save-dir=--lr", {"save_dir": "--lr", "lr": [1e-3]}),
]


@pytest.mark.parametrize("given,expected", GIVEN, ids=[given for given, _ in GIVEN])
def test_what_is_given_takes_precedence(given, expected):
    args = parse("data", "--arch", "lstm_ptb", *given.split())
    assert {name: getattr(args, name) for name in expected} == expected


def test_options_of_a_component_that_is_not_chosen_are_left_out():
    small = ["data", "--arch", "lstm_gnmt_small"]
    args = vars(parse(*small, "--criterion", "cross_entropy", "--optimizer", "sgd"))
    assert not {"label_smoothing", "adam_betas"} & set(args)
    args = vars(parse(*small, "--lr-scheduler", "inverse_sqrt"))
    assert args["warmup_updates"] == 400 and "total_num_update" not in args and args["max_update"] == 0
    args = vars(parse(*small, "--optimizer", "fused_adam"))
    assert args["adam_betas"] == "(0.9, 0.98)" and args["lr"] == [2e-3]


def test_schedule_ends_with_the_training():
    small = ["data", "--arch", "lstm_gnmt_small"]
    lengths = [([], 3468, 3468, 12), (["--max-update", 100], 100, 100, 0), (["--max-epoch", 24], 6936, 0, 24)]
    for given, total, updates, epochs in lengths:
        args = parse(*small, *given)
        assert (args.total_num_update, args.max_update, args.max_epoch) == (total, updates, epochs)
    args = parse(*small, "--total-num-update", 50)
    assert (float(args.total_num_update), args.max_update, args.max_epoch) == (50, 0, 12)


def test_recipe_is_that_of_the_problem():
    args = parse("--arch", "lstm_mnist", "--problem", "adding")
    assert (args.batch_size, args.max_epoch, args.best_checkpoint_metric) == (50, 50, "mse")
    assert parse("--arch", "lstm_mnist").problem == "mnist"


def test_other_models_are_left_alone():
    args = parse("data", "--arch", "lstm_lm", "--task", "language_modeling")
    assert (args.criterion, args.optimizer, args.lr, args.batch_size) == ("cross_entropy", None, [0.25], None)


def test_given_options_are_what_argparse_reads():
    parser = options.get_training_parser()
    line = ["data", "-a", "lstm_ptb", "--lr=1e-3", "--cpu", "--save-dir", "x", "--unknown", "3"]
    before = parser.get_default("lr")
    assert given_options(parser, line) == {"arch": "lstm_ptb", "lr": [1e-3], "cpu": True, "save_dir": "x"}
    assert parser.get_default("lr") == before


def tree(**sections):
    """A configuration as Hydra gives it to fairseq, with ``sections`` in it."""
    cfg = OmegaConf.structured(FairseqConfig())
    base = {"criterion": {"_name": "cross_entropy"}, "lr_scheduler": {"_name": "fixed", "lr": [0.25]}}
    OmegaConf.set_struct(cfg, False)
    return OmegaConf.merge(cfg, base, sections)


def test_a_tree_is_filled_in_as_a_command_line():
    cfg = tree(model={"_name": "lstm_gnmt_small"}, task={"data": "data"})
    fill_tree(cfg, {"model._name", "task.data"})
    assert cfg.task.pop("eval_bleu_args").startswith('{"beam": 1,')
    assert cfg.task == {"data": "data", "_name": "gnmt_translation", "eval_bleu": True}
    assert cfg.criterion == {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}
    assert cfg.lr_scheduler._name == "polynomial_decay" and cfg.lr_scheduler.warmup_updates == 400
    assert cfg.optimizer == {"_name": "adam", "adam_betas": "(0.9, 0.98)"}
    assert cfg.optimization.lr == [2e-3] and cfg.dataset.max_tokens == cfg.dataset.max_tokens_valid == 2000
    fill_tree(cfg, {"model._name", "task.data"})
    again = OmegaConf.to_container(cfg)
    fill_tree(cfg, {"model._name", "task.data"})
    assert OmegaConf.to_container(cfg) == again


def test_a_recipe_with_sizes_fills_in_the_model():
    cfg = tree(model={"_name": "handwriting", "mixtures": 3})
    fill_tree(cfg, {"model._name", "model.mixtures"})
    sizes = {"_name": "handwriting", "mixtures": 3, "hidden_size": 256, "window": -1, "window_start": "first"}
    assert cfg.model == sizes and cfg.optimization.max_epoch == 8
    parameters = count_parameters(build_empty("handwriting", 57))
    model = HandwritingConfig(hidden_size=256, mixtures=8, window=-1, window_start="first")
    with torch.device("meta"):
        assert parameters == count_parameters(Handwriting.for_vocabulary(model, 57))
    # 6 M + 1 numbers for 8 components.
    assert build_empty("handwriting", 57).weight_out.shape == (256, 49)


def test_fairseqs_own_task_computes_no_bleu_of_pieces():
    for task, filled in (("translation", False), ("gnmt_translation", True)):
        cfg = tree(model={"_name": "lstm_gnmt_small"}, task={"_name": task, "data": "data"})
        fill_tree(cfg, {"model._name", "task._name", "task.data"})
        assert cfg.task.get("eval_bleu", False) is filled and cfg.optimization.max_epoch == 12


def test_keys_are_those_of_the_user(tmp_path, monkeypatch):
    """Also in a folder that is named as fairseq's own, as in a checkout of fairseq."""
    folder = tmp_path / "fairseq" / "config"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [_self_, size, {task: null}]\nmodel: {_name: lstm_ptb}\n")
    (folder / "size.yaml").write_text("dataset: {batch_size: 2}\n")
    sources = [SimpleNamespace(schema=schema, path=str(folder)) for schema in ("structured", "file")]
    given = ["+model.layers=2", "~bpe", "task@other=char_lm", "optimization.lr=[1,2]"]
    hydra = SimpleNamespace(
        overrides=SimpleNamespace(task=given),
        runtime=SimpleNamespace(config_sources=sources),
        job=SimpleNamespace(config_name="mine"),
    )
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    expected = {"model.layers", "bpe", "task", "optimization.lr", "model._name", "dataset.batch_size"}
    assert keys_of_the_user() == expected


def test_copies_that_are_resolved_follow():
    cfg = OmegaConf.create(OmegaConf.to_container(tree(model={"_name": "lstm_ptb"}), resolve=True))
    fill_tree(cfg, {"model._name", "dataset.batch_size_valid"})
    assert cfg.lr_scheduler.lr == cfg.optimization.lr == [1e-3]
    assert cfg.dataset.batch_size == 128 and cfg.dataset.batch_size_valid is None


def test_what_a_tree_says_takes_precedence():
    cfg = tree(model={"_name": "rhn_ptb"}, optimizer={"_name": "adam"}, optimization={"lr": [0.25]})
    keys = {"model._name", "optimizer._name", "optimization.lr", "optimization.max_update", "criterion"}
    fill_tree(cfg, keys)
    assert cfg.optimization.lr == [0.25] and cfg.optimization.max_epoch == 0
    assert cfg.optimization.clip_norm == 0.0 and cfg.optimizer == {"_name": "adam"}
    assert cfg.criterion._name == "cross_entropy" and cfg.task.batching == "windows"


def test_every_model_of_the_project_has_a_recipe():
    ours = {name for name, model in ARCH_MODEL_REGISTRY.items() if model.__module__.startswith("rhhn_")}
    assert ours == {*ARCHITECTURES, *BASES}
    assert all(recipe_of(name, {}) for name in ours)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


TINY = ["--hidden-size", 8, "--hyper-size", 4, "--tokens-per-sample", 5, "--batch-size", 2, "--cpu"]


def test_the_command_trains_and_resumes(corpus, tmp_path):
    """Nothing but the data and the architecture, in a size for tests."""
    line = [corpus, "--user-dir", USER_DIR, "--arch", "ln_hyperlstm_ptb", "--save-dir", tmp_path, *TINY]
    for updates in (2, 4):
        result = run_module("fairseq_cli.train", [*line, "--max-update", updates])
        assert result.stdout.count("is trained with --task char_lm") == 1
    state = load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt"))
    assert state["optimizer_history"][-1]["num_updates"] == 4
    assert state["optimizer_history"][-1]["criterion_name"] == "CharCrossEntropy"
