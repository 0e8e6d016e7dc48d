"""The tables of the papers: their rows, what each reports, and how a row is trained and scored here.

``tables.json`` holds them, with the source of each. Sizes and recipes are those of the architectures in
``rhhn_fairseq.models``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rhhn_fairseq.errors import UsageError


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
    subsets: tuple[str, ...] = ("valid", "test")
    protocols: tuple[str, ...] = ("",)
    decimals: int = 3
    options: Mapping[str, object] = field(default_factory=dict)

    def figures(self) -> list[tuple[str, str, str]]:
        """Returns the name, subset and protocol of every figure that a finished run has."""
        return [
            (" ".join(filter(None, (subset, self.metric, protocol))), subset, protocol)
            for subset in self.subsets
            for protocol in self.protocols
        ]


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
        """Returns the row of this name.

        Raises:
            UsageError: the table has no such row.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise UsageError(f"{self.name} has no row {name}, it has {', '.join(row.name for row in self.rows)}")


def _read() -> dict[str, Table]:
    tables = {}
    for values in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")):
        lists = {name: tuple(value) for name, value in values["scoring"].items() if isinstance(value, list)}
        scoring = Scoring(**values.pop("scoring") | lists)
        rows = tuple(Row(**row) for row in values.pop("rows"))
        tables[values["name"]] = Table(scoring=scoring, rows=rows, **values)
    return tables


TABLES = _read()
