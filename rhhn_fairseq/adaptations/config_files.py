"""Hydra's recipes: the one that is named exists, and gives no value that another of its files gives too."""

import functools
import sys
from pathlib import Path

import yaml

from rhhn_fairseq.adaptations.mistakes import nearest
from rhhn_fairseq.errors import UsageError


def require_named_recipe() -> bool:
    """fairseq makes a configuration of its defaults for any --config-name, even a mistyped one.

    Without effect if only the user directory brings this package, because Hydra is running by then.
    """
    import fairseq
    from fairseq.dataclass import initialize
    from hydra._internal.utils import get_args_parser

    inner = initialize.hydra_init

    @functools.wraps(inner)
    def hydra_init(cfg_name="config"):
        args, _ = get_args_parser().parse_known_args()
        # Hydra takes a relative --config-path from the program's own folder.
        own = Path(fairseq.__file__).parents[1] / "fairseq_cli" / (args.config_path or "../fairseq/config")
        places = [own] if args.config_dir is None else [Path(args.config_dir), own]
        file = f"{cfg_name.removesuffix('.yaml')}.yaml"
        # Directories that do not exist are Hydra's to refuse.
        readable = args.config_name == cfg_name and all(place.is_dir() for place in places)
        if readable and not any((place / file).is_file() for place in places):
            hint = nearest(cfg_name, {path.stem for path in places[0].glob("*.yaml")})
            raise UsageError(f"--config-name {cfg_name}: {places[0]} has no {file}: {hint}")
        inner(cfg_name)

    for module in (initialize, sys.modules.get("fairseq_cli.hydra_train")):
        if module is not None:
            module.hydra_init = hydra_init
    return True


def refuse_repeated_values() -> None:
    """A value in a recipe is silently replaced where a file of its defaults list also gives it.

    fairseq fills a recipe with the defaults of all options before Hydra merges anything, so the recipe has to
    come first (``_self_``) for the other files to have any effect. Then the other files win. Here training
    ends in one line that names the value and both files. Hydra has to be running.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    for source in hydra.runtime.config_sources:
        recipe = Path(source.path) / f"{hydra.job.config_name}.yaml"
        if source.provider == "command-line" and recipe.is_file():
            check_recipe(recipe)


def check_recipe(recipe: Path) -> None:
    """Raises UsageError if a file in the defaults list after ``_self_`` gives a value of ``recipe`` too."""
    values = yaml.safe_load(recipe.read_text()) or {}
    entries = values.pop("defaults", [])
    shared = entries[entries.index("_self_") + 1 :] if "_self_" in entries else []
    own = set(_names(values))
    for name in filter(lambda entry: isinstance(entry, str), shared):
        file = recipe.parent / f"{name}.yaml"
        if not file.is_file():
            continue
        repeated = sorted(own & set(_names(yaml.safe_load(file.read_text()) or {})))
        if repeated:
            raise UsageError(
                f"{recipe} gives {repeated[0]}, and {file}, which comes after it, gives it too and would "
                f"win; give it on the command line ({repeated[0]}=...), or leave it out of one of the files"
            )


def _names(values: dict, prefix: str = ""):
    """The names of the values, with dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
