"""Measures how many directions the vectors span by which a hypernetwork scales weights.

Shapes: T symbols, K embeddings or depths, Z width of an embedding, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.effective_rank import hyper_vectors, variation_rank
from rhhn_fairseq.inspection.plotting import (
    MARKERS,
    Figure,
    add_legend,
    colour_of,
    literal,
    new_figure,
    styled,
    with_thousands,
)
from rhhn_fairseq.inspection.tracing import CellTrace

KINDS = {
    "z": "embeddings z",
    "d": "scaling vectors d",
}


@dataclass(frozen=True)
class Rank:
    """Effective ranks after some number of updates of a training run.

    Attributes:
        run: its name. updates: their number. ranks: by kind, "z" or "d", means over layers, gates and depths.
        widths: by kind, the number of elements of a vector, which is the largest possible rank.
    """

    run: str
    updates: int
    ranks: dict[str, float]
    widths: dict[str, int]


def rank_of(run: str, updates: int, traces: Sequence[CellTrace]) -> Rank:
    """Returns the effective ranks of a model that has read a text.

    Raises:
        UsageError: it has no hypernetwork.
    """
    by_kind: dict[str, list] = {}
    for step_trace in traces:
        for kind, vectors in hyper_vectors(step_trace).items():
            by_kind.setdefault(kind, []).extend(vectors)
    if not by_kind:
        raise UsageError(f"{run}: has no hypernetwork, so there are no vectors to take the rank of")
    ranks = {
        kind: float(np.mean([variation_rank(each) for each in vectors])) for kind, vectors in by_kind.items()
    }
    return Rank(run, updates, ranks, {kind: vectors[0].shape[-1] for kind, vectors in by_kind.items()})


def rank_arrays(ranks: Sequence[Rank]) -> dict[str, np.ndarray]:
    """Returns the updates of each run, and its ranks by kind."""
    arrays = {}
    for run, members in by_run(ranks).items():
        arrays[f"{run}.updates"] = np.array([rank.updates for rank in members])
        # Checkpoints of different networks in one directory have different vectors.
        for kind in dict.fromkeys(kind for rank in members for kind in rank.ranks):
            arrays[f"{run}.{kind}"] = np.array([rank.ranks.get(kind, np.nan) for rank in members])
    return arrays


def by_run(ranks: Sequence[Rank]) -> Mapping[str, list[Rank]]:
    """Returns the ranks of each run, sorted by updates."""
    runs: dict[str, list[Rank]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.updates):
        runs.setdefault(rank.run, []).append(rank)
    return {run: runs[run] for run in dict.fromkeys(rank.run for rank in ranks)}


@styled()
def draw_ranks(ranks: Sequence[Rank], title: str | None = None) -> Figure:
    """Draws the effective ranks over the updates of training, with one panel for z and one for d."""
    kinds = [kind for kind in KINDS if any(kind in rank.ranks for rank in ranks)]
    figure = new_figure(4.2)
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for number, (run, members) in enumerate(by_run(ranks).items()):
            drawn = [rank for rank in members if kind in rank.ranks]
            axes.plot(
                [rank.updates for rank in drawn],
                [rank.ranks[kind] for rank in drawn],
                color=colour_of(number),
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                label=literal(run),
            )
        widths = sorted({rank.widths[kind] for rank in ranks if kind in rank.widths})
        axes.set_title(f"{KINDS[kind]} ({', '.join(map(str, widths))} elements)", fontsize=10.5)
        highest = max(rank.ranks[kind] for rank in ranks if kind in rank.ranks)
        axes.set_ylim(0.0, 1.05 * (highest or 1.0))
        axes.set_xlabel("updates")
        with_thousands(axes.xaxis)
    panels[0].set_ylabel("effective rank of what changes")
    figure.suptitle(
        literal(title or "Directions in which a hypernetwork moves"), fontsize=12, fontweight="bold"
    )
    add_legend(figure, panels[0])
    return figure
