"""Weights from and to torch.nn's layers, and the arguments and attributes of those."""

import pytest
import torch
from torch import nn

import rhhn_fairseq.nn as layers
from rhhn_fairseq.cells import CELLS, cell_options
from rhhn_fairseq.errors import UsageError

C, H, T, B = 4, 6, 5, 3
KINDS = [
    ("LSTM", nn.LSTM, {}),
    ("LSTM", nn.LSTM, {"proj_size": 2}),
    ("GRU", nn.GRU, {}),
    ("Elman", nn.RNN, {}),
]
kinds = pytest.mark.parametrize("name, torchs, options", KINDS)


def _x():
    return torch.randn(T, B, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@kinds
@pytest.mark.parametrize("bias", [True, False])
def test_weights_go_to_torch_and_come_back(name, torchs, options, bias):
    theirs = torchs(C, H, 2, bias=bias, bidirectional=True, **options, dtype=torch.float64)
    y, state = theirs(_x())
    copy = getattr(layers, name).from_torch(theirs)
    _close(copy(_x()), (y, state))
    _close(copy.to_torch()(_x()), (y, state))
    assert copy.mode == theirs.mode and copy.proj_size == theirs.proj_size and copy.bias == bias
    assert [len(weights) for weights in copy.all_weights] == [len(copy.all_weights[0])] * 4
    if not bias:
        assert all(weight.dim() == 2 for weight in copy.parameters())
    # Its constant forget bias is taken from the bias, and given back with it.
    constant = {"forget_bias": 0.0} if torchs is nn.LSTM and not bias else {}
    ours = getattr(layers, name)(C, H, 2, bias=bias, bidirectional=True, **options, **constant).double()
    model = nn.Sequential(ours)
    model.load_state_dict(nn.Sequential(theirs).state_dict())
    _close(ours(_x()), (y, state))
    _close(ours.to_torch()(_x()), (y, state))


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="without biases, torch's weights need a layer with forget_bias=0.0"):
        layers.LSTM(C, H, bias=False).load_state_dict(nn.LSTM(C, H, bias=False).state_dict())
    with pytest.raises(RuntimeError, match="bias_ih"):
        layers.GRU(C, H, bias=False).load_state_dict(nn.GRU(C, H).state_dict())
    with pytest.raises(RuntimeError, match="weight_h"):
        layers.GRU(C, H).load_state_dict({"weight_ih_l0": torch.zeros(3 * H, C)})
    for layer, reason in (
        (layers.LSTM(C, H, zoneout=0.1), "LSTM.to_torch: torch has no layer with zoneout=0.1"),
        (layers.GRU(C, H, 2, residual_from=2), "GRU.to_torch: torch has no layer with residual_from=2"),
        (layers.LNLSTM(C, H), "LNLSTM.to_torch: torch has no layer with this cell"),
    ):
        with pytest.raises(UsageError, match=reason):
            layer.to_torch()


@pytest.mark.parametrize("cell", CELLS)
def test_no_layer_trains_biases_if_there_are_none(cell, tmp_path):
    rnn = layers.layer_of(cell)(C, 12, 2, bias=False, lstm_state=False)
    left = [name for name, _ in rnn.named_parameters() if "bias" in name]
    # Without these constants, a hypernetwork would scale every product to zero.
    assert all(name.endswith(("bias_z", "bias_rank")) for name in left)
    x = torch.randn(T, B, C)
    y, _ = rnn(x)
    y.sum().backward()
    rnn.save_pretrained(tmp_path)
    assert torch.equal(layers.from_pretrained(tmp_path)(x)[0], y)
    step = getattr(layers, f"{type(rnn).__name__}Cell")(C, 12, bias=False)
    assert len(list(step.parameters())) == len(rnn.all_weights[0])
    rnn.reset_parameters()
    assert torch.isfinite(rnn(x)[0]).all()


def test_a_width_follows_the_layers(tmp_path):
    for width, expected in ((3, 1), (20, 5), (256, 64), (1000, 128)):
        for cell in CELLS:
            if "hyper_size" in cell_options(cell):
                rnn = layers.layer_of(cell)(50, width, lstm_state=False, device="meta")
                assert rnn.stack.cells[0].config.hyper_size == expected, cell
    assert layers.HyperLSTMCell(5, 20).cell.config.hyper_size == 5
    small, plain = (sum(p.numel() for p in kind(50, 20).parameters()) for kind in (layers.HyperLSTM, nn.LSTM))
    # Measured: 1.5 times; with the papers' 128 units it was twenty.
    assert small < 2 * plain
    rnn = layers.HyperRHN(C, 132, hyper_size=128, rhn_depth=1, lstm_state=False)
    rnn.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    # A directory of an earlier version did not name the cell's default.
    config.write_text(config.read_text().replace('"hyper_size": 128,', ""))
    assert torch.equal(layers.from_pretrained(tmp_path)(_x().float())[0], rnn(_x().float())[0])


def test_errors_name_the_class_that_was_written():
    with pytest.raises(UsageError, match="^LNHyperLSTM: input_size=0 is too small"):
        layers.LNHyperLSTM(0, H)
    with pytest.raises(UsageError, match="^MILSTM: hidden_size=0 is too small"):
        layers.MILSTM(C, 0)
    with pytest.raises(UsageError, match="^LNGRUCell: input_size=0 is too small"):
        layers.LNGRUCell(0, H)
    with pytest.raises(UsageError, match="^LNLSTM: mask is torch.float64 of shape"):
        layers.LNLSTM(C, H).double()(_x(), mask=_x()[..., 0])
    with pytest.raises(UsageError, match="^GRU: proj_size=2 is for LSTM"):
        layers.GRU(C, H, proj_size=2)


def test_all_may_be_dropped():
    for mask in ("step", "sequence"):
        rnn = layers.LSTM(C, H, 2, dropout=1.0, dropout_mask=mask).double()
        assert torch.equal(rnn(_x())[0], rnn(-_x())[0])
        rnn.eval()
        assert not torch.equal(rnn(_x())[0], rnn(-_x())[0])


def test_an_activation_by_torchs_name():
    torchs = nn.RNN(C, H, nonlinearity="relu")
    rnn = layers.Elman(C, H, nonlinearity="relu")
    rnn.load_state_dict(torchs.state_dict())
    x = torch.randn(T, 3, C)
    torch.testing.assert_close(rnn(x)[0], torchs(x)[0], rtol=0, atol=1e-6)
