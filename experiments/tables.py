"""The tables of the papers: their rows, what each reports, and how a row is trained and scored here.

``tables.json`` holds them, with their sources. Sizes and recipes are those of the architectures.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json


@dataclass(frozen=True)
class Scoring:
    """How the models of a table are evaluated.

    Attributes:
        program: ``eval_lm``, ``validate`` or ``generate``.
        metric: the name of a figure, as in fairseq's log. unit: what it is measured in.
        subsets: the splits that are scored. protocols: of a language model, else one empty string.
        decimals: how many are shown. options: of the program.
    """

    program: str
    metric: str
    unit: str
    subsets: Sequence[str] = ("valid", "test")
    protocols: Sequence[str] = ("",)
    decimals: int = 3
    options: Mapping[str, object] = field(default_factory=dict)

    def figures(self) -> list[tuple[str, str, str]]:
        """Returns the name, subset and protocol of every figure that a finished run has."""
        pairs = itertools.product(self.subsets, self.protocols)
        return [(f"{part} {self.metric} {protocol}".rstrip(), part, protocol) for part, protocol in pairs]


@dataclass(frozen=True)
class Row:
    """One system of a table.

    Attributes:
        name: unique in its table. arch: its architecture.
        parameters: the architecture's trained parameters at the paper's vocabulary.
        reported: the paper's figures, by the names of ``Scoring.figures``.
        options: options of fairseq-train that differ from the architecture's recipe.
        epochs, updates: what the paper trained for, where it says so. Where both are given, the share of the
            paper's budget is that of the updates.
    """

    name: str
    arch: str
    parameters: int
    reported: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    epochs: int | None = None
    updates: int | None = None


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        title: what it is, with its source. corpus: a name of ``corpora.CORPORA``.
        notes: what a reader needs to know to compare the figures. sources: where rows and budgets are from.
    """

    name: str
    title: str
    corpus: str
    scoring: Scoring
    rows: tuple[Row, ...]
    notes: str = ""
    sources: str = ""

    def row(self, name: str) -> Row:
        """Returns the row of this name. Raises UsageError if the table has no such row."""
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise UsageError(f"{self.name} has no row {name}, it has {', '.join(rows)}")
        return rows[name]


def _read(values: dict) -> Table:
    rows = tuple(Row(**row) for row in values["rows"])
    return Table(**values | {"scoring": Scoring(**values["scoring"]), "rows": rows})


TABLES = {values["name"]: _read(values) for values in read_json(Path(__file__).with_suffix(".json"))}
