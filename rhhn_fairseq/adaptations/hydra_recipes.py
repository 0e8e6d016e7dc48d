"""Applies the recipes of ``adaptations/recipes.py`` under Hydra, where a configuration is a tree."""

import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from rhhn_fairseq.adaptations import hydra_configs, recipes
from rhhn_fairseq.adaptations.names import nearest
from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.compat")

# Sections in which fairseq keeps the options that belong to no component.
SECTIONS = ("dataset", "optimization", "checkpoint")

NO_MODEL = (
    "no model is configured: choose a file by --config-name, or an architecture by model=NAME, "
    f"{recipes.ARCHITECTURES}"
)

# fairseq copies these values by interpolation, which may already be resolved.
COPIES = {
    "optimization.lr": ("optimizer.lr", "lr_scheduler.lr"),
    "dataset.batch_size": ("dataset.batch_size_valid",),
    "dataset.max_tokens": ("dataset.max_tokens_valid",),
}


def fill_in_configuration() -> bool:
    """``fairseq-hydra-train model=NAME`` takes options that the user does not set from the model's recipe.

    fairseq's ``add_defaults`` completes a configuration after the user's modules are imported.
    ``fairseq_cli.train`` calls it too, after it has parsed a command line; then nothing is filled in.
    """
    from fairseq.dataclass import initialize

    # If fairseq's program imported the user directory, it holds its own reference to the function.
    for module in (initialize, sys.modules.get("fairseq_cli.train")):
        if hasattr(module, "add_defaults"):
            module.add_defaults = _filling(module.add_defaults)
    return True


def _filling(inner):
    @functools.wraps(inner)
    def add_defaults(cfg):
        keys = keys_of_the_user()
        if keys is not None:
            refuse_repeated_values()
            _require_model(cfg)
            fill_tree(cfg, keys)
            separate_jobs(cfg)
        inner(cfg)

    return add_defaults


def _require_model(cfg: DictConfig) -> None:
    """Raises UsageError if no model is configured. fairseq itself asks for a batch size."""
    if cfg.get("model") is None and OmegaConf.select(cfg, "common_eval.path") is None:
        raise UsageError(NO_MODEL)


def keys_of_the_user() -> set[str] | None:
    """Returns the dotted keys in the user's overrides and configuration files; None outside of Hydra."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    keys = {override.lstrip("+~").split("=", 1)[0].split("@")[0] for override in hydra.overrides.task}
    for source in hydra.runtime.config_sources:
        # fairseq's own file sets nothing of a training.
        if source.schema == "file":
            keys |= _keys_in_file(f"{source.path}/{hydra.job.config_name}")
    return keys


def _keys_in_file(path: str) -> set[str]:
    """Returns the dotted keys in a file and in the files of its defaults list."""
    path = path if path.endswith(".yaml") else f"{path}.yaml"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        return set()
    entries = content.pop("defaults", [])
    shared = (os.path.join(os.path.dirname(path), entry) for entry in entries if isinstance(entry, str))
    return set(_dotted(content)).union(*(_keys_in_file(file) for file in shared))


def _dotted(tree, prefix: str = "") -> Iterator[str]:
    if not isinstance(tree, Mapping):
        yield prefix.removesuffix(".")
        return
    for key, value in tree.items():
        yield from _dotted(value, f"{prefix}{key}.")


def fill_tree(cfg: DictConfig, keys: set[str]) -> None:
    """Sets the options of the model's recipe that are not among ``keys``, which are dotted."""
    arch = _name(cfg.get("model"))
    given = _given(cfg, keys)
    filled = recipes.fill(recipes.recipe_of(arch, given), given)
    if not filled:
        return
    before = OmegaConf.to_container(cfg, resolve=False)
    with open_dict(cfg):
        for kind in recipes.COMPONENTS:
            if kind in filled:
                _choose(cfg, kind, filled[kind], keys)
        for name, value in filled.items():
            if name not in recipes.COMPONENTS:
                _set(cfg, f"{_section(cfg, name)}.{name}", value, keys)
    if OmegaConf.to_container(cfg, resolve=False) != before:
        recipes.announce(arch, filled)


def separate_jobs(cfg: DictConfig) -> None:
    """Gives every job of a ``--multirun`` the relative paths of its output in Hydra's directory of the job.

    A second job would otherwise resume from the checkpoints of the first and train nothing. Where an absolute
    path has this effect, the second job is refused. Calling it again changes nothing: where the package is
    installed, both fairseq-hydra-train and the training that it starts call this.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return
    save_dir = OmegaConf.to_container(cfg.checkpoint, resolve=False)["save_dir"]
    own = not os.path.isabs(save_dir) or Path(save_dir).is_relative_to(hydra.runtime.output_dir)
    if hydra.job.num > 0 and not own and not differs_by_job("checkpoint.save_dir", save_dir):
        raise UsageError(
            f"checkpoint.save_dir={save_dir}: job {hydra.job.num} of the sweep would resume from the "
            f"checkpoints of job 0; give a relative path, or {os.path.join(save_dir, '${hydra:job.num}')}"
        )
    for key in ("checkpoint.save_dir", "common.tensorboard_logdir", "common.log_file"):
        path = OmegaConf.select(cfg, key)
        if path:
            # An absolute path stays as it is.
            OmegaConf.update(cfg, key, os.path.join(hydra.runtime.output_dir, path))
    if not os.path.isabs(save_dir):
        logger.info("job %s of the sweep: checkpoints in %s", hydra.job.num, cfg.checkpoint.save_dir)


def differs_by_job(key: str, value: str) -> bool:
    """Returns whether an option, here its unresolved value, may differ between the jobs of a sweep."""
    given = [argument.split("=", 1)[1] for argument in sys.argv if argument.lstrip("+").startswith(f"{key}=")]
    # A sweep's list of values is not equal to any of them.
    return "${" in value or any(text.strip("'\"") != value for text in given[-1:])


def _name(component) -> str | None:
    return component if isinstance(component, str) else getattr(component, "_name", None)


def _given(cfg: DictConfig, keys: set[str]) -> dict:
    """Returns the options that the user gave, by name without section."""
    given = {}
    for key in keys:
        first, _, rest = key.partition(".")
        if first in recipes.COMPONENTS and rest in ("", "_name"):
            given[first] = _name(cfg.get(first))
        elif rest and first in (*recipes.COMPONENTS, *SECTIONS):
            given[rest] = OmegaConf.select(cfg, key)
    # A component that is set to null counts as not given.
    return {key: value for key, value in given.items() if key not in recipes.COMPONENTS or value is not None}


def _choose(cfg: DictConfig, kind: str, name: str, keys: set[str]) -> None:
    """Makes ``name`` the component, with only the options that the user gave for it."""
    if _name(cfg.get(kind)) == name:
        return
    own = [key for key in keys if key.startswith(f"{kind}.")]
    kept = {key.split(".", 1)[1]: OmegaConf.select(cfg, key) for key in own}
    cfg[kind] = kept | {"_name": name}


def _section(cfg: DictConfig, name: str) -> str:
    from fairseq.dataclass.configs import FairseqConfig

    for section in SECTIONS:
        if name in FairseqConfig.__dataclass_fields__[section].type.__dataclass_fields__:
            return section
    names = {kind: _name(cfg.get(kind)) for kind in recipes.COMPONENTS}
    return next(kind for kind in recipes.COMPONENTS if name in recipes.fields_of(kind, names))


def _set(cfg: DictConfig, key: str, value, keys: set[str]) -> None:
    section, name = key.split(".")
    cfg[section][name] = value
    for copy in COPIES.get(key, ()):
        section, name = copy.split(".")
        node = cfg.get(section) or {}
        if name in node and copy not in keys and not OmegaConf.is_interpolation(node, name):
            node[name] = value


def require_named_recipe() -> bool:
    """fairseq falls back to its default configuration for an unknown --config-name, even a mistyped one.

    A command line that configures no model is refused before Hydra runs.

    No effect if this package is loaded only through --user-dir, because Hydra is already running then.
    """
    import fairseq
    from fairseq.dataclass import initialize
    from hydra._internal.utils import get_args_parser

    inner = initialize.hydra_init

    @functools.wraps(inner)
    def hydra_init(cfg_name="config"):
        args, _ = get_args_parser().parse_known_args()
        shows = args.help or args.hydra_help or args.cfg or args.info
        names_file = args.config_name or args.config_dir or args.config_path
        given = shows or names_file or any(map(_selects_a_model, args.overrides))
        if hydra_configs.is_hydras_program() and not given:
            # Hydra would leave its files in the working directory first.
            raise UsageError(NO_MODEL)
        # Hydra resolves a relative --config-path from the program's own folder.
        own = Path(fairseq.__file__).parents[1] / "fairseq_cli" / (args.config_path or "../fairseq/config")
        places = [own] if args.config_dir is None else [Path(args.config_dir), own]
        file = f"{cfg_name.removesuffix('.yaml')}.yaml"
        # Hydra itself refuses directories that do not exist.
        readable = args.config_name == cfg_name and all(place.is_dir() for place in places)
        if readable and not any((place / file).is_file() for place in places):
            if args.config_dir is not None or args.config_path is not None:
                hint = nearest(cfg_name, {path.stem for path in places[0].glob("*.yaml")})
                raise UsageError(f"--config-name {cfg_name}: {places[0]} has no {file}: {hint}")
            known = hydra_configs.own_names()
            if cfg_name.removesuffix(".yaml") not in known:
                hint = nearest(cfg_name, known) or f"see {hydra_configs.CONFIGS}"
                raise UsageError(f"--config-name {cfg_name} is unknown without a --config-dir, {hint}")
        inner(cfg_name)

    for module in (initialize, sys.modules.get("fairseq_cli.hydra_train")):
        if module is not None:
            module.hydra_init = hydra_init
    return True


def _selects_a_model(override: str) -> bool:
    return override.lstrip("+").startswith(("model", "common_eval.path"))


def refuse_repeated_values() -> None:
    """A value in a recipe is silently replaced if a file of its defaults list also sets it.

    fairseq fills a recipe with the defaults of all options before Hydra merges anything, so the recipe has to
    come first (``_self_``) for the other files to have any effect, and then those take precedence. Here such
    a value ends training in a one-line error that names it and both files. Hydra has to be running.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    for source in hydra.runtime.config_sources:
        recipe = Path(source.path) / f"{hydra.job.config_name}.yaml"
        if source.provider in ("command-line", "rhhn_fairseq") and recipe.is_file():
            check_recipe(recipe)


def check_recipe(recipe: Path) -> None:
    """Raises UsageError if a file after ``_self_`` in the defaults list also sets a value of ``recipe``."""
    values = yaml.safe_load(recipe.read_text()) or {}
    entries = values.pop("defaults", [])
    shared = entries[entries.index("_self_") + 1 :] if "_self_" in entries else []
    own = set(_dotted(values))
    for name in filter(lambda entry: isinstance(entry, str), shared):
        file = recipe.parent / f"{name}.yaml"
        if not file.is_file():
            continue
        repeated = sorted(own & set(_dotted(yaml.safe_load(file.read_text()) or {})))
        if repeated:
            raise UsageError(
                f"{recipe} gives {repeated[0]}, and {file}, which comes after it, gives it too and would "
                f"win; give it on the command line ({repeated[0]}=...), or leave it out of one of the files"
            )
