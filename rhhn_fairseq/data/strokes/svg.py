"""Drawings in SVG, as other programs draw them: every path is a stroke, or several."""

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from rhhn_fairseq.data.strokes.arrays import LARGEST
from rhhn_fairseq.data.strokes.points import from_strokes
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import read_regular

STEPS_OF_A_HEIGHT = 24
"""Longer steps are divided, so that curves are drawn as such; the Hershey corpus has steps of this size."""
MOST_POINTS = 100_000


def read_svg(file: Path) -> np.ndarray:
    """Returns the points [N, 3] of the outlines of a drawing, in its order, as ``from_strokes`` gives them.

    Transformations are applied. Fills, texts, images and what is hidden are left out: where a shape has a
    stroke, those without one are fills.

    Raises:
        UsageError: the file is no SVG, has no outline, or repeats parts by <use>, which may multiply without
            bound.
    """
    with needed_for(f"{file} needs"):
        from svgelements import SVG, Move, Shape
        from svgelements import Path as Outline

    content = read_regular(file, LARGEST)
    # By the parser, since a prefix, another encoding or an entity may hide the name from a search.
    if any(
        element.tag.rpartition("}")[2] == "use" for _, element in ElementTree.iterparse(io.BytesIO(content))
    ):
        raise UsageError(f"{file}: has <use> elements; save it as plain SVG without clones")
    shapes = [shape for shape in SVG.parse(io.BytesIO(content)).elements() if isinstance(shape, Shape)]
    shapes = [shape for shape in shapes if shape.values.get("visibility") != "hidden"]
    stroked = [shape for shape in shapes if shape.stroke is not None and shape.stroke.value is not None]
    # Only ``abs`` applies a rotation to the points of a rectangle or circle.
    outlines = [Outline(part) for shape in stroked or shapes for part in abs(Outline(shape)).as_subpaths()]
    sides = np.array([box[1::2] for box in (outline.bbox() for outline in outlines) if box])
    longest = (float(np.ptp(sides)) if len(sides) else 0.0) / STEPS_OF_A_HEIGHT or 1.0
    strokes = []
    for outline in outlines:
        segments = [segment for segment in outline if not isinstance(segment, Move)]
        stroke = [segment.start for segment in segments[:1]]
        for segment in segments:
            count = max(1, int(np.ceil(segment.length(error=1e-3) / longest)))
            if len(stroke) + count > MOST_POINTS:
                raise UsageError(f"{file}: a path has more than {MOST_POINTS:,} points")
            stroke += [segment.point(step / count) for step in range(1, count + 1)]
        strokes.append([(point.x, point.y) for point in stroke])
    return from_strokes(strokes, str(file))
