"""What is drawn in a picture of handwriting."""

from xml.etree import ElementTree

import numpy as np

SVG = "{http://www.w3.org/2000/svg}"


def svg_lines(path):
    """The strokes of a picture as lists of points (x, y), by colour; curves are joined where they meet."""
    strokes = {}
    for element in ElementTree.parse(path).getroot().iter(f"{SVG}path"):
        style = element.get("style") or ""
        if "fill: none" in style and "stroke-linecap: round" in style:
            colour = style.split("stroke: ")[1].split(";")[0]
            numbers = [n for n in element.get("d").split() if n not in ("M", "C")]
            start, *_, end = np.array(numbers, dtype=np.float64).reshape(-1, 2)
            own = strokes.setdefault(colour, [])
            if not own or (own[-1][-1] != start).any():
                own.append([start])
            own[-1].append(end)
    return {colour: [np.array(stroke) for stroke in own] for colour, own in strokes.items()}
