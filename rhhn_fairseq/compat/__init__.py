"""Every change to fairseq's behaviour: a function of it is replaced once, by one function of this package.

The first line of a replacing function's docstring says what fails without it.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator

PATCHES: dict[str, Callable] = {}
"""What stands in place of which function of fairseq, such as "fairseq.trainer:Trainer.valid_step"."""


def in_place_of(place: str) -> Callable:
    """Notes the decorated function for ``install``; it gets the function that it replaces as first argument.

    A place has one function, which calls named steps if there are several reasons.
    """

    def note(function: Callable) -> Callable:
        if place in PATCHES:
            raise ValueError(f"{place} is replaced already")
        PATCHES[place] = function
        return function

    return note


def install(place: str) -> None:
    """Puts a noted function in its place."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    inner, function = getattr(owner, name), PATCHES[place]

    @functools.wraps(inner)
    def replaced(*args, **kwargs):
        return function(inner, *args, **kwargs)

    setattr(owner, name, replaced)
    # A program that has imported the user directory itself holds references of its own.
    for known, program in list(sys.modules.items()):
        if known.partition(".")[0] in ("__main__", "fairseq_cli") and getattr(program, name, None) is inner:
            setattr(program, name, replaced)


def trains_ours(trainer) -> bool:
    """Returns whether a model or a task of this package is trained.

    Guards that end a run which fairseq would not end are for these alone.
    """
    kinds = (*type(trainer.get_model()).__mro__, *type(trainer.task).__mro__)
    return any(kind.__module__.partition(".")[0] == __name__.partition(".")[0] for kind in kinds)


def training_loops() -> Iterator[dict]:
    """Yields the global names of each loaded copy of fairseq's training program, in which it looks them up.

    ``python -m fairseq_cli.train`` runs it as ``__main__``. In a process that this one spawns, the functions
    of ``__main__`` have other globals than the module of that name.
    """
    for name in ("__main__", "fairseq_cli.train"):
        names = getattr(getattr(sys.modules.get(name), "main", None), "__globals__", {})
        if {"validate_and_save", "should_stop_early"} <= names.keys():
            yield names
