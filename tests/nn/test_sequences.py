"""What a batch of sequences may have: resets, lengths and masks."""

import itertools

import pytest
import torch
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rhhn_fairseq.nn as layers
from rhhn_fairseq.errors import UsageError

C, H, T, B = 4, 6, 9, 3
LENGTHS = [7, 9, 5]
RESETS = torch.zeros(T, B, dtype=torch.bool)
RESETS[[0, 3, 4, 6], [1, 0, 2, 2]] = True
KINDS = {"GRU": {}, "LNLSTM": {}, "HyperLSTM": dict(hyper_size=3), "HyperRHN": dict(hyper_size=3)}
kinds = pytest.mark.parametrize("kind", KINDS)


def _build(kind, **options):
    torch.manual_seed(0)
    return getattr(layers, kind)(C, H, **KINDS.get(kind, {}), **options, dtype=torch.float64)


def _x(*shape):
    return torch.randn(*(shape or (T, B, C)), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _entries(state):
    return (state,) if isinstance(state, torch.Tensor) else state


def _close(ours, theirs):
    for one, other in zip(_entries(ours), _entries(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def _cut(rnn, x, hx, resets):
    """Output and last state of one sequence [T, C], cut at its resets."""
    cuts, parts = sorted({0, len(x), *resets.nonzero().flatten().tolist()}), []
    for start, stop in itertools.pairwise(cuts):
        y, hx = rnn(x[start:stop], None if resets[start] else hx)
        parts.append(y)
    return torch.cat(parts), hx


@kinds
def test_resets_of_layers_equal_sequences_cut_there(kind):
    rnn, first = _build(kind, num_layers=2), _build(kind, num_layers=2, batch_first=True)
    hx = rnn(_x(T, B, C) * 0.5)[1]
    y, state = rnn(_x(), hx, resets=RESETS)
    packed = pack_padded_sequence(_x(), torch.tensor(LENGTHS), enforce_sorted=False)
    y_packed, state_packed = rnn(packed, hx, resets=RESETS)
    y_packed, lengths = pad_packed_sequence(y_packed)
    for b, n in enumerate(lengths):
        own = tuple(entry[:, b] for entry in _entries(hx))
        _close(
            (y[:, b], *(entry[:, b] for entry in _entries(state))),
            _flat(_cut(rnn, _x()[:, b], own, RESETS[:, b])),
        )
        alone = _flat(_cut(rnn, _x()[:n, b], own, RESETS[:n, b]))
        _close((y_packed[:n, b], *(entry[:, b] for entry in _entries(state_packed))), alone)
    _close(first(_x().transpose(0, 1), hx, resets=RESETS.T)[0].transpose(0, 1), y)
    _close(rnn(_x()[:, 2], resets=RESETS[:, 2])[0], rnn(_x(), resets=RESETS)[0][:, 2])
    if kind in ("HyperLSTM", "GRU"):
        compiled = torch.compile(rnn, backend="eager", fullgraph=True)
        _close(compiled(_x(), hx, resets=RESETS)[0], y)


def _flat(result):
    y, state = result
    return (y, *_entries(state))


@kinds
def test_resets_and_lengths_are_exported(kind):
    torch._dynamo.reset()
    rnn = _build(kind).eval()
    sizes = {0: Dim("T", min=2), 1: Dim("B", min=2)}
    shapes = {"input": sizes, "lengths": {0: sizes[1]}, "resets": sizes}
    given = {"lengths": torch.tensor([2, 5]), "resets": RESETS[:5, :2].contiguous()}
    program = torch.export.export(rnn, (_x(5, 2, C),), given, dynamic_shapes=shapes).module()
    given = {"lengths": torch.tensor(LENGTHS), "resets": RESETS}
    _close(_flat(program(_x(), **given)), _flat(rnn(_x(), **given)))


@pytest.mark.parametrize("kind", ["RHN", "HyperRHN"])
def test_a_sequence_that_begins_in_a_later_chunk_skips_its_first_step(kind):
    rnn = _build(kind, num_layers=2, first_step="skip", rhn_depth=2, lstm_state=False)
    mask = torch.arange(T).unsqueeze(1) >= torch.tensor([0, 4, 6])
    whole, last = rnn(_x(), mask=mask)
    first, state = rnn(_x()[:5], mask=mask[:5])
    second, state = rnn(_x()[5:], state, mask=mask[5:])
    _close((torch.cat((first, second)), *_entries(state)), (whole, *_entries(last)))
    zeros, (y, last) = rnn.zero_state(B), rnn(_x())
    # A sequence has begun if any of its layers has.
    upper = tuple(entry.clone() for entry in _entries(zeros))
    upper[0][1] = 1.0
    assert not torch.equal(rnn(_x(), upper if len(upper) > 1 else upper[0])[0], y)
    assert not torch.equal(_build(kind, num_layers=2, rhn_depth=2, lstm_state=False)(_x())[0], y)
    _close(rnn(_x(), zeros)[0], y)
    _close(rnn(pack_padded_sequence(_x(), torch.tensor([T] * B)), zeros)[1], last)
    torch._dynamo.reset()
    _close(torch.compile(rnn, backend="eager", fullgraph=True)(_x(), zeros)[0], y)
    cell = getattr(layers, f"{kind}Cell")(C, H, **KINDS.get(kind, {}), rhn_depth=2, first_step="skip")
    zeros = [_x().new_zeros(B, size) for size in cell.double().cell.state_sizes]
    _close(cell(_x()[0], zeros if len(zeros) > 1 else zeros[0]), cell(_x()[0]))


def test_resets_draw_new_zoneout_and_refuse_two_directions():
    rnn = _build("LNLSTM", zoneout=0.5, h_detach=0.5)
    torch.manual_seed(3)
    y = rnn(_x(), resets=RESETS)[0]
    torch.manual_seed(3)
    plain = rnn(_x())[0]
    assert torch.equal(y[:3, 0], plain[:3, 0]) and not torch.equal(y[3:, 0], plain[3:, 0])
    with pytest.raises(UsageError, match="^LSTM: resets are not possible with bidirectional=True"):
        _build("LSTM", bidirectional=True)(_x(), resets=RESETS)
    with pytest.raises(
        UsageError, match=r"LSTM: resets is torch.float64 of shape \(9, 3, 4\), expected torch"
    ):
        _build("LSTM")(_x(), resets=_x())


@kinds
@pytest.mark.parametrize("bidirectional", [False, True])
def test_lengths_and_masks_equal_packed_input(kind, bidirectional):
    rnn = _build(kind, num_layers=2, bidirectional=bidirectional)
    hx = rnn(_x(T, B, C) * 0.5)[1]
    results = []
    mask = torch.arange(T).unsqueeze(1) < torch.tensor(LENGTHS)
    for given in ("packed", "lengths", "mask"):
        x = torch.where(mask.unsqueeze(-1), _x(), float("nan")).requires_grad_()
        if given == "packed":
            y, state = rnn(pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False), hx)
            y = pad_packed_sequence(y)[0]
        elif given == "lengths":
            y, state = rnn(x, hx, lengths=LENGTHS)
        else:
            y, state = rnn(x, hx, mask=mask)
        loss = y.square().sum() + sum(entry.square().sum() for entry in _entries(state))
        gradients = torch.autograd.grad(loss, [x, *rnn.parameters()], retain_graph=True)
        results.append((y, *_entries(state), *gradients))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_impossible_lengths_are_refused():
    rnn = _build("LSTM")
    for lengths in ([1, 2], [1, 2, 10], [-1, 2, 3], [0.5, 1.0, 2.0]):
        with pytest.raises(UsageError, match=r"^LSTM: lengths are \[.*\], expected 3 whole numbers"):
            rnn(_x(), lengths=lengths)
    with pytest.raises(UsageError, match="lengths are not possible with a mask or packed input"):
        rnn(_x(), lengths=LENGTHS, mask=~RESETS)


K = 5
CONTEXT = _x(T, B, K)


@pytest.mark.parametrize("kind", ["HyperLSTM", "LNHyperLSTM", "HyperRNN", "HyperRHN", "Hyper", "LSTM"])
def test_a_condition_is_read_by_the_networks_that_are_asked(kind, tmp_path):
    options = {"context_to": "both"} if kind == "LSTM" else {"hyper_size": 3}
    torch.manual_seed(0)
    rnn = getattr(layers, kind)(C, H, 2, context_size=K, **options).double()
    with torch.no_grad():
        for weight in rnn.parameters():
            weight += 0.2 * torch.randn_like(weight)
    read_it = [name for name, weight in rnn.stack.cells[0].named_parameters() if len(weight) == C + K]
    assert read_it == (["weight_x"] if kind == "LSTM" else ["hyper.weight_x"])
    context = CONTEXT.clone().requires_grad_()
    y, state = rnn(_x(), context=context)
    assert (torch.autograd.grad(y.sum(), context)[0] != 0).all()
    constant = rnn(_x(), context=CONTEXT[0])[0]
    _close(constant, rnn(_x(), context=CONTEXT[:1].expand(T, -1, -1))[0])
    _close(rnn(_x()[:, 1], context=CONTEXT[:, 1])[0], y[:, 1])
    _close(rnn(_x()[:, 1], context=CONTEXT[0, 1])[0], constant[:, 1])
    packed = pack_padded_sequence(_x(), torch.tensor(LENGTHS), enforce_sorted=False)
    padded, _ = pad_packed_sequence(rnn(packed, context=CONTEXT)[0])
    _close(padded, rnn(_x(), lengths=LENGTHS, context=CONTEXT)[0])
    rnn.save_pretrained(tmp_path)
    _close(layers.from_pretrained(tmp_path)(_x(), context=CONTEXT)[0], y)
    for wrong in (None, CONTEXT[..., :1]):
        with pytest.raises(UsageError, match=f"^{kind}: context has shape .*, expected .B, 5. or one for"):
            rnn(_x(), context=wrong)


def test_a_condition_needs_a_hypernetwork():
    with pytest.raises(UsageError, match="LSTM: context_size=2, but the cell has no hypernetwork; give"):
        _build("LSTM", context_size=2)
    with pytest.raises(UsageError, match="HyperLSTM: hyper_context=4 leaves the main network nothing of"):
        _build("HyperLSTM", hyper_context=4)
