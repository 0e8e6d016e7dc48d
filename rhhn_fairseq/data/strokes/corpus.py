"""The lines of a corpus of handwriting, as every reader returns them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rhhn_fairseq.data.strokes.points import Line


@dataclass
class Loaded:
    """The lines of a corpus.

    Attributes:
        splits: the lines by the name of their split: train, valid, perhaps valid1, perhaps test.
        inputs: for each file or folder that was read its name, size in bytes and SHA-256.
        notes: what users should know, as counts by a short description.
    """

    splits: dict[str, list[Line]]
    inputs: list[dict] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StrokeCorpus:
    """A corpus to prepare.

    Attributes:
        name: which kind it is. variant: the corpus in words.
        options: what determines the result besides the input and the cleaning; recorded in the manifest.
        load: reads it all; raises UsageError for input that cannot be read.
    """

    name: str
    variant: str
    options: dict
    load: Callable[[], Loaded]
