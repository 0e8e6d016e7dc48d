"""Recurrent layers for your own training loop: HyperLSTM and its relatives, called like torch.nn.LSTM.

The character and stroke networks are here too, for loading and use without fairseq. All need only torch and
numpy. ``docs/layers.md`` says what they support beyond a plain call.
"""

from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.nn.character import CharacterNetwork
from rhhn_fairseq.nn.exporting import export_onnx
from rhhn_fairseq.nn.layers import (
    GRU,
    IRNN,
    LNGRU,
    LNLSTM,
    LSTM,
    MILSTM,
    MLSTM,
    NAS,
    RHN,
    Elman,
    GridRHN,
    Hyper,
    HyperLSTM,
    HyperRHN,
    HyperRNN,
    Jordan,
    LNHyperLSTM,
    MinGRU,
    MinLSTM,
    MogrifierLSTM,
    ProjectedLSTM,
    RolledHyperRHN,
    layer_of,
)
from rhhn_fairseq.nn.quantising import quantize_dynamic
from rhhn_fairseq.nn.recurrent import RecurrentLayer
from rhhn_fairseq.nn.states import detach_state, join_directions, reorder_state, select_state
from rhhn_fairseq.nn.steps import STEP_CELLS, StepCell, safe_globals
from rhhn_fairseq.nn.strokes import StrokeNetwork
from rhhn_fairseq.saving import from_pretrained, packaged, save_pretrained

__all__ = [
    "CharacterNetwork",
    "GRU",
    "GridRHN",
    "IRNN",
    "LNLSTM",
    "LSTM",
    "MILSTM",
    "MLSTM",
    "RHN",
    "RolledHyperRHN",
    "Elman",
    "Hyper",
    "HyperLSTM",
    "HyperRHN",
    "HyperRNN",
    "Jordan",
    "LNGRU",
    "LNHyperLSTM",
    "MinGRU",
    "MinLSTM",
    "MogrifierLSTM",
    "NAS",
    "ProjectedLSTM",
    "RecurrentLayer",
    "StepCell",
    "StrokeNetwork",
    "detach_state",
    "export_onnx",
    "from_pretrained",
    "join_directions",
    "layer_of",
    "packaged",
    "quantize_dynamic",
    "reorder_state",
    "safe_globals",
    "save_pretrained",
    "select_state",
    "set_backend",
]

globals().update(STEP_CELLS)
__all__ += list(STEP_CELLS)
