"""Attention and decoder layers against the papers' equations in numpy, and against calls by hand.

Arithmetic is float64.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

from rhhn_fairseq.cells import CELLS, build_cell, cell_options, reorder_state
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.attention import (
    AdditiveAttention,
    FeedbackCell,
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
    p = {key: part.detach().numpy() for key, part in attention.named_parameters()}
    p |= {key: part.detach().numpy() for key, part in source.named_parameters()}
    v = p["v"]
    if "g" in p:
        v = p["g"] * v / np.sqrt((v**2).sum())
    energies = [np.tanh(query @ p["weight_q"] + m @ p["weight_m"] + p["bias"]) @ v for m in values]
    weights = np.exp(energies) / np.exp(energies).sum()
    return weights @ values, weights


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_equals_the_equations(normalised, side):
    attention, source = _attention(normalised)
    (values, mask), query = _source(side), _random(T, B, H)
    context, weights = attention(query, source(values, mask))
    for t in range(T):
        for b in range(B):
            real = mask[:, b]
            expected, by_position = _naive(attention, source, query[t, b].numpy(), values[real, b].numpy())
            np.testing.assert_allclose(context[t, b].detach(), expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(weights[b, t, real].detach(), by_position, rtol=0, atol=1e-12)
            assert (weights[b, t, ~real] == 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_general_attention_equals_the_equations(side):
    torch.manual_seed(0)
    attention, source = GeneralAttention(H, M).double(), SourceMemory(M, None).double()
    (values, mask), query = _source(side), _random(T, B, H)
    memory = source(values, mask)
    context, weights = attention(query, memory)
    W = attention.weight_q.detach().numpy()
    for t in range(T):
        for b in range(B):
            real = mask[:, b]
            keys = values[real, b].numpy()
            chances = np.exp([query[t, b].numpy() @ W @ m for m in keys])
            chances /= chances.sum()
            np.testing.assert_allclose(context[t, b].detach(), chances @ keys, rtol=0, atol=1e-12)
            np.testing.assert_allclose(weights[b, t, real].detach(), chances, rtol=0, atol=1e-12)
            assert (weights[b, t, ~real] == 0).all()
    inputs = [_random(2, B, H).requires_grad_(), values.requires_grad_(), attention.weight_q]
    assert torch.autograd.gradcheck(lambda query, values, _: attention(query, source(values, mask)), inputs)


@pytest.mark.parametrize("form", ["paper", "v2"])
@pytest.mark.parametrize("layers", [1, 3])
def test_context_to_output_is_luongs_equation(form, layers):
    if form == "v2" and layers == 1:
        pytest.skip("v2 has two layers or more")
    residual = {"layers": layers, "residual_from": 3 if layers > 2 else 0}
    decoder, source = _decoder("lstm", form, context_to_output=True, **residual)
    memory, x = source(*_source()), _random(T, B, C)
    found, weights, _ = decoder(x, memory)
    inner = decoder.weight_o
    decoder.weight_o = None
    y, _, _ = decoder(x, memory)
    context = torch.einsum("bts,bsm->tbm", weights, memory.values_NSM)
    expected = torch.tanh(y @ inner[:H] + context @ inner[H:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_attention_has_right_gradients():
    attention, source = _attention(normalised=True)
    values, mask = _source()

    def run(query, values, *_):
        return attention.double()(query, source(values, mask))

    inputs = [_random(2, B, H).requires_grad_(), values.requires_grad_()]
    inputs += [*attention.parameters(), *source.parameters()]
    assert torch.autograd.gradcheck(run, inputs)


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
def test_decoder_equals_its_layers_called_by_hand(form):
    decoder, source = _decoder("lstm", form)
    x, memory = _random(T, B, C), source(*_source())
    y, weights, _ = decoder(x, memory)
    one, context, expected_weights, _ = decoder.bottom(x, memory)
    if form == "v2":
        torch.testing.assert_close(one, decoder.bottom.cell(x)[0])
        torch.testing.assert_close(context, decoder.bottom.attention(one, memory)[0])
    two, _ = decoder.upper.cells[0](torch.cat([one, context], dim=-1))
    three, _ = decoder.upper.cells[1](torch.cat([two, context], dim=-1))
    torch.testing.assert_close(y, three + two, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights)


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
def test_padding_before_the_target_changes_nothing(cell, form):
    decoder, source = _decoder(cell, form)
    x, memory = _random(T, B, C), source(*_source())
    padded = torch.cat([torch.full((2, B, C), float("nan"), dtype=x.dtype), x])
    mask = torch.ones(T + 2, B, dtype=torch.bool)
    mask[:2] = False
    y, _, state = decoder(padded, memory, None, mask)
    expected, _, expected_state = decoder(x, memory)
    torch.testing.assert_close(y[2:], expected, rtol=0, atol=1e-12)
    assert (y[:2] == 0).all()
    for found, wanted in zip(state, expected_state, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@both_forms
def test_source_padding_reaches_no_gradient(form):
    decoder, source = _decoder("lstm", form)
    values, mask = _source()
    values.requires_grad_()
    decoder(_random(T, B, C), source(values, mask))[0].sum().backward()
    assert (values.grad[~mask] == 0).all()
    assert (values.grad[mask] != 0).any()


@both_forms
def test_each_dropout_acts_at_its_place(form):
    """Against the layers called by hand, which draw the masks in the same order."""
    rates = {"input_dropout": 0.1, "layer_dropout": 0.2, "context_dropout": 0.3, "output_dropout": 0.4}
    decoder, source = _decoder("lstm", form, layers=2, residual_from=0, context_to_output=True, **rates)
    memory, x = source(*_source()), _random(T, B, C)
    decoder.train()
    torch.manual_seed(0)
    y = decoder(x, memory)[0]
    torch.manual_seed(0)
    low, context, _, _ = decoder.bottom(dropout(x, 0.1), memory)
    context = dropout(context, 0.3)
    high = decoder.upper.cells[0](torch.cat([dropout(low, 0.2), context], dim=-1))[0]
    both = torch.cat([dropout(high, 0.2), context], dim=-1)
    expected = dropout(torch.tanh(both @ decoder.weight_o), 0.4)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@both_forms
def test_one_mask_may_serve_a_sequence(form):
    once = {"output_dropout": 0.5, "dropout_mask": "sequence"}
    decoder, source = _decoder("lstm", form, layers=2, residual_from=0, **once)
    dropped = decoder.train()(_random(T, B, C), source(*_source()))[0] == 0
    assert dropped.any() and torch.equal(dropped, dropped[:1].expand_as(dropped))


def test_a_decoder_draws_no_noise_in_evaluation():
    noisy = {"recurrent_dropout": 0.5, "gal_dropout": 0.5}
    decoder, source = _decoder("lstm", "paper", cell_options=noisy)
    plain, _ = _decoder("lstm", "paper")
    memory, x = source(*_source()), _random(T, B, C)
    torch.testing.assert_close(decoder(x, memory)[0], plain(x, memory)[0], rtol=0, atol=0)


@both_forms
def test_every_regulariser_works_in_training(form):
    noisy = {"h_detach": 0.5, "zoneout": 0.2, "gal_dropout": 0.2, "recurrent_dropout": 0.2, "rhn_depth": 2}
    decoder, source = _decoder(
        "hyperrhn", form, cell_options=noisy, context_dropout=0.3, layer_dropout=0.3, output_dropout=0.3
    )
    x, memory = _random(T, B, C), source(*_source())
    quiet = decoder(x, memory)[0]
    decoder.train()
    torch.manual_seed(3)
    first = decoder(x, memory)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(decoder(x, memory)[0], first, rtol=0, atol=0)
    assert not torch.allclose(first, quiet)
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


class TestMemory:
    def memory(self):
        values, mask = _source()
        return SourceMemory(M, A).double()(values, mask)

    def rows(self, memory):
        """The memory of every row, as a plain memory holds it."""
        return [part.repeat_interleave(memory.beams, dim=0) for part in memory[:3]]

    def check(self, memory, index):
        before = self.rows(memory)
        after = memory.reorder(torch.tensor(index))
        for found, part in zip(self.rows(after), before, strict=True):
            assert torch.equal(found, part[torch.tensor(index)])
        return after

    def test_beams_share_their_sentence(self):
        memory = self.memory()
        beams = self.check(memory, [0, 0, 1, 1, 2, 2])
        assert beams.beams == 2 and beams.values_NSM is memory.values_NSM

    def test_moving_within_sentences_copies_nothing(self):
        beams = self.check(self.memory(), [0, 0, 1, 1, 2, 2])
        assert self.check(beams, [1, 0, 2, 2, 5, 4]).values_NSM is beams.values_NSM

    def test_sentences_that_are_done_are_dropped(self):
        beams = self.check(self.memory(), [0, 0, 1, 1, 2, 2])
        left = self.check(beams, [1, 1, 5, 4])
        assert left.values_NSM.shape[0] == 2 and left.beams == 2

    def test_any_other_order_is_right_too(self):
        beams = self.check(self.memory(), [0, 0, 1, 1, 2, 2])
        assert self.check(beams, [0, 2, 1, 3, 5]).beams == 1
        assert self.check(self.memory(), [2, 0, 1]).beams == 1
        assert self.check(self.memory(), [0, 1, 2, 0, 1, 2]).beams == 1

    def test_attention_of_beams_is_that_of_rows(self):
        attention, source = _attention()
        memory = source(*_source())
        query = _random(T, 2 * B, H)
        beams = memory.reorder(torch.tensor([0, 0, 1, 1, 2, 2]))
        rows = Memory(*self.rows(beams))
        for found, expected in zip(attention(query, beams), attention(query, rows), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": "luong"}, "attention='luong' is unknown, choose from paper, v2"),
        ({"attention": "v2", "layers": 1}, "layers=1 is too few"),
        ({"bidirectional_layers": 1}, "reads forwards"),
        ({"residual_from": 1, "layers": 2}, "the bottom layer reads embeddings"),
        ({"context_size": 0}, "context_size=0 is too small"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    sizes = dict(cell="lstm", input_size=C, hidden_size=H, context_size=M, attention_size=A)
    with pytest.raises(UsageError, match=message):
        DecoderConfig(**sizes | options)


def test_an_input_of_another_width_is_refused():
    attention, source = _attention()
    cell = FeedbackCell(build_cell("lstm", C + M, H).double(), attention)
    with pytest.raises(UsageError, match="input of width 4 and context of width 5, the cell reads 8"):
        cell(_random(T, B, C + 1), source(*_source()))


def test_every_beam_starts_as_its_sentence():
    values, mask = _source()
    memory = SourceMemory(5, 7).double()(values, mask, start=(_random(B, H),))
    beams = memory.reorder(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert torch.equal(beams.start_rows()[0], memory.start[0][[0, 0, 1, 1, 2, 2]])
    left = beams.reorder(torch.tensor([1, 1, 5, 4]))
    assert torch.equal(left.start_rows()[0], memory.start[0][[0, 0, 2, 2]])
