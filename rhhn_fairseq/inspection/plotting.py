"""The common style of all pictures, and functions to save them.

Colours are those of Okabe and Ito, which readers with any kind of colour vision can distinguish, and those of
cividis for quantities. The legend is outside of the data. A picture is a PNG or an SVG by the extension of
its name, and the arrays it was drawn from are saved beside it as .npz.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import check_output, replace_file
from rhhn_fairseq.inspection.colours import QUANTITY, QUANTITY_OF_LINES

with needed_for("pictures need"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator  # noqa: F401  (for the pictures)

FORMATS = ("png", "svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
# Markers for several sequences of points.
MARKERS = "osD^v<>PX*"
FEW_POINTS = 30
COLOUR_MAP = LinearSegmentedColormap.from_list("quantity", QUANTITY)
LINE_COLOUR_MAP = LinearSegmentedColormap.from_list("quantity_of_lines", QUANTITY_OF_LINES)
WIDTH = 8.0
DOTS_PER_INCH = 110
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
    "grid.color": "0.9",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.7,
    # Deterministic ids in an SVG: equal pictures give equal files.
    "svg.hashsalt": "rhhn_fairseq",
}


def styled():
    """Returns the context, or decorator, in which a picture is drawn."""
    return rc_context(STYLE)


def literal(text: str) -> str:
    """Returns a text that matplotlib shows as it is.

    Between two dollar signs it would read a formula, and it leaves names that begin with "_" out of a legend.
    """
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Returns an empty figure, with sizes in inches. It has no window, and pyplot does not keep it."""
    return Figure(figsize=(width, height), layout="constrained")


def colour_of(number: int) -> str:
    """Returns the colour of the n-th item, counted from 0; colours repeat after the last one."""
    return COLOURS[number % len(COLOURS)]


def add_legend(figure: Figure, axes: Axes, columns: int = 2, note: str | None = None) -> None:
    """Adds a legend under the data, with a note above it; no legend for a single line without a note."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or note is not None:
        columns = min(columns, len(labels))
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=note)
        legend.get_title().set_fontsize(9.5)


def add_colour_bar(figure: Figure, axes: Axes, image, label: str, extend: str = "max") -> None:
    """Adds a colour bar under the data, of the same height in every picture.

    Args:
        extend: "max" adds a tip for larger values, "neither" adds none.
    """
    inches = 0.13
    bar = figure.colorbar(
        image,
        ax=axes,
        location="bottom",
        extend=extend,
        shrink=0.6,
        aspect=0.6 * figure.get_figwidth() / inches,
        pad=0.01,
    )
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def with_thousands(axis) -> None:
    """Formats the numbers of an axis with thousands separators."""
    axis.set_major_formatter(lambda value, position: f"{value:,.6g}")


def check_picture(option: str, path: str | Path | None, inputs: Sequence = (), page: bool = False) -> None:
    """Checks the name of a picture before anything is computed.

    Args:
        option: its name in the message. path: None for no picture. inputs: files that are read.
        page: whether it may be a page, too.

    Raises:
        UsageError: it ends neither in .png nor in .svg (nor in .html), it is one of the inputs, or its arrays
            would replace those of something else.
    """
    if path is not None:
        if kind_of(path) not in ((*FORMATS, "html") if page else FORMATS):
            or_page = " or, for a page, in .html" if page else ""
            raise UsageError(f"{option} {path}: the name of a picture ends in .png or .svg{or_page}")
        check_output(option, path, inputs)
        arrays = Path(path).with_suffix(".npz")
        # A picture or a page of this name has such arrays.
        owners = (arrays.with_suffix(f".{kind}") for kind in (*FORMATS, "html"))
        if arrays.exists() and not any(map(Path.exists, owners)):
            raise UsageError(f"{option} {path}: its arrays would replace {arrays}, name another")


def kind_of(path: str | Path) -> str:
    """Returns the extension of a name, without its dot."""
    return Path(path).suffix[1:].lower()


def encode(figure: Figure, kind: str) -> bytes:
    """Returns a figure as the content of a file of this kind; equal figures give equal files."""
    content = io.BytesIO()
    with styled():
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    return content.getvalue()


def save(figure: Figure, path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a picture, and its arrays beside it under the same name with the extension .npz."""
    content = encode(figure, kind_of(path))
    with replace_file(path) as file:
        file.write(content)
    save_arrays(Path(path).with_suffix(".npz"), arrays)


def save_arrays(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name in a file for ``numpy.load``; UsageError if it cannot be written."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **{name: np.asarray(array) for name, array in arrays.items()})
    with replace_file(path) as file:
        file.write(packed.getvalue())
