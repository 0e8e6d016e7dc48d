"""Fills in training options that the user does not set from the architecture's recipe.

fairseq's own defaults for task, criterion, optimizer and learning rate are not tuned to any model: with only
an architecture, training failed with "Must specify batch size", or ran at a learning rate of 0.25.

``fill`` completes what the user gave. A command line (``--arch NAME``) and Hydra (``model._name=NAME``)
differ only in how they say what was given, and in where the result goes.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from rhhn_fairseq.compat.names import nearest
from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.recipes")

CONFIGS = Path(__file__).parents[1] / "configs"
ARCHITECTURES = "such as ln_hyperlstm_ptb; docs/reference/architectures.md lists them"
"""What a message says where no architecture is named."""

COMPONENTS = ("task", "criterion", "optimizer", "lr_scheduler")
# Sections of a tree in which fairseq keeps the options that belong to no component.
SECTIONS = ("dataset", "optimization", "checkpoint")

# An option is not filled in if the user gave one that controls the same thing.
ALTERNATIVES = {
    "batch_size": ("max_tokens",),
    "max_tokens": ("batch_size",),
    "max_epoch": ("max_update",),
    "max_update": ("max_epoch",),
    "no_epoch_checkpoints": ("keep_last_epochs", "save_interval"),
    "maximize_best_checkpoint_metric": ("best_checkpoint_metric",),
}
# These depend on the criterion, which defines the metrics.
METRIC = ("best_checkpoint_metric", "maximize_best_checkpoint_metric")
# fairseq's own task would count pieces as words.
BLEU = ("eval_bleu", "eval_bleu_args")

# fairseq copies these values by interpolation, which may already be resolved.
COPIES = {
    "optimization.lr": ("optimizer.lr", "lr_scheduler.lr"),
    "dataset.batch_size": ("dataset.batch_size_valid",),
    "dataset.max_tokens": ("dataset.max_tokens_valid",),
}


def fill(arch: str | None, given: Mapping[str, object]) -> dict[str, object]:
    """Returns the options of an architecture's recipe that apply beside those that the user gave.

    An option of the recipe's task, criterion, optimizer or scheduler is left out if the user chose another
    one that has no such option.

    Args:
        arch: the architecture; fairseq's own, and None, have no recipe.
        given: what the user gave, by name.
    """
    recipe = recipe_of(arch, given)
    components = {kind: given.get(kind, recipe.get(kind)) for kind in COMPONENTS}
    filled = {}
    for name, value in recipe.items():
        stated = name in given or any(other in given for other in ALTERNATIVES.get(name, ()))
        if not stated and _applies(name, recipe, components):
            filled[name] = value
    return _end_with_schedule(filled, recipe, given)


def _applies(name: str, recipe: Mapping, components: Mapping) -> bool:
    if name == "lr":
        # Learning rates of Adam and its variants are comparable, those of other optimizers are not.
        return components["optimizer"] == recipe["optimizer"] or "adam_betas" in fields_of(
            "optimizer", components
        )
    if name == "clip_norm":
        # An L1 norm is larger by orders of magnitude, so its bound is meaningless for the L2 norm.
        return (components["optimizer"] == "adam_l1") == (recipe["optimizer"] == "adam_l1")
    if name in METRIC:
        return components["criterion"] == recipe["criterion"]
    if name in BLEU:
        return components["task"] == recipe["task"]
    owners = [kind for kind in COMPONENTS if name in fields_of(kind, recipe)]
    return not owners or any(name in fields_of(kind, components) for kind in owners)


def _end_with_schedule(filled: dict, recipe: Mapping, given: Mapping) -> dict:
    """Scales a schedule of a fixed number of updates to the length of training.

    After its end the learning rate is zero, and further training would have no effect.
    """
    if "total_num_update" not in filled:
        return filled
    updates = filled["total_num_update"]
    if (given.get("max_update") or 0) > 0:
        return filled | {"total_num_update": float(given["max_update"])}
    if (given.get("max_epoch") or 0) > 0:
        share = given["max_epoch"] / recipe["max_epoch"]
        return filled | {"total_num_update": float(round(updates * share))}
    return filled if "max_update" in given or "max_epoch" in given else filled | {"max_update": int(updates)}


def fields_of(kind: str, names: Mapping) -> set[str]:
    """Returns the options of a component, without the learning rate, which all of fairseq shares."""
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    registry = TASK_DATACLASS_REGISTRY if kind == "task" else REGISTRIES[kind]["dataclass_registry"]
    config = registry.get(names.get(kind))
    return set() if config is None else {spec.name for spec in dataclasses.fields(config)} - {"lr"}


def recipe_of(arch: str | None, given: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the recipe of an architecture; empty for fairseq's own models and for None."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    model = ARCH_MODEL_REGISTRY.get(arch)
    return model.recipe(given) if hasattr(model, "recipe") else {}


def announce(arch: str, filled: Mapping[str, object]) -> None:
    """Logs in one line, on the first worker only, what was filled in."""
    if filled and os.environ.get("RANK", "0") == "0":
        options = " ".join(_as_option(name, value) for name, value in filled.items())
        logger.info("--arch %s is trained with %s (what you give takes precedence)", arch, options)


def _as_option(name: str, value) -> str:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    if isinstance(value, list):
        value = ",".join(f"{number:g}" for number in value)
    value = f"{value:.10g}" if isinstance(value, float) else str(value)
    return f"{flag} '{value}'" if " " in value else f"{flag} {value}"


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
            keys |= _keys_in_file(Path(source.path) / hydra.job.config_name)
    return keys


def _keys_in_file(path: Path) -> set[str]:
    """Returns the dotted keys in a file and in the files of its defaults list."""
    path = path.with_name(f"{path.name.removesuffix('.yaml')}.yaml")
    if not path.is_file():
        return set()
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    shared = [path.parent / entry for entry in content.pop("defaults", []) if isinstance(entry, str)]
    return set(_dotted(content)).union(*map(_keys_in_file, shared))


def _dotted(tree, prefix: str = "") -> Iterator[str]:
    if not isinstance(tree, Mapping):
        yield prefix.removesuffix(".")
        return
    for key, value in tree.items():
        yield from _dotted(value, f"{prefix}{key}.")


def fill_tree(cfg: DictConfig, keys: set[str]) -> None:
    """Sets the options of the model's recipe that are not among ``keys``, which are dotted."""
    # Without a model, fairseq asks for a batch size.
    if cfg.get("model") is None and OmegaConf.select(cfg, "common_eval.path") is None:
        raise UsageError(
            "no model is configured: choose an architecture by model._name=NAME with a file "
            f"(--config-name char_lm), or by model=NAME without one, {ARCHITECTURES}"
        )
    names = {kind: _name(cfg.get(kind)) for kind in ("model", *COMPONENTS)}
    given = {}
    for key in keys:
        section, _, option = key.partition(".")
        if section in COMPONENTS and option in ("", "_name"):
            # A component that is set to null counts as not given.
            given |= {section: names[section]} if names[section] is not None else {}
        elif option and section in ("model", *COMPONENTS, *SECTIONS):
            given[option] = OmegaConf.select(cfg, key)
    filled = fill(names["model"], given)
    before = OmegaConf.to_container(cfg, resolve=False)
    with open_dict(cfg):
        for kind in COMPONENTS:
            if filled.get(kind, names[kind]) != names[kind]:
                # Only the options that the user gave for it are kept.
                own = [key.partition(".")[2] for key in keys if key.startswith(f"{kind}.")]
                cfg[kind] = {key: OmegaConf.select(cfg[kind], key) for key in own} | {"_name": filled[kind]}
        for name in filled.keys() - set(COMPONENTS):
            _set(cfg, _section(cfg, name), name, filled[name], keys)
    if OmegaConf.to_container(cfg, resolve=False) != before:
        announce(names["model"], filled)


def _name(component) -> str | None:
    return component if isinstance(component, str) else getattr(component, "_name", None)


def _section(cfg: DictConfig, name: str) -> str:
    from fairseq.dataclass.configs import FairseqConfig

    for section in SECTIONS:
        if name in FairseqConfig.__dataclass_fields__[section].type.__dataclass_fields__:
            return section
    names = {kind: _name(cfg.get(kind)) for kind in COMPONENTS}
    # What none of them has is the model's own, as the sizes of ``handwriting``.
    return next((kind for kind in COMPONENTS if name in fields_of(kind, names)), "model")


def _set(cfg: DictConfig, section: str, name: str, value, keys: set[str]) -> None:
    cfg[section][name] = value
    for copy in COPIES.get(f"{section}.{name}", ()):
        section, name = copy.split(".")
        node = cfg.get(section) or {}
        if name in node and copy not in keys and not OmegaConf.is_interpolation(node, name):
            node[name] = value


def typed_config(cfg, component: type):
    """Returns the configuration of a task or model as a dataclass.

    fairseq passes a dictionary without types if the component comes from a checkpoint, and for names that
    ``register_model_architecture`` defined. Keys that the dataclass does not have are left out.

    Args:
        component: the class of the task or model. If it was registered without a dataclass, that of its base
            class is used.
    """
    if not OmegaConf.is_config(cfg):
        return cfg
    kind = OmegaConf.get_type(cfg)
    if not dataclasses.is_dataclass(kind):
        registered = (vars(base).get("__dataclass") for base in component.__mro__)
        kind = next(own for own in registered if own is not None)
    # Missing values stay, and are named where they are needed.
    values = OmegaConf.to_container(cfg, resolve=True)
    known = {spec.name for spec in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in known})


def look_in_the_package() -> None:
    """``fairseq-hydra-train`` searches fairseq's own directory and --config-dir for a configuration.

    Here, without --config-dir, it then searches ``configs`` of this package.
    """
    from hydra._internal.utils import get_args_parser
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Configs(SearchPathPlugin):
        def manipulate_search_path(self, search_path) -> None:
            if get_args_parser().parse_known_args()[0].config_dir is None:
                search_path.append("rhhn_fairseq", f"file://{CONFIGS}")

    Plugins.instance().register(Configs)


def check_config_name(name: str) -> None:
    """Raises UsageError for a --config-name without a file; with --user-dir alone, Hydra runs before."""
    import fairseq
    from hydra._internal.utils import get_args_parser

    args, _ = get_args_parser().parse_known_args()
    # Hydra resolves a relative --config-path from the program's own folder.
    own = Path(fairseq.__file__).parents[1] / "fairseq_cli" / (args.config_path or "../fairseq/config")
    places = [own, Path(args.config_dir or CONFIGS)]
    file = f"{name.removesuffix('.yaml')}.yaml"
    if args.config_name == name and not any((place / file).is_file() for place in places):
        known = {path.stem for place in places for path in place.glob("*.yaml")}
        raise UsageError(f"--config-name {name}: there is no {file}: {nearest(name, known)}")


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
