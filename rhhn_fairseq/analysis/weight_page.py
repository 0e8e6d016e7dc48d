"""The weights' changes over a text as one HTML file that loads nothing else."""

import html
import json
from pathlib import Path

import numpy as np

from rhhn_fairseq.analysis.colours import QUANTITY
from rhhn_fairseq.analysis.weights import Reading

TEMPLATE = Path(__file__).with_name("weights.html")
PERCENTILE = 98.0


def weight_page(reading: Reading, title: str) -> str:
    """The page: the text with a strip for each matrix, and for each symbol its numbers.

    Args:
        title: of the page, in plain text.
    """
    limit = float(np.percentile(reading.changes, PERCENTILE)) or float(reading.changes.max()) or 1.0
    data = {
        "symbols": reading.symbols,
        "names": reading.names,
        "limit": limit,
        "colours": QUANTITY,
        "changes": _rounded(reading.changes),
        "probabilities": _rounded(reading.probabilities),
        "candidates": reading.candidates,
        "expected": _rounded(reading.expected),
    }
    # No symbol of the text may end the element that it stands in.
    encoded = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("__TITLE__", html.escape(title)).replace("__DATA__", encoded)


def _rounded(array: np.ndarray) -> list:
    """The numbers with five digits; a page shows three."""
    return json.loads(json.dumps(array.tolist()), parse_float=lambda text: float(f"{float(text):.5g}"))
