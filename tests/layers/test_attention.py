"""Attention and decoder layers against the papers' equations in numpy, and against calls by hand.

Arithmetic is float64.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

from rhhn_fairseq.cells import CELLS, cell_options, reorder_state
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.attention import (
    AdditiveAttention,
    GeneralAttention,
    Memory,
    SourceMemory,
)
from rhhn_fairseq.layers.decoder import ATTENTION_FORMS, AttentionDecoder, DecoderConfig
from rhhn_fairseq.nn import quantize_dynamic

T, S, B, M, A, C, H = 4, 6, 3, 5, 7, 3, 6
LENGTHS = (6, 2, 4)

both_forms = pytest.mark.parametrize("form", ATTENTION_FORMS)


def _random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _source(side="left"):
    """Encoder outputs [S, B, M] with padding on a side, and their mask."""
    mask = torch.zeros(S, B, dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        mask[S - length :, b] = True
    if side == "right":
        mask = mask.flip(0)
    return _random(S, B, M, seed=2), mask


def _attention(normalised=False, seed=0):
    torch.manual_seed(seed)
    attention = AdditiveAttention(H, A, normalised).double()
    source = SourceMemory(M, A).double()
    with torch.no_grad():
        for parameter in (*attention.parameters(), *source.parameters()):
            parameter += 0.2 * torch.randn_like(parameter)
    return attention, source


def _naive(attention, source, query, values):
    """One query [H] over one sentence's real positions [S', M]: energies one by one."""
    modules = (attention, source)
    p = {key: part.detach().numpy() for module in modules for key, part in module.named_parameters()}
    if "v" not in p:
        energies = [query @ p["weight_q"] @ m for m in values]
    else:
        v = p["g"] * p["v"] / np.sqrt((p["v"] ** 2).sum()) if "g" in p else p["v"]
        energies = [np.tanh(query @ p["weight_q"] + m @ p["weight_m"] + p["bias"]) @ v for m in values]
    weights = np.exp(energies) / np.exp(energies).sum()
    return weights @ values, weights


@pytest.mark.parametrize("kind", ["additive", "normalised", "general"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_equals_the_equations_and_has_right_gradients(kind, side):
    attention, source = _attention(normalised=kind == "normalised")
    if kind == "general":
        attention, source = GeneralAttention(H, M).double(), SourceMemory(M, None).double()
    (values, mask), query = _source(side), _random(T, B, H)
    context, weights = attention(query, source(values, mask))
    for t in range(T):
        for b in range(B):
            real = mask[:, b]
            expected, by_position = _naive(attention, source, query[t, b].numpy(), values[real, b].numpy())
            np.testing.assert_allclose(context[t, b].detach(), expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(weights[b, t, real].detach(), by_position, rtol=0, atol=1e-12)
            assert (weights[b, t, ~real] == 0).all()
    inputs = [_random(2, B, H).requires_grad_(), values.requires_grad_()]
    inputs += [*attention.parameters(), *source.parameters()]
    assert torch.autograd.gradcheck(lambda q, v, *_: attention(q, source(v, mask)), inputs)


def _decoder(cell, form, seed=0, **options):
    torch.manual_seed(seed)
    small = {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}
    small |= options.pop("cell_options", {})
    options = {"layers": 3, "residual_from": 3} | options
    sizes = dict(input_size=C, hidden_size=H, context_size=M, attention_size=A)
    config = DecoderConfig(cell=cell, attention=form, cell_options=small, **sizes, **options)
    decoder, source = AttentionDecoder(config).double(), SourceMemory(M, A).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return decoder.eval(), source


@pytest.mark.parametrize("cell", CELLS)
def test_feedback_cell_equals_the_cell_called_with_each_context(cell):
    decoder, source = _decoder(cell, "paper")
    x, memory = _random(T, B, C), source(*_source())
    y, contexts, weights, final = decoder.bottom(x, memory)
    inner, state = decoder.bottom.cell, decoder.bottom.cell.zero_state(B, dtype=x.dtype)
    for t in range(T):
        context, weight = decoder.bottom.attention(state[0].unsqueeze(0), memory)
        out, state = inner(torch.cat([x[t : t + 1], context], dim=-1), state)
        for found, expected in ((y[t], out[0]), (contexts[t], context[0]), (weights[:, t], weight[:, 0])):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for found, expected in zip(final, state, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("cell", ["lstm", "ln_hyperlstm", "hyperrhn"])
def test_a_quantised_decoder_stays_near(cell):
    decoder, source = _decoder(cell, "paper")
    values, mask = _source()
    decoder, memory = decoder.float(), source.float()(values.float(), mask)
    x = _random(T, B, C).float()
    expected, quantised = decoder(x, memory)[0], quantize_dynamic(decoder, smallest=1)(x, memory)[0]
    assert 0 < (quantised - expected).abs().max() < 0.15 * expected.abs().max()


@pytest.mark.parametrize("cell", ["rhn", "hyperrhn"])
def test_feedback_cell_leaves_out_the_first_recurrent_map_when_asked(cell):
    x, made = _random(T, B, C), {}
    for first_step in ("full", "skip"):
        decoder, source = _decoder(cell, "paper", cell_options={"first_step": first_step, "rhn_depth": 2})
        memory = source(*_source())
        made[first_step] = decoder.bottom(x, memory)[0]
        context, _ = decoder.bottom.attention(torch.zeros(1, B, H, dtype=x.dtype), memory)
        alone, _ = decoder.bottom.cell(torch.cat([x[:1], context], dim=-1))
        torch.testing.assert_close(made[first_step][:1], alone, rtol=0, atol=1e-12)
    assert not torch.allclose(made["full"][0], made["skip"][0])


@both_forms
@pytest.mark.parametrize("cell", CELLS)
def test_decoding_step_by_step_with_a_reordered_beam_equals_whole_sequences(cell, form):
    decoder, source = _decoder(cell, form)
    x, memory = _random(T, B, C), source(*_source())
    order = torch.tensor([2, 0, 0])
    expected, weights, _ = decoder(x, memory)
    _, _, state = decoder(x[:2], memory)
    moved = Memory(*(part[order] for part in memory[:3]))
    for t in (2, 3):
        # The rows go on from row 2, 0 and 0 of the first two steps.
        y, weight, state = decoder(
            x[t : t + 1, order], moved, state if t > 2 else reorder_state(state, order)
        )
        torch.testing.assert_close(y[0], expected[t, order], rtol=0, atol=1e-12)
        torch.testing.assert_close(weight[:, 0], weights[order, t], rtol=0, atol=1e-12)


@both_forms
@pytest.mark.parametrize("cell", ["lstm", "hyperrhn"])
def test_padding_changes_nothing_before_the_target_and_in_the_source(cell, form):
    decoder, source = _decoder(cell, form)
    values, source_mask = _source()
    x, memory = _random(T, B, C), source(values.requires_grad_(), source_mask)
    padded = torch.cat([torch.full((2, B, C), float("nan"), dtype=x.dtype), x])
    mask = torch.ones(T + 2, B, dtype=torch.bool)
    mask[:2] = False
    y, _, state = decoder(padded, memory, None, mask)
    expected, _, expected_state = decoder(x, memory)
    torch.testing.assert_close(y[2:], expected, rtol=0, atol=1e-12)
    assert (y[:2] == 0).all()
    for found, wanted in zip(state, expected_state, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    y.sum().backward()
    assert (values.grad[~source_mask] == 0).all() and (values.grad[source_mask] != 0).any()


@both_forms
def test_a_decoder_equals_its_layers_called_by_hand(form):
    """With every dropout, whose masks are drawn in the same order, and Luong's equation 5 at the end."""
    rates = {"input_dropout": 0.1, "layer_dropout": 0.2, "context_dropout": 0.3, "output_dropout": 0.4}
    decoder, source = _decoder("lstm", form, context_to_output=True, **rates)
    memory, x = source(*_source()), _random(T, B, C)
    decoder.train()
    torch.manual_seed(0)
    y, weights, _ = decoder(x, memory)
    torch.manual_seed(0)
    read = dropout(x, 0.1)
    low, context, expected_weights, _ = decoder.bottom(read, memory)
    if form == "v2":
        torch.testing.assert_close(low, decoder.bottom.cell(read)[0])
        torch.testing.assert_close(context, decoder.bottom.attention(low, memory)[0])
    context = dropout(context, 0.3)
    two = decoder.upper.cells[0](torch.cat([dropout(low, 0.2), context], dim=-1))[0]
    three = decoder.upper.cells[1](torch.cat([dropout(two, 0.2), context], dim=-1))[0] + two
    both = torch.cat([dropout(three, 0.2), context], dim=-1)
    expected = dropout(torch.tanh(both @ decoder.weight_o), 0.4)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights)


@both_forms
def test_every_regulariser_works_in_training_only(form):
    noisy = {"h_detach": 0.5, "zoneout": 0.2, "gal_dropout": 0.2, "recurrent_dropout": 0.2, "rhn_depth": 2}
    drop = {"context_dropout": 0.3, "layer_dropout": 0.3, "output_dropout": 0.3, "dropout_mask": "sequence"}
    decoder, source = _decoder("hyperrhn", form, cell_options=noisy, **drop)
    x, memory = _random(T, B, C), source(*_source())
    quiet = decoder(x, memory)[0]
    assert torch.equal(decoder(x, memory)[0], quiet)
    decoder.train()
    torch.manual_seed(3)
    first = decoder(x, memory)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(decoder(x, memory)[0], first, rtol=0, atol=0)
    # A unit that is dropped in one step is dropped in all; states of the first steps may be zero as well.
    dropped = first == 0
    assert dropped[-1].any() and dropped[:, dropped[-1]].all()
    first.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_h_detach_of_every_step_cuts_the_bottom_layers_recurrent_gradient():
    decoder, source = _decoder("elman", "paper", layers=1, residual_from=0, cell_options={"h_detach": 1.0})
    decoder.bottom.train()
    x = _random(T, B, C).requires_grad_()
    y, _, _, _ = decoder.bottom(x, source(*_source()))
    (gradient,) = torch.autograd.grad(y[-1].sum(), x)
    # The attention's query is not the recurrent input, so through it the earlier steps are still seen.
    assert (gradient[-1] != 0).all()
    with torch.no_grad():
        decoder.bottom.attention.weight_q.zero_()
    y, _, _, _ = decoder.bottom(x, source(*_source()))
    (gradient,) = torch.autograd.grad(y[-1].sum(), x)
    assert (gradient[:-1] == 0).all()


BEAMS = [0, 0, 1, 1, 2, 2]
ORDERS = [
    # Where the rows go, and the sentences and beams of the memory after that.
    (BEAMS, [1, 0, 2, 2, 5, 4], 3, 2),
    (BEAMS, [1, 1, 5, 4], 2, 2),
    (BEAMS, [0, 2, 1, 3, 5], 5, 1),
    ([0, 1, 2], [2, 0, 1], 3, 1),
    ([0, 1, 2], [0, 1, 2, 0, 1, 2], 6, 1),
]


@pytest.mark.parametrize("first, index, sentences, beams", ORDERS)
def test_reordering_a_memory_reorders_its_rows(first, index, sentences, beams):
    attention, source = _attention()
    plain = source(*_source(), start=(_random(B, H, seed=4),))
    memory = plain.reorder(torch.tensor(first))
    assert memory.values_NSM is plain.values_NSM
    after, order = memory.reorder(torch.tensor(index)), torch.tensor(first)[torch.tensor(index)]
    assert (len(after.values_NSM), after.beams) == (sentences, beams)
    # Nothing is copied while rows stay within their sentence.
    assert (after.values_NSM is plain.values_NSM) == (order.tolist() == BEAMS)
    assert torch.equal(after.start_rows()[0], plain.start[0][order])
    query = _random(T, len(index), H)
    rows = Memory(*(part[order] for part in plain[:3]))
    for found, expected in zip(attention(query, after), attention(query, rows), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bidirectional_layers": 1}, "bidirectional_layers=1 is not supported"),
        ({"weight_drop": 0.1}, "Decoder: weight_drop=0.1 is not supported"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    sizes = dict(cell="lstm", input_size=C, hidden_size=H, context_size=M, attention_size=A)
    with pytest.raises(UsageError, match=message):
        DecoderConfig(**sizes | options)
