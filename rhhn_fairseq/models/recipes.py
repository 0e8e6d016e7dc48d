"""An architecture of a table, and the training options that apply unless the user gives others.

A recipe is a dictionary of fairseq's options by name, such as ``batch_size``. The ``*_table.py`` files hold
the recipes next to the architectures.
``rhhn_fairseq.compat.recipes`` applies them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Recipe = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of a table.

    Attributes:
        options: what differs from the model's defaults.
        parameters: the exact count for the vocabulary or the problem.
        vocab_size: entries of its vocabulary; None for a model that reads numbers.
        problem: the ``--problem`` that it is for, of a model of synthetic problems.
        source: paper and table, or the page with its training here; None if it is in neither.
        printed: the count as the paper prints it. valid, test: the paper's scores.
        figures: what the source reports, in words.
    """

    options: dict
    parameters: int
    vocab_size: int | None = None
    problem: str | None = None
    source: str | None = None
    printed: str | None = None
    valid: float | None = None
    test: float | None = None
    figures: str | None = None

    def reported(self) -> str | None:
        """Returns in one line what the source reports for it; None without a source."""
        if self.source is None:
            return None
        size = self.printed
        if size and self.vocab_size:
            size = f"{size} with {self.vocab_size:,} symbols"
        return f"{'; '.join(filter(None, (size, self.figures))) or 'no figures'} ({self.source})"


class HasRecipe:
    """A model with a ``stack`` and a recipe. Architectures are subclasses with a ``RECIPE`` of their own."""

    RECIPE: Recipe = {}

    @classmethod
    def recipe(cls, given: Mapping[str, object]) -> Recipe:
        """The recipe of the architecture. ``given`` holds the options that the user gave, by name."""
        return cls.RECIPE

    def diagnostics(self) -> dict[str, float]:
        """Returns figures about the weights for the log."""
        return self.stack.diagnostics()
