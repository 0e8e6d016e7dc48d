"""Recurrent layers for anybody's own loop: HyperLSTM and its relatives, called as torch.nn.LSTM is.

They need torch and numpy only. ``docs/layers.md`` says what they support beyond a plain call.
"""

from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.nn.layers import (
    GRU,
    IRNN,
    LNLSTM,
    LSTM,
    MILSTM,
    MLSTM,
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
    RolledHyperRHN,
    layer_of,
)
from rhhn_fairseq.nn.pretrained import from_pretrained, save_pretrained
from rhhn_fairseq.nn.quantising import quantize_dynamic
from rhhn_fairseq.nn.recurrent import RecurrentLayer

__all__ = [
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
    "LNHyperLSTM",
    "MinGRU",
    "MinLSTM",
    "RecurrentLayer",
    "from_pretrained",
    "layer_of",
    "quantize_dynamic",
    "save_pretrained",
    "set_backend",
]
