"""``rhhn plot PICTURE``: draws pictures of training runs and trained networks."""

import importlib
import sys

from rhhn_fairseq.compat.names import nearest
from rhhn_fairseq.errors import UsageError

# Each picture's command is a module plot_PICTURE beside this one.
PICTURES = {
    "curves": "metrics of trainings over updates, epochs or hours",
    "weights": "how much the weights change while a character model reads a text",
    "gradients": "how the gradient of the last step's loss reaches the steps before it",
    "norms": "the norm of every block of weights",
    "attention": "which source words a translation looks at",
    "strokes": "lines of prepared handwriting with their texts",
    "rank": "how many directions a hypernetwork uses, along a training",
}


def main(argv=None) -> None:
    """Passes the arguments to the command that draws the picture.

    Raises:
        UsageError: no picture is named, or no command draws it.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(overview())
        return
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"rhhn plot: name the picture first, one of {', '.join(PICTURES)}")
    if argv[0] not in PICTURES:
        hint = nearest(argv[0], PICTURES) or f"choose from {', '.join(PICTURES)}"
        raise UsageError(f"rhhn plot {argv[0]}: no such picture, {hint}")
    importlib.import_module(f"rhhn_fairseq.cli.plot_{argv[0]}").main(argv[1:])


def overview() -> str:
    """Returns a list of all pictures, one per line."""
    width = max(map(len, PICTURES))
    rows = ["usage: rhhn plot PICTURE ...    (rhhn plot PICTURE --help: its options)", ""]
    return "\n".join(rows + [f"  {picture:{width}}  {text}" for picture, text in PICTURES.items()])
