"""What an architecture is trained with where the user says nothing.

A recipe is a dictionary of fairseq's options by name, as ``batch_size``, with the values that stand in the
architecture's file under ``configs/``. The recipes are in the ``*_table.py`` files beside the architectures;
``rhhn_fairseq.adaptations.recipes`` fills them in.
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
