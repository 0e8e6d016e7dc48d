"""Saves a ``Reading`` as a page or a picture, by the extension of the file's name."""

from collections.abc import Sequence
from pathlib import Path

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import check_output, replace_file
from rhhn_fairseq.inspection.plotting import check_picture, save, save_arrays
from rhhn_fairseq.inspection.weight_page import weight_page
from rhhn_fairseq.inspection.weight_picture import draw_weights
from rhhn_fairseq.inspection.weights import Reading

TITLE = "Change of the recurrent weights as each symbol is read"


def check_reading(option: str, path: str, inputs: Sequence[str | None] = ()) -> None:
    """Checks the name of an output file before anything is computed.

    Args:
        option: its name in the message. inputs: files that are read.

    Raises:
        UsageError: it ends in none of .html, .png and .svg, or it is one of the inputs.
    """
    if Path(path).suffix.lower() == ".html":
        check_output(option, path, inputs)
    elif Path(path).suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"{option} {path}: the name ends in .html for a page, in .png or .svg for a picture")
    else:
        check_picture(option, path, inputs)


def save_reading(reading: Reading, path: str, title: str = TITLE) -> None:
    """Writes the page or the picture, and its arrays beside it as .npz."""
    if Path(path).suffix.lower() != ".html":
        save(draw_weights(reading, title), path, reading.arrays())
        return
    with replace_file(path) as file:
        file.write(weight_page(reading, title).encode("utf-8"))
    save_arrays(Path(path).with_suffix(".npz"), reading.arrays())
