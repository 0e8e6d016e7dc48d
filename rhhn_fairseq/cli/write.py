"""Samples handwriting from a trained model and saves it as SVG and PNG.

Usage: %(prog)s checkpoints/handwriting/checkpoint_best.pt --lines 3 --output written
       %(prog)s --pretrained --text "hello world" --bias 1
       %(prog)s --pretrained kanji --lines 24 --points 40 --columns 8 --bias 0.5

A model trained with --window writes the text of --text. --prime lets a model read a line first and continue
in its hand. The colour of the strokes shows how much the weights of a main network changed at each step; the
strips under them show it for each matrix.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

if TYPE_CHECKING:
    from rhhn_fairseq.data.strokes.points import Line


def main(argv=None) -> None:
    args = parse_arguments(argv)
    if (args.pretrained is None) == (args.checkpoint is None):
        raise UsageError("give either a checkpoint or --pretrained")
    if args.prime is None and (args.prime_text is not None or args.prime_points is not None):
        raise UsageError("--prime-text and --prime-points need the line to read: give --prime")
    if args.prime is None and args.data is not None:
        raise UsageError("--data describes the line to read: give --prime")
    if args.y_up and not str(args.prime).endswith(".npy"):
        raise UsageError("--y-up describes a .npy file to read: give it as --prime")

    from rhhn_fairseq.generate.picture import MOST_COLUMNS, draw, output_paths
    from rhhn_fairseq.generate.strokes import WritingConfig, stroke_changes, write
    from rhhn_fairseq.saving import packaged

    config = WritingConfig(args.lines, args.points, args.bias, args.temperature, args.seed)
    if not 1 <= args.columns <= MOST_COLUMNS:
        raise UsageError(f"--columns {args.columns}: choose from 1 to {MOST_COLUMNS}")
    paths = output_paths(args.output, [args.prime])
    model, data = load(args.checkpoint or packaged(args.pretrained))
    prime = None
    if args.prime is not None:
        prime = read_prime(args.prime, args.data or data, args.prime_text, args.prime_points, args.y_up)
    lines = write(model, config, args.text, prime)
    draw(lines, paths, changes=not args.no_changes, columns=args.columns)
    for path in paths:
        print(f"written: {path}")
    if not args.no_changes and (changes := stroke_changes(lines)) is not None:
        print(
            "the weights change by {:.3g} in a step within strokes, {:.3g} where one ends, "
            "{:.3g} where the next begins".format(*changes)
        )
    for line in lines:
        if not line.finished:
            print(f"not finished within --points: {line.text!r}", file=sys.stderr)


def load(checkpoint: str | Path):
    """Loads the model, and its training's data directory if that is known."""
    if os.path.isdir(checkpoint):
        from rhhn_fairseq.nn import StrokeNetwork

        return StrokeNetwork.from_pretrained(checkpoint), None

    # fairseq is imported only for its own checkpoints.
    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import load_handwriting

    return load_handwriting(checkpoint)


def read_prime(
    place: str, data: str | None, text: str | None = None, points: int | None = None, y_up: bool = False
) -> Line:
    """Returns a line of handwriting in the corpus's units.

    Args:
        place: ``SPLIT:NUMBER`` of a prepared directory, counted from 0, or a ``.npy`` or ``.svg`` file, which
            is read and scaled as that directory's corpus was.
        data: that directory; None, or one that is gone, takes a file as it is.
        text: what is written there, None for the recorded text, if any.
        points: how many of its first points to take, None for all.
        y_up: whether y grows upwards in a ``.npy`` file; it does where the directory was prepared so.

    Raises:
        UsageError: there is no such line, or it cannot be read.
    """
    from rhhn_fairseq.data.strokes.cleaning import CleaningConfig, clean
    from rhhn_fairseq.data.strokes.points import Line
    from rhhn_fairseq.data.strokes.store import STROKES, StrokeSplit
    from rhhn_fairseq.data.strokes.stroke3 import read_line

    match = re.fullmatch(r"(\w+):(\d+)", place)
    if match is None:
        if not os.path.exists(place):
            raise UsageError(
                f"--prime {place}: no such file; name a .npy or .svg file, or a line as SPLIT:NUMBER"
            )
        manifest = None if data is None else STROKES.read(data)
        request = manifest["request"] if manifest else {"options": {}, "cleaning": {}}
        options = request["options"]
        y_up = y_up or options.get("y_up", False)
        line = read_line(Path(place), options.get("first_row", "drawn"), y_up)
        if manifest:
            config = CleaningConfig(**request["cleaning"] | {"min_points": 2, "max_points": 0})
            cleaned, _ = clean(line, config)
            if isinstance(cleaned, str):
                raise UsageError(f"--prime {place}: is too {cleaned} to be scaled as the lines of {data}")
            line = dataclasses.replace(line, points=cleaned)
    else:
        if data is None:
            raise UsageError(f"--prime {place}: name the data directory with --data")
        split, number = StrokeSplit(data, match[1]), int(match[2])
        if number >= len(split):
            raise UsageError(
                f"--prime {place}: the {match[1]} split of {data} has lines 0 to {len(split) - 1}"
            )
        line = Line(split.names[number], split.points(number), split.texts[number] or None)
    if points is not None:
        if not 1 <= points <= len(line.points):
            raise UsageError(f"--prime-points {points}: the line has {len(line.points)} points")
        whole = line.text if points == len(line.points) else None
        line = dataclasses.replace(line, points=line.points[:points], text=whole)
    return line if text is None else dataclasses.replace(line, text=text)


def parse_arguments(argv):
    parser = make_parser("write", __doc__)
    add = parser.add_argument
    add("checkpoint", nargs="?", help="checkpoint of a handwriting model, or a directory of `rhhn convert`")
    add(
        "--pretrained",
        nargs="?",
        const="handwriting",
        choices=["handwriting", "kanji"],
        help="use the packaged model of Hershey fonts, or that of Kanji, which are drawn without a text",
    )
    add(
        "--output",
        default="written",
        metavar="NAME",
        help="write NAME.svg and NAME.png, or one file if NAME ends in .svg or .png",
    )
    add("--text", action="append", default=[], metavar="TEXT", help="text to write; may be repeated")
    add("--lines", type=int, default=1, help="lines to write for each text (default: %(default)s)")
    add(
        "--points",
        type=int,
        help="points per line; with a text the maximum (default: 400; by the text's length)",
    )
    add("--bias", type=float, default=0.0, help="0 is the model's own hand, larger is tidier (default: 0)")
    add("--temperature", type=float, default=1.0, help="below 1 is tidier (default: 1)")
    add("--seed", type=int, default=1, help="seed of the random numbers (default: %(default)s)")
    add(
        "--prime",
        metavar="LINE",
        help="a line to read first: SPLIT:NUMBER of the data, or a .npy or .svg file",
    )
    add("--prime-text", metavar="TEXT", help="text of the primed line (default: from the data)")
    add("--prime-points", type=int, metavar="N", help="read only the first N points of the primed line")
    add("--y-up", action="store_true", help="y grows upwards in a .npy file (default: as in the data)")
    add("--data", metavar="DIR", help="data directory of --prime (default: that of the training)")
    add("--columns", type=int, default=1, help="lines side by side in the picture (default: %(default)s)")
    add("--no-changes", action="store_true", help="do not draw how the weights change")
    return parser.parse_args(argv)
