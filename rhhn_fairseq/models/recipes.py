"""The training options of an architecture that apply unless the user gives others.

A recipe is a dictionary of fairseq's options by name, such as ``batch_size``, with the values of the
architecture's file under ``configs/``. The ``*_table.py`` files hold the recipes next to the architectures.
``rhhn_fairseq.adaptations.recipes`` applies them.
"""

from collections.abc import Mapping

Recipe = dict[str, object]


class HasRecipe:
    """A model with a recipe. Architectures are subclasses with a ``RECIPE`` of their own."""

    RECIPE: Recipe = {}

    @classmethod
    def recipe(cls, given: Mapping[str, object]) -> Recipe:
        """The recipe of the architecture. ``given`` holds the options that the user gave, by name."""
        return cls.RECIPE
