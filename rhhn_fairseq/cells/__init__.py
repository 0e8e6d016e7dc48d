"""Recurrent cells, in plain PyTorch: ``build_cell("ln_hyperlstm", 50, 1000, hyper_size=128)``."""

from rhhn_fairseq.cells import (
    grid_rhn,
    gru,
    hyper,
    hyper_lstm,
    hyper_rhn,
    hyper_rnn,
    lstm,
    minimal,
    multiplicative,
    rhn,
    rolled_hyper_rhn,
    simple,
)
from rhhn_fairseq.cells.base import Cell, detach_state, reorder_state
from rhhn_fairseq.cells.config import CellConfig, StateConfig
from rhhn_fairseq.cells.registry import CELLS, build_cell, cell_options
from rhhn_fairseq.cells.selection import set_backend

__all__ = [
    "CELLS",
    "Cell",
    "CellConfig",
    "StateConfig",
    "build_cell",
    "cell_options",
    "detach_state",
    "grid_rhn",
    "gru",
    "hyper",
    "hyper_lstm",
    "hyper_rhn",
    "hyper_rnn",
    "lstm",
    "minimal",
    "multiplicative",
    "reorder_state",
    "rhn",
    "rolled_hyper_rhn",
    "set_backend",
    "simple",
]
