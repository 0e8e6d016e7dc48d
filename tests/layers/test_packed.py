"""Packed sequences of very different lengths, which run in segments."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

import rhhn_fairseq.nn as layers
from rhhn_fairseq.layers.packed import Packed

C, H = 4, 6
LENGTHS = [3, 60, 1, 4, 20, 3, 2, 19]
KINDS = {"LSTM": {}, "GRU": {}, "LNHyperLSTM": {}, "RHN": dict(first_step="skip", rhn_depth=2)}


def _sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, C, generator=generator, dtype=torch.float64) for n in LENGTHS]


def _identity(**options):
    """A layer whose outputs are sums of its inputs, dropped out."""
    rnn = layers.Elman(C, C, activation="identity", **options).double()
    with torch.no_grad():
        for weight in rnn.parameters():
            weight.copy_(torch.eye(C) if weight.dim() == 2 else torch.zeros(C))
    return rnn


def _segments(lengths):
    packed = pack_sequence([torch.zeros(n, 1) for n in lengths], enforce_sorted=False)
    return Packed(packed.batch_sizes, torch.device("cpu")).segments


def test_padding_is_less_than_the_steps():
    for lengths in (LENGTHS, [2000] + [5] * 63, [2000, 1], list(range(1, 300))):
        segments = _segments(lengths)
        assert sum((part.stop - part.start) * part.R for part in segments) <= 2 * sum(lengths)
        assert len(segments) <= 1 + len(lengths).bit_length()
    assert len(_segments([60, 40, 30])) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_segments_equal_padded_sequences(kind, bidirectional):
    assert len(_segments(LENGTHS)) == 3
    torch.manual_seed(0)
    rnn = getattr(layers, kind)(
        C, H, 2, bidirectional=bidirectional, context_size=2, context_to="both", **KINDS[kind]
    )
    rnn.double()
    resets = None if bidirectional else torch.rand(60, len(LENGTHS)) < 0.2
    context, results = torch.randn(60, len(LENGTHS), 2, dtype=torch.float64), []
    for hx in (None, layers.detach_state(rnn(pad_sequence(_sequences()), context=context)[1])):
        for packed in (False, True):
            xs = [x.requires_grad_() for x in _sequences()]
            given = {"resets": resets, "context": context}
            if packed:
                y, state = rnn(pack_sequence(xs, enforce_sorted=False), hx, **given)
                y, _ = pad_packed_sequence(y)
            else:
                y, state = rnn(pad_sequence(xs), hx, lengths=LENGTHS, **given)
            entries = (state,) if isinstance(state, torch.Tensor) else state
            loss = y.square().sum() + sum(entry.square().sum() for entry in entries)
            results.append((y, *entries, *torch.autograd.grad(loss, [*xs, *rnn.parameters()])))
    for padded, packed in (results[:2], results[2:]):
        for one, other in zip(padded, packed, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_mask_serves_all_segments_of_a_sequence(bidirectional):
    torch.manual_seed(0)
    ones = [torch.ones_like(x) for x in _sequences()]
    # In each sequence a unit is dropped at all steps or at none, and others are in other sequences.
    rnn = _identity(input_dropout=0.5, dropout_mask="sequence", bidirectional=bidirectional)
    y, lengths = pad_packed_sequence(rnn(pack_sequence(ones, enforce_sorted=False))[0])
    assert (y[0] == 0).any() and (y[0] != 0).any()
    for b, n in enumerate(lengths):
        assert torch.equal(y[:n, b, :C] == 0, (y[0, b, :C] == 0).expand(n, C))
    rnn = _identity(gal_dropout=0.5, bidirectional=bidirectional)
    start = torch.ones(1 + bidirectional, len(LENGTHS), C, dtype=torch.float64)
    zeros = pack_sequence([0 * x for x in ones], enforce_sorted=False)
    y, lengths = pad_packed_sequence(rnn(zeros, start)[0])
    for b, n in enumerate(lengths):
        # A unit that is kept doubles at every step; with several masks hardly any would be kept throughout.
        ends = [y[n - 1, b, :C], y[0, b, C:]]
        for first, last in zip((y[0, b, :C], y[n - 1, b, C:]), ends, strict=True):
            assert torch.equal(last, torch.where(first == 0, 0.0, 2.0 ** int(n)).to(last.dtype))
