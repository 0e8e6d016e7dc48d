"""The effective rank of the vectors by which a hypernetwork scales weights, and those vectors.

The effective rank of a matrix (Roy and Vetterli 2007, definition 1) is ``exp(H(p))``, the exponential of the
entropy of its singular values divided by their sum: 1 if all rows are multiples of one row, k if there are k
equal singular values and no others.

Shapes: T symbols, K embeddings or depths, Z width of an embedding, H hidden.
"""

import numpy as np
import torch
from torch import Tensor

from rhhn_fairseq.cells.hyper import Hyper
from rhhn_fairseq.cells.hyper_lstm import HyperLSTM
from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.hyper_rnn import FullHyperRNN, PracticalHyperRNN
from rhhn_fairseq.inspection.tracing import CellTrace
from rhhn_fairseq.inspection.weights import hyper_states


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
