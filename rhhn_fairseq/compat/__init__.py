"""The adaptations of fairseq that `rhhn_fairseq.compat.applying` applies, one subject per file."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType


def in_place_of(owner, name: str) -> Callable:
    """Puts the decorated function in place of ``owner.name``, which becomes its first argument."""

    def replace(function: Callable) -> Callable:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def replaced(*args, **kwargs):
            return function(inner, *args, **kwargs)

        setattr(owner, name, replaced)
        return replaced

    return replace


def mentions(function: FunctionType, word: str) -> bool:
    """Returns whether a function's code uses `word` as a name, an attribute, a keyword or a string.

    Several guards use it: a version of fairseq without the defect would have to use that word.
    """
    return _contains(inspect.unwrap(function).__code__, word)


def _contains(value, word: str) -> bool:
    if isinstance(value, CodeType):
        return word in value.co_names or _contains(value.co_consts, word)
    if isinstance(value, tuple | frozenset):
        return any(_contains(item, word) for item in value)
    return value == word


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
