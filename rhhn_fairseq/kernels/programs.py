"""The whole-sequence program of each cell that has one."""

from rhhn_fairseq.cells.hyper_lstm import HyperLSTM
from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.lstm import LSTM
from rhhn_fairseq.cells.rhn import RHN, RHNTrace
from rhhn_fairseq.kernels.gated import scan_lstm
from rhhn_fairseq.kernels.highway import scan_rhn
from rhhn_fairseq.kernels.hyper_gated import scan_hyper_lstm

PROGRAMS = {
    LSTM: scan_lstm,
    HyperLSTM: scan_hyper_lstm,
    RHN: scan_rhn,
    RHNTrace: scan_rhn,
    HyperRHN: scan_rhn,
}
"""By the cell's own class: a class derived from it may have another ``step``."""
