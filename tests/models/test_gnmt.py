"""The translation model: sizes, initialisation, shared tables, and decoding equal to the forced pass."""

import math

import pytest
import torch
from fairseq import search
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cli.describe import count_parameters
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.decoder import ATTENTION_FORMS
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig

both_forms = pytest.mark.parametrize("form", ATTENTION_FORMS)


def _dictionary(words=20):
    dictionary = Dictionary()
    for n in range(words):
        dictionary.add_symbol(f"w{n}", n=100 - n)
    return dictionary


class _Task:
    def __init__(self, source=None, target=None, left_pad_target=False, pieces=None):
        self.source_dictionary = source or _dictionary()
        self.target_dictionary = target or _dictionary()
        self.cfg = type("cfg", (), {"left_pad_target": left_pad_target})
        self.pieces_sha256 = pieces


def _model(cell="lstm", seed=0, task=None, **options):
    torch.manual_seed(seed)
    if "hyper" in cell:
        options = {"hyper_size": 4} | options
    options = dict(encoder_layers=2, decoder_layers=3, init_range=0.0) | options
    sizes = dict(hidden_size=8, embed_dim=6)
    config = GNMTConfig(cell=cell, init_cells="own", **sizes | options)
    return GNMT.build_model(config, task or _Task()).eval()


def _batch(dictionary, lengths=(5, 2, 4), left=True, seed=1):
    """Sentences that end in eos, padded on a side."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), max(lengths) + 1), dictionary.pad())
    for row, length in zip(rows, lengths, strict=True):
        words = torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=draw)
        sentence = torch.cat([words, torch.tensor([dictionary.eos()])])
        row[len(row) - length - 1 :] = sentence
        if not left:
            row[:] = dictionary.pad()
            row[: length + 1] = sentence
    return rows


@both_forms
@pytest.mark.parametrize("start", ["zeros", "encoder"])
@pytest.mark.parametrize("cell", ["lstm", "hyperrhn", "ln_hyperlstm"])
def test_incremental_decoding_equals_the_forced_pass(cell, start, form):
    model = _model(cell, attention=form, decoder_start=start)
    dictionary = model.decoder.dictionary
    source = _batch(dictionary)
    target = torch.cat([torch.full((3, 1), dictionary.eos()), _batch(dictionary, (4, 4, 4), seed=2)], dim=1)
    memory = model.encoder(source)
    forced, extra = model.decoder(target, memory)
    order, cached = torch.tensor([1, 1, 2]), {}
    model.decoder(target[:, :1], memory, incremental_state=cached)
    model.decoder(target[:, :2], memory, incremental_state=cached)
    model.decoder.reorder_incremental_state_scripting([cached][0], order)
    memory = model.encoder.reorder_encoder_out(memory, order)
    for t in range(2, target.shape[1]):
        logits, more = model.decoder(target[order, : t + 1], memory, incremental_state=cached)
        # Float32 sums in another order; a few units in the last place of values near 1.
        torch.testing.assert_close(logits[:, 0], forced[order, t], rtol=0, atol=3e-6)
        torch.testing.assert_close(more["attn"][0][:, 0], extra["attn"][0][order, t], rtol=0, atol=3e-6)


LUONG = {"attention_score": "general", "context_to_output": True}
"""The attention of Luong et al. 2015 on GNMT's layers."""


@both_forms
@pytest.mark.parametrize("options", [{}, LUONG], ids=["additive", "general"])
def test_the_side_of_the_source_padding_does_not_matter(form, options):
    model = _model("ln_hyperlstm", attention=form, decoder_start="encoder", **options)
    dictionary = model.decoder.dictionary
    target = _batch(dictionary, (4, 4, 4), seed=2)
    by_side = [model(_batch(dictionary, left=left), None, target)[0] for left in (True, False)]
    alone = model(_batch(dictionary, left=True)[1:2, -3:], None, target[1:2])[0]
    torch.testing.assert_close(*by_side, rtol=0, atol=3e-6)
    torch.testing.assert_close(by_side[0][1:2], alone, rtol=0, atol=3e-6)


def test_left_padded_targets_are_masked_when_the_task_pads_so():
    model = _model(task=_Task(left_pad_target=True))
    dictionary = model.decoder.dictionary
    source, target = _batch(dictionary), _batch(dictionary, (4, 2, 3), seed=2)
    padded = model(source, None, target)[0]
    alone = model(source[1:2, -3:], None, target[1:2, -3:])[0]
    torch.testing.assert_close(padded[1:2, -3:], alone, rtol=0, atol=3e-6)
    assert not torch.allclose(_same_weights(model)(source, None, target)[0][1:2, -3:], alone, atol=1e-3)


def _same_weights(model):
    other = _model()
    other.load_state_dict(model.state_dict())
    return other


@both_forms
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("options", [{}, LUONG], ids=["additive", "general"])
def test_beam_search_scores_are_those_of_the_forced_pass(form, beam, options):
    """fairseq's generator, with sentences that finish at different steps, against log-probabilities."""
    model = _model("rhn", attention=form, rhn_depth=2, **options)
    dictionary = model.decoder.dictionary
    source = _batch(dictionary, (5, 1, 3, 4))
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=8, normalize_scores=False,
        search_strategy=search.BeamSearch(dictionary),
    )  # fmt: skip
    found = generator.generate([model], {"net_input": {"src_tokens": source}})
    for row, hypotheses in zip(source, found, strict=True):
        assert len(hypotheses) == beam
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens[-1:], tokens[:-1]])
            alone = row[row != dictionary.pad()]
            logits, extra = model(alone[None], None, previous[None])
            chosen = logits[0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], chosen, rtol=0, atol=1e-5)
            attention = hypothesis["attention"][-len(alone) :]
            torch.testing.assert_close(attention.T, extra["attn"][0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("embed_dim", [6, 8])
def test_shared_tables(embed_dim):
    counts = {}
    for share in ("none", "decoder", "all"):
        model = _model(share_embeddings=share, embed_dim=embed_dim)
        counts[share] = count_parameters(model)
        logits = model(_batch(model.decoder.dictionary), None, torch.tensor([[2], [2], [2]]))[0]
        assert logits.shape == (3, 1, 24) and logits.std() > 0
    project = 8 * embed_dim if embed_dim != 8 else 0
    assert counts["none"] - counts["decoder"] == 24 * 8 - project
    assert counts["decoder"] - counts["all"] == 24 * embed_dim
    assert model.encoder.embed_tokens is model.decoder.embed_tokens


@both_forms
def test_the_decoder_starts_where_the_encoder_ends(form):
    model = _model("lstm", attention=form, decoder_start="encoder")
    dictionary = model.decoder.dictionary
    source, target = _batch(dictionary), torch.full((3, 1), dictionary.eos())
    memory = model.encoder(source)
    _, last = model.encoder.stack(model.encoder.embed_tokens(source.T), None, source.T != dictionary.pad())
    # Two encoder layers of (h, c) each, and a third decoder layer that starts from zeros.
    start = (*last, torch.zeros(3, 8), torch.zeros(3, 8))
    embedded = model.decoder.embed_tokens(target.T)
    y, _, _ = model.decoder.decoder(embedded, memory._replace(start=None), start)
    found = model(source, None, target)[0]
    torch.testing.assert_close(found, model.decoder.output(y.transpose(0, 1)), rtol=0, atol=1e-6)
    shallow = _model("lstm", attention=form, decoder_start="encoder", encoder_layers=4)
    assert len(shallow.encoder(source).start) == 6


def test_uniform_start_of_the_paper():
    model = _model(init_range=0.04, hidden_size=32, embed_dim=32, attention_normalised=True)
    whole = torch.cat([p.flatten() for n, p in model.named_parameters() if not n.endswith("attention.g")])
    # init_cells is "own" here, and those are larger.
    assert whole.abs().max() > 0.05
    torch.manual_seed(0)
    config = GNMTConfig(hidden_size=32, embed_dim=32, attention_normalised=True)
    model = GNMT.build_model(config, _Task())
    parameters = dict(model.named_parameters())
    gain = parameters.pop("decoder.decoder.bottom.attention.g")
    assert gain.item() == pytest.approx(1 / math.sqrt(32))
    whole = torch.cat([p.flatten() for p in parameters.values()])
    assert 0.0399 < whole.abs().max() <= 0.04
    assert (model.encoder.embed_tokens.weight[1] == 0).all()


@pytest.mark.parametrize("hidden, bound", [(32, 0.08), (8, 0.16)])
def test_start_of_other_widths_and_of_the_attention(hidden, bound):
    sizes = dict(hidden_size=hidden, embed_dim=32, init_range=0.04, init_width=128, init_attention=0.5)
    model = GNMT.build_model(GNMTConfig(**sizes), _Task())
    maps = ("encoder.memory.weight_m", "decoder.decoder.bottom.attention.weight_q")
    parameters = dict(model.named_parameters())
    attention = torch.cat([parameters.pop(name).flatten() for name in maps])
    assert 0.45 < attention.abs().max() <= 0.5
    whole = torch.cat([parameter.flatten() for parameter in parameters.values()])
    assert 0.99 * bound < whole.abs().max() <= bound


@pytest.mark.parametrize("cell", ["ln_lstm", "hyperlstm"])
def test_cells_with_gains_or_scaling_vectors_keep_their_own_start(cell):
    """Near zero, these would multiply every signal and every gradient down to nothing."""
    model = GNMT.build_model(GNMTConfig(cell=cell, hidden_size=32, embed_dim=32, init_range=0.04), _Task())
    assert model.decoder.output.weight.abs().max() <= 0.04
    names = dict(model.encoder.stack.cells[0].named_parameters())
    kept = [name for name in names if "norm_weight" in name or "scaling.bias_z" in name or name == "alpha"]
    assert kept and all((names[name] == 1).all() for name in kept)


def test_sharing_all_needs_one_dictionary():
    task = _Task(target=_dictionary(21))
    with pytest.raises(UsageError, match="the dictionaries differ"):
        _model(share_embeddings="all", task=task)


class TestFingerprint:
    def test_other_pieces_are_refused(self):
        ours, theirs = (_model(task=_Task(pieces=digit * 64)) for digit in "ab")
        ours.load_state_dict(_model(task=_Task(pieces="a" * 64)).state_dict())
        with pytest.raises(UsageError, match="another sentencepiece model .SHA-256 bbbbbbbbbbbb"):
            ours.load_state_dict(theirs.state_dict())

    def test_unknown_pieces_are_accepted_and_remembered(self):
        ours = _model()
        ours.load_state_dict(_model(task=_Task(pieces="c" * 64)).state_dict())
        assert bytes(ours.pieces_sha256.tolist()).hex() == "c" * 64


def test_rates_reach_the_encoder_and_the_decoder():
    rates = dict(dropout=0.1, output_dropout=0.0, context_dropout=0.3, dropout_mask="sequence")
    model = _model(attention="paper", decoder_layers=3, residual_from=0, **rates)
    encoder, decoder = model.encoder.stack.config, model.decoder.decoder.config
    for config in (encoder, decoder):
        assert (config.input_dropout, config.layer_dropout, config.dropout_mask) == (0.1, 0.1, "sequence")
    assert (decoder.output_dropout, decoder.context_dropout) == (0.0, 0.3)


def test_options_of_the_cell_reach_every_cell():
    model = _model("ln_hyperlstm", zoneout=0.25, recurrent_dropout=0.5)
    cells = [module.config for module in model.modules() if isinstance(module, Cell)]
    outer = [config for config in cells if getattr(config, "hyper_size", None) == 4]
    # Two layers of the encoder, the first in both directions, and three of the decoder.
    assert [(config.zoneout, config.recurrent_dropout) for config in outer] == [(0.25, 0.5)] * 6
