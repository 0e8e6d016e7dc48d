"""Candidates for the GPU: the results of today's code in float64 on the CPU, and what only a GPU shows."""

import subprocess
import sys

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers import strokes_cli, tiny_char_lm, tiny_translation
from helpers.cli import USER_DIR, json_log

from experiments.gpu import two_streams
from experiments.gpu.decoding import GraphSearch
from experiments.gpu.two_streams import Lanes, pipeline, run_two_streams
from rhhn_fairseq.cells import build_cell

CPU = torch.device("cpu")
# float64; measured: 1.5e-11 for gradients in the thousands, 4e-14 of a tensor's norm.
CLOSE = dict(rtol=1e-10, atol=1e-10)


def random(*shape, device=CPU):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def with_gradients(call, *wanted):
    """What ``call`` returns, flattened, and the gradients of a random sum of all of it."""
    y, state = call()
    results = [y, *state]
    draw = torch.Generator().manual_seed(5)
    factors = [torch.randn(r.shape, generator=draw, dtype=r.dtype).to(r.device) for r in results]
    loss = sum((r * factor).sum() for r, factor in zip(results, factors, strict=True))
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    # Detached, because a graph that stays keeps its streams.
    return [*(r.detach() for r in results), *(g for g in gradients if g is not None)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def padded_mask(T, device=CPU):
    """Padding on either side, of which some covers whole chunks, and a sentence without any."""
    steps = torch.arange(T, device=device).unsqueeze(1)
    begin, end = torch.tensor([[0, 0, T - 2, 3], [T, 2, T, T - 2]], device=device)
    return (steps >= begin) & (steps < end)


def test_pipeline_hands_over_between_lanes(monkeypatch):
    """On a GPU a lane may read only what it has taken, with the event that it waits for."""
    lanes, taken = Lanes(3, CPU), {}

    class Lane:
        current = None

        def __init__(self, number):
            self.number = number

        def __enter__(self):
            Lane.current = self.number

        def __exit__(self, *error):
            Lane.current = None

    def take(left):
        for tensor in left[0]:
            taken.setdefault(Lane.current, set()).add(id(tensor))
        return left[0]

    monkeypatch.setattr(lanes, "on", Lane)
    monkeypatch.setattr(two_streams, "take", take)
    order, kept = [], []

    def stage(number, item, state):
        assert Lane.current == number
        assert {id(tensor) for tensor in (*item, *state)} <= taken[number]
        order.append((number, int(item[0][0])))
        result = item[0] + 0.0, state[0] + item[0].sum()
        kept.extend((*item, *state, *result))  # So that no two have one address.
        return (result[0],), (result[1],)

    stages = [lambda item, state, n=n: stage(n, item, state) for n in range(3)]
    (pieces,), states = pipeline(stages, [torch.arange(5.0)], [(torch.zeros(1),)] * 3, 2, lanes)
    assert torch.cat(pieces).tolist() == [0, 1, 2, 3, 4] and [s.item() for (s,) in states] == [10] * 3
    assert {id(tensor) for tensor in (*pieces, *(s for (s,) in states))} <= taken[None]
    # Wave by wave.
    assert order == [(0, 0), (0, 2), (1, 0), (0, 4), (1, 2), (2, 0), (1, 4), (2, 2), (2, 4)]


@pytest.mark.parametrize("options", [{}, {"hyper_rank": 2}, {"recurrent_dropout": 0.3, "gal_dropout": 0.2}])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_two_streams(options, backend):
    """With noise, padding and a state, beside the loop over the cell's step."""
    torch.manual_seed(3)
    T, B = 7, 4
    cell = build_cell("hyperrhn", 3, 5, hyper_size=3, rhn_depth=2, **options).double()
    x, mask = random(T, B, 3).requires_grad_(), padded_mask(T)
    state, noise = tuple(random(B, size).requires_grad_() for size in (5, 3)), cell.sample_noise(T, B)
    wanted = [x, *state, *cell.parameters()]
    cell.backend = "reference"
    expected = with_gradients(lambda: cell(x, state, mask, noise), *wanted)
    cell.backend = backend
    for chunk in (3, 7):
        found = with_gradients(
            lambda k=chunk: run_two_streams(cell, x, state, mask, noise, lanes=Lanes(2, CPU), chunk=k),
            *wanted,
        )
        assert_same(found, expected)


VARIANTS = {
    "lstm": dict(decoder_layers=3, encoder_layers=3, residual_from=3, ends=5.0),
    "hyperlstm": dict(arch="hyperlstm_gnmt_small", ends=8.0, hyper_size=4, hyper_embed_size=2),
    "rhn": dict(arch="rhn_gnmt_small", share_embeddings="all"),
}


@pytest.mark.parametrize("variant", [*VARIANTS, "paper"])
def test_search_in_one_graph(variant):
    """fairseq's hypotheses and scores, for batches of one shape, of which the second finds used buffers."""
    options = VARIANTS.get(
        variant, dict(attention="paper", attention_score="additive", decoder_start="zeros")
    )
    model, dictionary = tiny_translation.random_model(**options)
    own, lengths = GraphSearch(model.decoder, dictionary, 5, 3, 9), set()
    for seed in (0, 1):
        sample = tiny_translation.random_sentences([4, 9, 2, 7, 5], dictionary, seed)
        with torch.no_grad():
            found = own.search(model.encoder(**sample["net_input"]))
        expected = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=9).generate([model], sample)
        for ours, theirs in zip(found, expected, strict=True):
            assert [tokens for tokens, _ in ours] == [one["tokens"].tolist() for one in theirs]
            scores = [one["score"].item() for one in theirs]
            # fairseq keeps scores in float32.
            torch.testing.assert_close([score for _, score in ours], scores, rtol=0, atol=2e-6)
            lengths |= {len(tokens) for tokens, _ in ours}
    assert len(lengths) > 2


# ---- On a GPU ----


@pytest.mark.gpu
def test_streams_on_a_gpu():
    """Again and again, and while memory is freed and used: what a missing event would change."""
    device = torch.device("cuda")
    cell, T, B = build_cell("hyperrhn", 64, 64, hyper_size=16, rhn_depth=2).double().to(device), 40, 4
    x, mask = random(T, B, 64, device=device).requires_grad_(), padded_mask(T, device)
    wanted, lanes = [x, *cell.parameters()], Lanes(2, device)
    expected = with_gradients(lambda: cell(x, None, mask), *wanted)
    for _ in range(10):
        found = with_gradients(lambda: run_two_streams(cell, x, None, mask, lanes=lanes, chunk=8), *wanted)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        del found


@pytest.mark.gpu
def test_search_in_one_graph_on_a_gpu():
    model, dictionary = tiny_translation.random_model(**VARIANTS["hyperlstm"])
    on_cpu, expected, found = GraphSearch(model.decoder, dictionary, 5, 3, 9), [], []
    samples = [
        tiny_translation.random_sentences([4, 9, 2, 7, 5], dictionary, seed)["net_input"] for seed in (0, 1)
    ]
    expected = [on_cpu.search(model.encoder(**sample)) for sample in samples]
    model.cuda()
    on_gpu = GraphSearch(model.decoder, dictionary, 5, 3, 9)
    for sample, results in zip(samples, expected, strict=True):
        found = on_gpu.search(model.encoder(**{key: value.cuda() for key, value in sample.items()}))
        assert [[tokens for tokens, _ in some] for some in found] == [
            [t for t, _ in some] for some in results
        ]
    assert on_gpu.graph is not None


def _char_lm(folder):
    options = "--task char_lm --arch char_lm --cell ln_hyperlstm --batch-size 2 --tokens-per-sample 7"
    return [tiny_char_lm.write_corpus(folder), *options.split()]


def _translation(folder):
    options = "--task gnmt_translation --arch hyperlstm_gnmt_small --embed-dim 12 --encoder-layers 2"
    options += " --decoder-layers 2 --max-tokens 400 --dropout 0 --criterion cross_entropy"
    return [str(tiny_translation.prepare(folder)), *options.split()]


def _handwriting(folder):
    iam = strokes_cli.write_iam(folder)
    assert strokes_cli.run("iam", "--from-dir", iam, "--dest", folder / "data", "--min-points", 2) == 0
    return [str(folder / "data"), *"--task handwriting --arch handwriting --batch-size 2".split()]


def _losses(folder, words, *options):
    fixed = (
        "--hidden-size 16 --optimizer adam --lr 0.001 --lr-scheduler fixed --warmup-updates 0 --clip-norm 5"
    )
    fixed += " --max-update 8 --seed 1 --log-format json --log-interval 1 --disable-validation"
    words = [*words, *fixed.split(), "--user-dir", USER_DIR, "--save-dir", str(folder), *options]
    command = [sys.executable, "-m", "fairseq_cli.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [record["loss"] for record in json_log(done.stdout) if record["tag"] == "train_inner"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["--fp16", "--amp", "--bf16"])
@pytest.mark.parametrize("task", [_char_lm, _translation, _handwriting])
def test_training_in_narrow_types(task, kind, tmp_path):
    words = task(tmp_path)
    expected = _losses(tmp_path / "cpu", words, "--cpu")
    found = _losses(tmp_path / "gpu", words, kind)
    assert len(expected) == 8
    # Measured on the CPU in bfloat16: 0.8 % at most, of translation.
    assert found == pytest.approx(expected, rel=2e-2)
