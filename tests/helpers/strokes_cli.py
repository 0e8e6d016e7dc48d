"""Runs rhhn prepare within the tests' process, and makes small corpora for it."""

from pathlib import Path

import numpy as np

from helpers import script_cli
from helpers.script_cli import manifest_of  # noqa: F401  (for the tests)
from rhhn_fairseq.cli.running import run as run_main

prepare = script_cli.load("prepare")


def run(*arguments) -> int:
    """The exit status of the command; without the name of a corpus, that of hershey."""
    words = list(map(str, arguments))
    return run_main(lambda: prepare.main(["hershey", *words] if words[0].startswith("-") else words))


def error_of(capsys, *arguments) -> str:
    return script_cli.error_of(run, capsys, *arguments)


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def object_array(arrays) -> np.ndarray:
    """A list of arrays as numpy.save takes it."""
    objects = np.empty(len(arrays), dtype=object)
    for index, array in enumerate(arrays):
        objects[index] = array
    return objects


def random_rows(points: int, seed: int = 0) -> np.ndarray:
    """A line in the stroke-3 format, int16 [points, 3], the first row of which is not zero."""
    rng = np.random.default_rng([seed, points])
    rows = np.concatenate([rng.integers(1, 30, (points, 2)), rng.random((points, 1)) < 0.2], axis=1)
    rows[-1, 2] = 1
    return rows.astype(np.int16)


def line_xml(strokes) -> str:
    """A line of IAM-OnDB from lists of (x, y)."""
    points = (
        "<Stroke>" + "".join(f'<Point x="{x}" y="{y}" time="0.1"/>' for x, y in stroke) + "</Stroke>"
        for stroke in strokes
    )
    return (
        '<?xml version="1.0" encoding="ISO-8859-1"?>\n<WhiteboardCaptureSession><WhiteboardDescription/>'
        f"<StrokeSet>{''.join(points)}</StrokeSet></WhiteboardCaptureSession>\n"
    )


FORMS = {"trainset": "a01-000u", "testset_v": "a01-001w", "testset_t": "a01-002x", "testset_f": "b02-003z"}


def write_iam(folder: Path) -> Path:
    """A small IAM-OnDB, unpacked: in each of the four sets one form of two lines."""
    for number, (name, form) in enumerate(FORMS.items()):
        group, page = form.split("-")[0], form[:-1]
        strokes = folder / "lineStrokes" / group / page
        texts = folder / "ascii" / group / page
        strokes.mkdir(parents=True)
        texts.mkdir(parents=True)
        for line in (1, 2):
            drawn = [[(100 + 7 * k, 50 + number + k % 3) for k in range(4)], [(150, 40), (151 + line, 60)]]
            (strokes / f"{form}-0{line}.xml").write_text(line_xml(drawn))
        text = f"OCR:\n\nBacl line\n\nCSR:\n\nfirst of {number}\nsecond of {number}\n"
        (texts / f"{form}.txt").write_text(text)
        (folder / f"{name}.txt").write_text(f"{form}\n")
    return folder
