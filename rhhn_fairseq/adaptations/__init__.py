"""The adaptations of fairseq that `rhhn_fairseq.compat` applies, one subject per file."""

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType


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


def training_programs() -> Iterator[ModuleType]:
    """Yields the loaded modules that hold fairseq's training loop.

    ``python -m fairseq_cli.train`` runs the module under the name ``__main__``.
    """
    for name in ("__main__", "fairseq_cli.train"):
        module = sys.modules.get(name)
        if hasattr(module, "validate_and_save") and hasattr(module, "should_stop_early"):
            yield module
