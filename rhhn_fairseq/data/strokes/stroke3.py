"""Handwriting and drawings as arrays in the stroke-3 format of sketch-rnn: (dx, dy, pen bit) a row.

It reads

- ``.npz`` files with arrays ``train``, ``valid`` and perhaps ``test``, each a list of arrays [n, 3] (Ha and
  Eck 2017, arXiv 1704.03477);
- ``.npy`` files with a list of such arrays, or with one such array;
- ``.svg`` files with one line each, see ``svg``;
- folders of such ``.svg`` files and of ``.npy`` files with one array each. The text of
  ``NAME-strokes.npy`` stands in ``NAME-chars.npy``, that of another file in ``NAME.txt``, if there is one.

Files without splits are split at random, by percentages.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.manifest import SPLITS, describe_file
from rhhn_fairseq.data.strokes.arrays import LARGEST, read_arrays
from rhhn_fairseq.data.strokes.points import Line, Loaded, StrokeCorpus, from_offsets
from rhhn_fairseq.data.strokes.svg import read_svg
from rhhn_fairseq.data.text.corpora import parse_split
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_regular

STROKES_SUFFIX = "-strokes.npy"
CHARS_SUFFIX = "-chars.npy"


def stroke3(
    paths: Sequence[Path], split: str = "90/5/5", first_row: str = "drawn", y_up: bool = False, seed: int = 1
) -> StrokeCorpus:
    """Returns a corpus of files or folders of arrays; see the module's docstring.

    Args:
        split: percentages for files without splits. seed: of their random order.
        first_row, y_up: see ``from_offsets``.

    Raises:
        UsageError: the percentages do not add up to 100.
    """
    paths = [Path(path) for path in paths]
    parse_split(split)
    return StrokeCorpus(
        "stroke3",
        f"stroke-3 arrays ({' + '.join(path.name for path in paths)})",
        {"split": split, "first_row": first_row, "y_up": y_up, "seed": seed},
        lambda: _load(paths, split, first_row, y_up, seed),
    )


def _load(paths, split, first_row, y_up, seed) -> Loaded:
    loaded = Loaded({})
    unsplit: list[Line] = []
    for path in paths:
        for file in _files(path):
            loaded.inputs.append({"name": file.name, **describe_file(file)})
            is_svg = file.suffix == ".svg"
            arrays = {} if is_svg else read_arrays(file)
            if is_svg or "" in arrays:
                if (beside := _text_file(file)) is not None:
                    loaded.inputs.append({"name": beside.name, **describe_file(beside)})
                text = _text(beside)
                if is_svg:
                    unsplit.append(Line(file.stem, read_svg(file), text))
                else:
                    unsplit += _lines(arrays[""], file.stem, first_row, y_up, text)
                continue
            known = [name for name in SPLITS if name in arrays]
            if not known:
                raise UsageError(
                    f"{file}: has arrays {', '.join(sorted(arrays)) or '(none)'}, expected train, valid "
                    "and test"
                )
            for name in known:
                lines = _lines(arrays[name], f"{file.name}:{name}", first_row, y_up)
                loaded.splits.setdefault(name, []).extend(lines)
    if unsplit:
        _cut(unsplit, split, seed, loaded.splits)
    return loaded


def read_line(path: Path, first_row: str = "drawn", y_up: bool = False) -> Line:
    """Reads the line of a .npy or .svg file that holds one line, with its text if a neighbouring file has it.

    Raises:
        UsageError: the file cannot be read, or holds no line or several.
    """
    if path.suffix == ".svg":
        return Line(path.stem, read_svg(path), _text(_text_file(path)))
    array = read_arrays(path).get("")
    lines = [] if array is None else _lines(array, path.stem, first_row, y_up, _text(_text_file(path)))
    if len(lines) != 1:
        raise UsageError(f"{path}: expected one line of handwriting, an array of shape (points, 3)")
    return lines[0]


def _files(path: Path) -> list[Path]:
    # For a path without access rights os.path returns False, where Path raises; reading it then says why.
    if not os.path.isdir(path):
        return [path]
    files = (file for file in path.iterdir() if file.suffix in (".npy", ".svg"))
    files = sorted(file for file in files if not file.name.endswith(CHARS_SUFFIX))
    if not files:
        raise UsageError(f"{path}: has no .npy or .svg files")
    return files


def _lines(array: np.ndarray, name: str, first_row: str, y_up: bool, text: str | None = None) -> list[Line]:
    """Returns the lines of one array: one [n, 3], a list of such, or a block [lines, n, 3]."""
    if array.dtype != object and array.ndim == 2:
        return [Line(name, from_offsets(array, name, first_row, y_up), text)]
    if array.ndim not in (1, 3) or (array.ndim == 1 and array.dtype != object):
        raise UsageError(
            f"{name}: is an array of {array.dtype} of shape {array.shape}, expected shape (points, 3) or a "
            "list of such arrays"
        )
    names = (f"{name}[{number}]" for number in range(len(array)))
    return [
        Line(one, from_offsets(rows, one, first_row, y_up)) for one, rows in zip(names, array, strict=True)
    ]


def _text_file(file: Path) -> Path | None:
    """Returns the neighbouring file with the text of a file's line, or None if there is none."""
    if file.name.endswith(STROKES_SUFFIX):
        beside = file.with_name(file.name.removesuffix(STROKES_SUFFIX) + CHARS_SUFFIX)
    else:
        beside = file.with_suffix(".txt")
    return beside if os.path.exists(beside) else None


def _text(file: Path | None) -> str | None:
    """Returns the text in a file that ``_text_file`` named."""
    if file is None:
        return None
    if file.suffix == ".txt":
        # Editors on Windows write a mark before the text, and two symbols for the end of a line.
        text = read_regular(file, LARGEST).decode("utf-8")
        return text.removeprefix("\ufeff").replace("\r\n", "\n").strip()
    loaded = read_arrays(file).get("")
    if loaded is None or loaded.ndim or loaded.dtype.kind not in "SU":
        raise UsageError(f"{file}: expected one text, as numpy.save stores it")
    text = loaded.item()
    return text if isinstance(text, str) else text.decode("utf-8")


def _cut(lines: list[Line], split: str, seed: int, splits: dict[str, list[Line]]) -> None:
    """Deals the lines out to the splits at random, by the percentages."""
    order = np.random.default_rng(seed).permutation(len(lines))
    first, second = parse_split(split)(len(lines))
    # The percentages of a few lines would leave a split empty.
    if len(lines) >= 3:
        second = min(max(second, 2), len(lines) - 1)
        first = min(max(first, 1), second - 1)
    for name, indices in zip(SPLITS, np.split(order, [first, second]), strict=True):
        if len(indices):
            splits.setdefault(name, []).extend(lines[index] for index in sorted(indices))
