"""Renders the changes of the weights over a text as one self-contained HTML file."""

import html
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rhhn_fairseq.inspection.colours import QUANTITY, colour_limit
from rhhn_fairseq.inspection.weights import Reading

TEMPLATE = Path(__file__).with_name("weights.html")


def weight_page(reading: Reading, title: str) -> str:
    """Returns the page: the text with a strip for each matrix, and the numbers of each symbol.

    Args:
        title: of the page, in plain text.
    """
    data = {
        "symbols": reading.symbols,
        "names": reading.names,
        "limit": colour_limit(reading.changes),
        "colours": QUANTITY,
        "changes": _rounded(reading.changes),
        "probabilities": _rounded(reading.probabilities),
        "candidates": reading.candidates,
        "expected": _rounded(reading.expected),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("__TITLE__", html.escape(title)).replace("__DATA__", embedded(data))


def embedded(data: Mapping) -> str:
    """Returns data as JSON for an element of a page; nothing in it can close the element."""
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(array: np.ndarray) -> list:
    """Returns the numbers with five significant digits; a page shows three."""
    return json.loads(json.dumps(array.tolist()), parse_float=lambda text: float(f"{float(text):.5g}"))
