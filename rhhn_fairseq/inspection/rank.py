"""How many directions the vectors span by which a hypernetwork scales weights.

The effective rank of a matrix (Roy and Vetterli 2007, definition 1) is ``exp(H(p))``, the exponential of the
entropy of its singular values divided by their sum: 1 if all rows are multiples of one row, k if there are k
equal singular values and no others.

Shapes: T symbols, K embeddings or depths, Z width of an embedding, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rhhn_fairseq.cells.hyper import Hyper
from rhhn_fairseq.cells.hyper_lstm import HyperLSTM
from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.hyper_rnn import FullHyperRNN, PracticalHyperRNN
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.tracing import CellTrace
from rhhn_fairseq.inspection.weights import hyper_states

KINDS = {"z": "embeddings z", "d": "scaling vectors d"}


def effective_rank(matrix: np.ndarray) -> float:
    """Returns the effective rank of a matrix; 0 for a zero matrix.

    Args:
        matrix: [rows, columns].
    """
    singular = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    if not singular.size or singular[0] == 0.0:
        return 0.0
    p = singular / singular.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def variation_rank(vectors: Tensor, tolerance: float = 1e-6) -> float:
    """Returns the effective rank of the differences of vectors [T, F] from their mean.

    It is 0 if the norm of the differences is at most ``tolerance`` times that of the vectors (rounding).
    """
    values = vectors.double().cpu().numpy()
    centred = values - values.mean(axis=0)
    if np.linalg.norm(centred) <= tolerance * np.linalg.norm(values):
        return 0.0
    return effective_rank(centred)


@torch.no_grad()
def hyper_vectors(step_trace: CellTrace) -> dict[str, Tensor]:
    """Returns the vectors that scaled a cell's recurrent matrices, by kind [K, T, ·]; {} if there are none.

    For the HyperLSTM and the HyperRNN these are ``z`` [gates, T, Z] and ``d`` [gates, T, H]; for the full
    HyperRNN ``z`` [1, T, Z]; for the HyperRHN ``z`` [depths, T, H], which scales directly; for the cell
    ``hyper`` ``d`` [gates, T, H], if its hypernetwork's last layer computes them.
    """
    cell = step_trace.cell
    if isinstance(cell, Hyper):
        return {} if cell.config.hyper_output == "layers" else {"d": cell.scaling_vectors(step_trace.after)}
    if isinstance(cell, HyperRHN):
        depths = torch.stack(hyper_states(step_trace))
        return {"z": torch.baddbmm(cell.z_shift().unsqueeze(1), depths, cell.weight_z)}
    late = getattr(cell.config, "hyper_state", None) == "previous"
    state = step_trace.before if late else step_trace.after
    if isinstance(cell, FullHyperRNN):
        return {"z": (state[1] @ cell.weight_zh + cell.bias_zh)[None]}
    if isinstance(cell, (HyperLSTM, PracticalHyperRNN)):
        scaling, e_TN = cell.scaling, state[2 if isinstance(cell, HyperLSTM) else 1]
        Z = scaling.weight_d.shape[1]
        columns = slice(0, scaling.gates * Z)
        z = e_TN @ scaling.weight_z[:, columns] + scaling.bias_z[columns]
        return {"z": z.unflatten(-1, (scaling.gates, Z)).transpose(0, 1), "d": scaling(e_TN)[0]}
    return {}


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


def table(ranks: Sequence[Rank]) -> str:
    """Returns a Markdown table of the ranks, one model per line."""
    kinds = sorted({kind for each in ranks for kind in each.ranks}, reverse=True)
    rows = [["run", "updates", *(f"rank of {kind}" for kind in kinds)], ["---"] * (2 + len(kinds))]
    for each in (each for members in by_run(ranks).values() for each in members):
        values = (
            f"{each.ranks[kind]:.2f} of {each.widths[kind]}" if kind in each.ranks else "" for kind in kinds
        )
        rows.append([each.run, f"{each.updates:,}", *values])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
