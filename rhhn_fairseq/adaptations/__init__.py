"""The adaptations of fairseq that `rhhn_fairseq.compat` applies, one subject per file."""

import inspect
from types import CodeType, FunctionType


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
