"""Probabilities of h-detach and c-detach that change while a network is trained.

Every cell tosses a coin per step with the probability in its configuration (``h_detach``, ``c_detach``). Here
this probability is a function of the number of updates: it moves linearly from its initial to its final
value. No state is kept between updates, so a run resumed from a checkpoint has the same probability.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from rhhn_fairseq.cells.config import check_fields, option
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError

KINDS = ("h_detach", "c_detach")


@dataclass(frozen=True, kw_only=True)
class DetachSchedule:
    """How the probabilities change; ``UsageError`` names the invalid option of the command line.

    Attributes:
        detach_anneal_updates: number of updates that the change takes; None if there is none.
        detach_until: update from which on nothing is detached; None for never.
    """

    h_detach_final: float | None = option(None, help="final value for h-detach", low=0, high=1)
    c_detach_final: float | None = option(None, help="the same for c-detach", low=0, high=1)
    detach_anneal_updates: int | None = option(None, help="updates until the final values", low=1)
    detach_until: int | None = option(None, help="update from which nothing is detached", low=1)

    def __post_init__(self):
        check_fields(self, flags=True)
        finals = [kind for kind in KINDS if self.final(kind) is not None]
        if finals and self.detach_anneal_updates is None:
            raise UsageError(f"{_flag(finals[0])}-final needs --detach-anneal-updates N")
        if self.detach_anneal_updates is not None and not finals:
            raise UsageError("--detach-anneal-updates needs --h-detach-final P or --c-detach-final P")

    def __bool__(self):
        """Whether anything changes at all."""
        return self.detach_anneal_updates is not None or self.detach_until is not None

    def final(self, kind: str) -> float | None:
        """Returns the final probability of ``h_detach`` or ``c_detach``."""
        return getattr(self, f"{kind}_final")

    def probability(self, kind: str, start: float, update: int) -> float:
        """Returns a kind's probability in the pass after ``update`` updates, if it began at ``start``."""
        if self.detach_until is not None and update >= self.detach_until:
            return 0.0
        final = self.final(kind)
        if final is None or self.detach_anneal_updates is None:
            return start
        # Rounding must not make the end differ from the final value.
        if update >= self.detach_anneal_updates:
            return final
        return start + (final - start) * update / self.detach_anneal_updates


class DetachAnnealing:
    """Applies a schedule to the cells of a model: stacked, bidirectional, and those with attention.

    A kind whose probability starts at 0 in a cell stays off there, as in the inner networks of hypernetwork
    cells, which are never detached.

    Args:
        model: holds the cells. schedule: how their probabilities change.

    Raises:
        UsageError: no cell of the model has a probability to start from.
    """

    def __init__(self, model: nn.Module, schedule: DetachSchedule):
        self.schedule = schedule
        self._cells = [(cell, cell.config) for cell in model.modules() if isinstance(cell, Cell)]
        self._starts = {}
        for kind in KINDS:
            starts = [getattr(config, kind, 0.0) for _, config in self._cells]
            self._starts[kind] = max(starts, default=0.0)
            if schedule.final(kind) is not None and not self._starts[kind]:
                raise UsageError(f"{_flag(kind)}-final {schedule.final(kind)} needs {_flag(kind)} P")
        if schedule.detach_until is not None and not any(self._starts.values()):
            raise UsageError(f"--detach-until {schedule.detach_until} needs --h-detach P or --c-detach P")

    def probabilities(self, update: int) -> dict[str, float]:
        """Returns the probabilities after ``update`` updates, for the kinds that the model started with."""
        return {
            kind: self.schedule.probability(kind, start, update)
            for kind, start in self._starts.items()
            if start
        }

    def set_update(self, update: int) -> None:
        """Sets the probabilities of every cell for the pass after ``update`` updates."""
        for cell, start in self._cells:
            changed: dict[str, Any] = {
                kind: self.schedule.probability(kind, getattr(start, kind), update)
                for kind in KINDS
                if getattr(start, kind, 0.0)
            }
            if any(getattr(cell.config, kind) != value for kind, value in changed.items()):
                cell.config = dataclasses.replace(cell.config, **changed)


def _flag(kind: str) -> str:
    return "--" + kind.replace("_", "-")
