"""Recurrent cells, in plain PyTorch: ``build_cell("ln_hyperlstm", 50, 1000, hyper_size=128)``."""

from rhhn_fairseq.cells import (
    grid_rhn,
    gru,
    hyper,
    hyper_lstm,
    hyper_rhn,
    hyper_rnn,
    ln_gru,
    lstm,
    minimal,
    mogrifier,
    multiplicative,
    nas,
    projected,
    rhn,
    rolled_hyper_rhn,
    simple,
)
from rhhn_fairseq.cells.config import CellConfig, StateConfig, option
from rhhn_fairseq.cells.contract import glorot_, orthogonal_
from rhhn_fairseq.cells.hooks import take_scaling
from rhhn_fairseq.cells.registry import CELLS, build_cell, cell_options, register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.ops.loop import detach_state, noise_at, reorder_state

__all__ = [
    "CELLS",
    "Cell",
    "CellConfig",
    "StateConfig",
    "build_cell",
    "cell_options",
    "detach_state",
    "glorot_",
    "grid_rhn",
    "gru",
    "hyper",
    "hyper_lstm",
    "hyper_rhn",
    "hyper_rnn",
    "ln_gru",
    "lstm",
    "minimal",
    "mogrifier",
    "multiplicative",
    "nas",
    "projected",
    "noise_at",
    "option",
    "orthogonal_",
    "register_cell",
    "reorder_state",
    "rhn",
    "rolled_hyper_rhn",
    "set_backend",
    "simple",
    "take_scaling",
]
