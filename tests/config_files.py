"""What the tests of configs/ share: a file's comment, its commands, and what fairseq makes of it."""

import functools
import shlex
from pathlib import Path

from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rhhn_fairseq.cells import cell_options

ROOT = Path(__file__).resolve().parents[1]


def comment(path: Path) -> str:
    """The text of the comment at the top of a file."""
    lines = path.read_text().split("\n\n")[0].splitlines()
    assert all(line == "#" or line.startswith("# ") for line in lines)
    return "\n".join(line[2:] for line in lines)


def command(path: Path, program: str) -> list[str]:
    """The arguments of the one command with ``program`` in a file's comment."""
    joined = comment(path).replace("\\\n", " ")
    (line,) = [line for line in joined.splitlines() if line.strip().startswith(program + " ")]
    return shlex.split(line)[1:]


@functools.cache
def composed(path: Path):
    """The configuration as fairseq-hydra-train sees it, each part filled with its dataclass's defaults."""
    hydra_init(path.stem)
    # What fairseq's own hydra.main gets, as it names no version.
    with initialize_config_dir(str(path.parent), version_base="1.1"):
        cfg = compose(path.stem, command(path, "fairseq-hydra-train")[4:])
    add_defaults(cfg)
    return cfg


def by_command_line(path: Path) -> dict:
    """The values of the fairseq-train command in a file's comment."""
    parser = options.get_training_parser()
    arguments = options.parse_args_and_arch(parser, command(path, "fairseq-train"))
    return resolved(convert_namespace_to_omegaconf(arguments))


def resolved(cfg) -> dict:
    """All values; where a model leaves an option to its cell, the cell's own default."""
    values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return values | {"model": effective(values["model"])}


def effective(model: dict) -> dict:
    """A model's values, with the cell's default where the model gives none."""
    defaults = cell_options(model["cell"])
    return {key: defaults.get(key) if value is None else value for key, value in model.items()}
