"""States of layers, and what layers do as torch's where scripts rely on it."""

import warnings

import pytest
import torch
from torch import nn

import rhhn_fairseq.nn as layers
from rhhn_fairseq.cells import take_scaling
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.nn.states import split_entries
from rhhn_fairseq.ops import backends
from rhhn_fairseq.ops.backends import lengths as graph_lengths

C, H, T, B = 4, 6, 5, 3


def test_helpers_of_states():
    rnn = layers.HyperLSTM(C, H, 2, hyper_size=3)
    x, zeros = torch.randn(T, B, C), rnn.zero_state(B)
    y, state = rnn(x)
    assert torch.equal(rnn(x, zeros)[0], y) and [entry.shape[0] for entry in zeros] == [2] * 4
    assert not any(entry.requires_grad for entry in layers.detach_state(state))
    index = torch.tensor([2, 0, 0])
    again = rnn(x[:, index], layers.reorder_state(state, index))[0]
    torch.testing.assert_close(again, rnn(x, state)[0][:, index])
    done = torch.tensor([True, False, False])
    mixed = layers.select_state(zeros, done, state)
    torch.testing.assert_close(rnn(x, mixed)[0][:, 0], y[:, 0])
    torch.testing.assert_close(rnn(x, mixed)[0][:, 1:], rnn(x, state)[0][:, 1:])


def _own_form(rnn, state):
    """The state with all its entries, from that of a layer in either form."""
    if not rnn.lstm_state or len(rnn.state_sizes) == 1:
        return state[0] if isinstance(state, tuple) and len(rnn.state_sizes) == 1 else state
    return (state[0], *split_entries(state[1], rnn.state_sizes[1:]))


@pytest.mark.parametrize("pair", [False, True])
def test_joined_directions_start_a_decoder(pair):
    for kind, size in ((layers.HyperLSTM, 3), (layers.HyperLSTM, 4), (layers.HyperRHN, 4), (layers.GRU, 0)):
        sizes = {"hyper_size": size} if size else {}
        encoder = kind(C, H, 2, bidirectional=True, lstm_state=pair, **sizes)
        decoder = kind(C, 2 * H, 2, lstm_state=pair, **dict.fromkeys(sizes, 2 * size))
        y, state = encoder(torch.randn(T, B, C))
        joined = layers.join_directions(state)
        h = joined if isinstance(joined, torch.Tensor) else joined[0]
        assert torch.equal(h[-1], torch.cat((y[-1, :, :H], y[0, :, H:]), dim=-1))
        x, entries = torch.randn(T, B, C), layers.join_directions(_own_form(encoder, state))
        decoder.lstm_state = False
        expected = decoder(x, entries)[0]
        decoder.lstm_state = pair
        assert torch.equal(decoder(x, joined)[0], expected)


def test_dropout_may_be_changed(tmp_path):
    rnn, x = layers.LSTM(C, H, 2), torch.randn(T, B, C)
    rnn.dropout = 0.5
    assert not torch.equal(rnn(x)[0], rnn(x)[0]) and "dropout=0.5" in repr(rnn)
    rnn.save_pretrained(tmp_path)
    assert layers.from_pretrained(tmp_path).dropout == 0.5
    rnn.dropout = 0.0
    assert torch.equal(rnn(x)[0], rnn(x)[0])
    with pytest.raises(UsageError, match="layer_dropout=-1"):
        rnn.dropout = -1


def test_a_state_without_its_last_entries_is_noticed():
    rnn, x = layers.HyperLSTM(C, H, hyper_size=3), torch.randn(T, B, C)
    with pytest.warns(UserWarning, match="HyperLSTM: the state has 2 of 4 entries.*lstm_state=True"):
        rnn(x, rnn(x)[1][:2])


def test_an_empty_batch_has_an_empty_output():
    for first in (False, True):
        shape = (0, T, C) if first else (T, 0, C)
        options = dict(num_layers=2, bidirectional=True, batch_first=first)
        (y, (h, c)), (y_torch, (h_torch, _)) = (
            module(C, H, **options)(torch.zeros(shape)) for module in (layers.LSTM, nn.LSTM)
        )
        y.sum().backward()
        assert y.shape == y_torch.shape and h.shape == c.shape == h_torch.shape
        assert h.requires_grad and c.requires_grad
    layers.MogrifierLSTM(C, H)(torch.zeros(T, 0, C))[0].sum().backward()


def test_errors_are_of_the_classes_that_torchs_layers_raise():
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="LSTM: num_layers=0 is not a whole number of 1 or more"):
            layers.LSTM(C, H, num_layers=0)


def test_a_learned_state_starts_calls_without_one(tmp_path):
    rnn = layers.HyperLSTM(C, H, 2, bidirectional=True, hyper_size=3, initial_state="learned")
    x, plain = torch.randn(T, B, C), layers.HyperLSTM(C, H, 2, bidirectional=True, hyper_size=3)
    with torch.no_grad():
        for weight in rnn.stack.parameters():
            weight += 0.2 * torch.randn_like(weight)
    plain.stack.load_state_dict(rnn.stack.state_dict())
    assert torch.equal(rnn(x)[0], plain(x)[0])
    with torch.no_grad():
        for entry in rnn.learned_state:
            entry.normal_()
    start = tuple(entry.expand(-1, B, -1) for entry in rnn.learned_state)
    y = rnn(x)[0]
    assert torch.equal(y, plain(x, start)[0])
    y.square().sum().backward()
    assert all((entry.grad != 0).any() for entry in rnn.learned_state)
    rnn.save_pretrained(tmp_path)
    assert torch.equal(layers.from_pretrained(tmp_path)(x)[0], y)
    one = layers.LSTM(C, H, initial_state="learned")
    with pytest.raises(UsageError, match="LSTM: resets are not possible with initial_state='learned'"):
        one(x, resets=torch.zeros(T, B, dtype=torch.bool))


def test_a_pair_that_is_no_h_and_c_is_noticed():
    with pytest.warns(UserWarning, match=r"HyperRHN: the state is \(s, e\), no \(h, c\).*lstm_state=True"):
        layers.HyperRHN(C, H)
    with pytest.warns(UserWarning, match=r"Hyper: the state is \(h, hyper_h\), no \(h, c\)"):
        layers.Hyper(C, H, main_cell="gru", hyper_cell="gru")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What is neither a pair nor another one's, and what somebody has asked for.
        for kind in (layers.LSTM, layers.HyperLSTM, layers.RHN, layers.NAS):
            kind(C, H)
        for pair in (False, True):
            assert layers.HyperRHN(C, H, lstm_state=pair).lstm_state is pair


STACK = dict(
    residual_from=2,
    input_dropout=0.1,
    output_dropout=0.2,
    weight_drop=0.3,
    dropout_mask="sequence",
    dropout=0.4,
)


def test_layers_have_the_options_of_stacks(tmp_path):
    rnn, x = layers.GRU(C, H, 3, **STACK), torch.randn(T, B, C)
    config = StackConfig(
        cell="gru",
        input_size=C,
        hidden_size=H,
        layers=3,
        layer_dropout=STACK["dropout"],
        **{name: value for name, value in STACK.items() if name != "dropout"},
    )
    stack = Stack(config)
    stack.load_state_dict(rnn.stack.state_dict())
    for _ in range(2):
        outputs = []
        for run in (lambda: rnn(x)[0], lambda: stack(x)[0]):
            torch.manual_seed(3)
            outputs.append(run())
        assert torch.equal(*outputs)
        for module in (rnn, stack):
            module.eval()
    assert all(f"{name}={value!r}" in repr(rnn) for name, value in STACK.items())
    rnn.save_pretrained(tmp_path)
    again = layers.from_pretrained(tmp_path)
    assert repr(again) == repr(rnn) and torch.equal(again(x)[0], rnn(x)[0])
    with pytest.raises(UsageError, match="^GRU: residual_from=1, but layer 1 reads a width of 4 and gives 6"):
        layers.GRU(C, H, residual_from=1)


@pytest.mark.parametrize("cell", ["ln_hyperlstm", "hyperrhn"])
def test_the_scaling_vectors_of_a_pass(cell, monkeypatch):
    """In the form of the input, layer by layer, and of a pass that is otherwise the same."""
    rnn = layers.layer_of(cell)(C, H, 2, hyper_size=3, batch_first=True, lstm_state=False)
    for parameter in rnn.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, lengths = torch.randn(B, T, C), torch.tensor([T, 2, T])
    y, _, scaling = rnn(x, lengths=lengths, return_scaling=True)
    assert torch.equal(y, rnn(x, lengths=lengths)[0])
    out = x.transpose(0, 1)
    for own, inner in zip(scaling, rnn.stack.cells, strict=True):
        with take_scaling([inner]) as vectors:
            out, _ = inner(out)
        torch.testing.assert_close(own[0], vectors[0][:, 0], rtol=0, atol=1e-6)
    assert rnn(x[0], return_scaling=True)[2][0].shape == scaling[0][0].shape
    torch._dynamo.reset()
    compiled = torch.compile(rnn, fullgraph=True, backend="eager")(x, lengths=lengths, return_scaling=True)
    torch.testing.assert_close((compiled[0], compiled[2]), (y, scaling), rtol=0, atol=1e-6)
    # Where CUDA graphs would pad the length.
    select = backends.select
    monkeypatch.setattr(backends, "select", lambda request: select(request)._replace(records=True))
    monkeypatch.setattr(graph_lengths, "keeps_length", lambda cell, T: False)
    monkeypatch.setattr(graph_lengths, "graph_length", lambda T: T + 3)
    for one, other in zip(rnn(x, lengths=lengths, return_scaling=True)[2], scaling, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="return_scaling is not possible with two directions"):
        layers.HyperLSTM(C, H, bidirectional=True)(x, return_scaling=True)
