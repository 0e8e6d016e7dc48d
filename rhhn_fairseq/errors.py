"""The exception that is meant for the user, and text that is safe to show."""

import difflib
import re
from collections.abc import Iterable

# All but the tab and the ends of lines; a terminal obeys the others. Surrogates are bytes that are no text.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]|\r(?!\n)")


def printable(text: str) -> str:
    """Returns a text with its control characters written as escapes; file names and models may hold them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint: the valid names most similar to `name`, else all if they are few, else nothing."""
    known = sorted(map(str, known))
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(known)}" if 0 < len(known) <= 12 else ""


class UsageError(ValueError, RuntimeError):
    """A value, file or combination that cannot work. torch's own layers raise either of its base classes.

    Its message is one line that names the file or option, the value, and what would be valid. The
    command-line programs print that line and exit with status 1, without a traceback.
    """

    def __str__(self) -> str:
        # Not at its construction, which torch.compile traces.
        return printable(super().__str__())
