"""What the tests of configs/ share: a file's comment, its commands, and what fairseq makes of it."""

import dataclasses
import functools
import json
import shlex
import shutil
from pathlib import Path

import yaml
from fairseq import options
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from helpers.cli import USER_DIR, run_module
from rhhn_fairseq.cells import cell_options
from rhhn_fairseq.models.options import CELL_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "tests" / "golden" / "commands.txt"
SNAPSHOT = ROOT / "tests" / "golden" / "configs.json"
RECIPES = sorted((ROOT / "configs").glob("*/*.yaml"))

# How Hydra itself is to run; its other settings are its own defaults.
HYDRA = ("hydra.job.chdir", "hydra.run.dir", "hydra.output_subdir", "hydra.job_logging")


def comment(path: Path) -> str:
    """The text of the comment at the top of a file."""
    lines = path.read_text().split("\n\n")[0].splitlines()
    assert all(line == "#" or line.startswith("# ") for line in lines)
    return "\n".join(line[2:] for line in lines)


def command(path: Path, program: str) -> list[str]:
    """The arguments of the one command with ``program`` in a file's comment."""
    return only_command(comment(path), program)


def only_command(text: str, program: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    (line,) = [line for line in joined.splitlines() if line.strip().startswith(program + " ")]
    return shlex.split(line)[1:]


def shared_command(path: Path, program: str) -> list[str]:
    """The same of the one file in its defaults list that has such a command for every recipe NAME."""
    entries = yaml.safe_load(path.read_text())["defaults"]
    texts = ((path.parent / f"{entry}.yaml").read_text() for entry in entries if entry != "_self_")
    (text,) = [text for text in texts if "# The figures of a recipe NAME:\n" in text]
    lines = [line.removeprefix("#") for line in text.splitlines()]
    return only_command("\n".join(lines).replace("NAME", path.stem), program)


@functools.cache
def by_hydra(path: Path):
    """What Hydra composes from a file by its fairseq-hydra-train command, with Hydra's own section."""
    hydra_init(path.stem)
    # What fairseq's own hydra.main gets, as it names no version.
    with initialize_config_dir(str(path.parent), version_base="1.1"):
        return compose(path.stem, command(path, "fairseq-hydra-train")[4:], return_hydra_config=True)


@functools.cache
def composed(path: Path):
    """The configuration as fairseq-hydra-train sees it, each section filled with its dataclass's defaults."""
    cfg = by_hydra(path).copy()
    with open_dict(cfg):
        del cfg["hydra"]
    add_defaults(cfg)
    return cfg


def recipe_values(path: Path) -> dict:
    """The sections of a file's composed configuration, less what fairseq has by default anyway."""
    values = OmegaConf.to_container(by_hydra(path), enum_to_str=True)
    defaults = OmegaConf.to_container(OmegaConf.structured(FairseqConfig), enum_to_str=True)
    sections = {"hydra": {key: functools.reduce(dict.get, key.split("."), values) for key in HYDRA}}
    for section in sorted(values.keys() - {"hydra"}):
        given, usual = values[section], defaults[section]
        if isinstance(given, dict) and isinstance(usual, dict):
            given = {key: value for key, value in given.items() if value != usual[key]}
        if given != usual and given != {}:
            sections[section] = given
    return sections


def write_snapshot() -> None:
    """Writes down what every file composes to: one line a section, so that a difference can be read."""
    files = []
    for path in RECIPES:
        sections = recipe_values(path).items()
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(v, sort_keys=True)}" for key, v in sections)
        files.append(f"{json.dumps(f'{path.parent.name}/{path.stem}')}: {{\n{lines}\n}}")
    SNAPSHOT.write_text("{\n" + ",\n".join(files) + "\n}\n")


def training_command(path: Path) -> list[str]:
    """The arguments of fairseq-train that are the same training."""
    start = f"{path.parent.name}/{path.stem}: "
    (line,) = [line for line in COMMANDS.read_text().splitlines() if line.startswith(start)]
    return shlex.split(line.removeprefix(start))


def by_command_line(path: Path) -> dict:
    """The values of the fairseq-train command that is the same training."""
    parser = options.get_training_parser()
    arguments = options.parse_args_and_arch(parser, training_command(path))
    return resolved(convert_namespace_to_omegaconf(arguments))


def link_root(root: Path) -> Path:
    """A directory that looks like the repository's root to the commands in the comments."""
    (root / "configs").symlink_to(ROOT / "configs")
    (root / "rhhn_fairseq").symlink_to(USER_DIR)
    return root


def train_tiny(path: Path, root: Path, sizes: dict) -> dict:
    """Two updates by a file's fairseq-hydra-train command; the checkpoint.

    Args:
        root: see ``link_root``. sizes: options of the model, those that the file has.
    """
    model = by_hydra(path).model
    tiny = [f"model.{key}={value}" for key, value in sizes.items() if key in model]
    stop = ["optimization.max_update=2", "dataset.num_workers=0"]
    # Another test may have trained it, which this run would go on with.
    shutil.rmtree(root / "checkpoints" / path.stem, ignore_errors=True)
    run_module("fairseq_cli.hydra_train", [*command(path, "fairseq-hydra-train"), *tiny, *stop], cwd=root)
    state = load_checkpoint_to_cpu(str(root / "checkpoints" / path.stem / "checkpoint_last.pt"))
    assert state["optimizer_history"][-1]["num_updates"] == 2
    assert state["cfg"]["model"]["_name"] == model._name
    return state


def assert_has_every_option(model, base: type) -> None:
    """Hydra overrides what a file gives by its name; what it does not give needs a plus sign."""
    own = [key for key in cell_options(model.cell) if key in CELL_OPTIONS]
    names = [spec.name for spec in dataclasses.fields(base) if spec.name != "_name"]
    assert set(model) == {"_name", *names, *own}
    assert None not in model.values()


def resolved(cfg) -> dict:
    """All values; where a model leaves an option to its cell, the cell's own default."""
    values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return values | {"model": effective(values["model"])}


def effective(model: dict) -> dict:
    """A model's values, with the cell's default where the model gives none."""
    defaults = cell_options(model["cell"])
    return {key: defaults.get(key) if value is None else value for key, value in model.items()}


if __name__ == "__main__":
    write_snapshot()
