"""Hydra's recipes: a value given twice is refused, because the one in the recipe itself would not count."""

from pathlib import Path

import yaml

from rhhn_fairseq.errors import UsageError


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
        if source.provider in ("command-line", "rhhn_fairseq") and recipe.is_file():
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
