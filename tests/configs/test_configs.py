"""configs/: ``model._name=NAME`` trains what ``--arch NAME`` trains."""

import ast

import pytest
import torch
from fairseq import options
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.dataclass import initialize
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers.option_walk import Workplace
from helpers.programs import forget_hydra, run
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.compat.recipes import CONFIGS, recipe_of
from rhhn_fairseq.models import char_lm_table, classifier_table, gnmt_table, handwriting_table

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TABLES = {
    "char_lm": char_lm_table,
    "gnmt": gnmt_table,
    "handwriting": handwriting_table,
    "synthetic": classifier_table,
}
OF_THE_FILE = ["--user-dir", "rhhn_fairseq", "--log-format", "simple"]
# One small model a task, with the same options for both programs.
TRAINED = {
    "char_lm": ("ln_hyperlstm_ptb", {"hyper_size": 4, "hyper_embed_size": 2}),
    "gnmt": ("hyperlstm_gnmt_small", {"embed_dim": 4, "hyper_size": 4, "hyper_embed_size": 2}),
    "handwriting": ("lstm_900_iam", {"mixtures": 2}),
    "synthetic": ("elman_xor", {}),
}


def by_hydra(config: str, overrides: list[str]) -> dict:
    """The configuration that fairseq-hydra-train trains, every value resolved."""
    initialize.hydra_init(config)
    # What fairseq's own hydra.main gets, as it names no version.
    with initialize_config_dir(str(CONFIGS.resolve()), version_base="1.1"):
        cfg = compose(config, overrides, return_hydra_config=True)
    try:
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        initialize.add_defaults(cfg)
    finally:
        forget_hydra()
    return resolved(cfg)


def by_command_line(arguments: list[str]) -> dict:
    """The configuration that fairseq-train trains, every value resolved."""
    parser = options.get_training_parser()
    return resolved(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments)))


def resolved(cfg) -> dict:
    values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    # The score of translations, which no training computes; a command line cannot leave it out.
    del values["scoring"]
    # A tuple is a string on a command line.
    betas = values["optimizer"].get("adam_betas")
    values["optimizer"]["adam_betas"] = ast.literal_eval(betas) if isinstance(betas, str) else betas
    return values


def test_a_file_for_each_task_and_for_what_differs():
    others = {"gnmt_sgd", "synthetic_hdetach"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*TABLES, *others}


def cases():
    """Every architecture. The first two recipes of each task are quick."""
    for config, table in TABLES.items():
        recipes = []
        for arch in table.ARCHITECTURES:
            recipe = recipe_of(arch, {})
            quick = recipe not in recipes and len(recipes) < 2
            yield pytest.param(config, arch, marks=[] if quick else [pytest.mark.slow])
            recipes += [recipe] if quick else []


@pytest.mark.parametrize("config, arch", cases())
def test_both_programs_train_the_same(config, arch, monkeypatch):
    monkeypatch.chdir(CONFIGS.resolve().parent)
    data, languages = ["DATA"], []
    if config == "synthetic":
        data = []
    elif config == "gnmt":
        languages = ["--source-lang", "en", "--target-lang", "fr"]
    place = ["--arch", arch, "--save-dir", f"checkpoints/{arch}"]
    by_line = by_command_line([*data, *place, *languages, *OF_THE_FILE])
    by_file = by_hydra(config, [f"model._name={arch}", *(["task.data=DATA"] if data else [])])
    assert by_file.keys() == by_line.keys()
    for section, values in by_file.items():
        assert values == by_line[section], section


def test_architectures_are_entries_of_hydras_group():
    """As fairseq's own models are; their values are built when one is asked for."""
    with initialize_config_dir(str(CONFIGS.resolve()), version_base="1.1"):
        cfg = compose(overrides=["+model=hyperrhn_ptb", "model.hidden_size=7"])
    forget_hydra()
    assert cfg.model._name == "hyperrhn_ptb" and cfg.model.cell == "hyperrhn" and cfg.model.hidden_size == 7
    entries = ConfigStore.instance().repo["model"]
    assert all(isinstance(entries[f"{arch}.yaml"].node, type) for arch in char_lm_table.ARCHITECTURES)


@pytest.mark.parametrize(
    "config, task, expected",
    [
        ("gnmt_sgd", {}, {"optimizer": "sgd", "lr": [0.5], "max_update": 800_000, "clip_norm": 5.0}),
        ("synthetic_hdetach", {}, {"optimizer": "adam", "lr": [1e-3], "max_epoch": 600, "clip_norm": 1.0}),
    ],
)
def test_files_of_their_own_change_only_what_they_name(config, task, expected):
    overrides = ["task.data=DATA"] if config == "gnmt_sgd" else []
    cfg = by_hydra(config, overrides)
    assert cfg["optimizer"]["_name"] == expected.pop("optimizer")
    assert {name: cfg["optimization"][name] for name in expected} == expected
    assert cfg["optimizer"]["lr"] == expected["lr"]
    assert cfg["model"].get("h_detach") == (0.5 if config == "synthetic_hdetach" else None)


QUICK = ("char_lm", "gnmt")


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TABLES]
)
def test_the_same_weights_after_two_updates(config, tmp_path):
    arch, sizes = TRAINED[config]
    place = Workplace(tmp_path)
    sizes = {"hidden_size": 8} | sizes
    shared = {"batch_size": 2, "max_update": 2, "num_workers": 0}
    sections = {"batch_size": "dataset", "max_update": "optimization", "num_workers": "dataset"}
    lengths = {"tokens_per_sample": 5} if config == "char_lm" else {}
    data = place.data_of({"gnmt": "gnmt_translation"}.get(config, config))
    line = [*data, "--arch", arch, "--cpu"]
    tree = [f"model._name={arch}", "common.cpu=true", *(f"task.data={path}" for path in data)]
    for name, value in (sizes | lengths | shared).items():
        line += [f"--{name.replace('_', '-')}", value]
        section = sections.get(name)
        tree.append(f"{section}.{name}={value}" if section else f"+{_section(name, lengths)}.{name}={value}")
    if config == "gnmt":
        line += ["--source-lang", "en", "--target-lang", "fr"]
    outcomes = [
        run("train", [*line, "--save-dir", tmp_path / "line"]),
        run(
            "hydra_train",
            [
                "--config-name",
                config,
                *tree,
                "common.user_dir=null",
                f"checkpoint.save_dir={tmp_path / 'tree'}",
            ],
        ),
    ]
    assert [outcome.kind for outcome in outcomes] == ["works", "works"], outcomes
    first, second = (
        load_checkpoint_to_cpu(str(tmp_path / way / "checkpoint_last.pt")) for way in ("line", "tree")
    )
    assert first["optimizer_history"][-1]["num_updates"] == 2
    assert first["model"].keys() == second["model"].keys()
    for name, weight in first["model"].items():
        assert torch.equal(weight, second["model"][name]), name


def _section(name: str, lengths: dict) -> str:
    return "task" if name in lengths else "model"
