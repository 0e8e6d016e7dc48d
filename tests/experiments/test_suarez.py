"""The author's HyperRHN and RHN state dicts against a transcription of the paper's equations in numpy.

No checkpoint of the author's lies here. The tests write state dicts with the names and shapes of the
repository jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS and random weights.
"""

import os
from collections import OrderedDict

import numpy as np
import pytest
import torch

from experiments import suarez
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.data.text.corpora import ptb
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.models.loading import load_char_lm

LINES = ["the quick brown fox jumps over N lazy dogs", "it 's <unk> & co. #1 $ 2,345-67890 * \\/"]
TINY = dict(embedding=3, hidden=7, depth=3, hyper=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """PTB's files in small; the prepared directory, and the sorted symbols."""
    folder = tmp_path_factory.mktemp("ptb")
    text = "".join(f" {line} \n" for line in LINES * 30)
    for split in ("train", "valid", "test"):
        (folder / f"ptb.{split}.txt").write_text(text)
    prepare(ptb("raw", folder, folder), folder / "data", verify=False)
    return folder / "data", sorted(set(text))


def linear(rng, name: str, out: int, inner: int) -> dict:
    """torch.nn.Linear's two tensors."""
    bound = inner**-0.5
    values = {"weight": rng.uniform(-2 * bound, 2 * bound, (out, inner)), "bias": rng.uniform(-1, 1, out)}
    return {f"{name}.{key}": torch.from_numpy(value).float() for key, value in values.items()}


def state_dict(symbols: int, embedding: int, hidden: int, depth: int, hyper: int | None) -> OrderedDict:
    """What ``torch.save(net.state_dict())`` of the author's models holds."""
    rng = np.random.default_rng(7)
    state = {"embed.weight": torch.from_numpy(rng.normal(size=(symbols, embedding))).float()}
    cells = {"cell.": hidden} if hyper is None else {"cell.HyperCell.": hyper, "cell.RHNCell.": hidden}
    for prefix, width in cells.items():
        state |= linear(rng, f"{prefix}inp", 2 * width, embedding)
        for layer in range(depth):
            state |= linear(rng, f"{prefix}cell.{layer}", 2 * width, width)
    if hyper is not None:
        for layer in range(depth):
            state |= linear(rng, f"cell.upscaleProj.{layer}", hidden, hyper)
    return OrderedDict(state | linear(rng, "unembed", symbols, hidden))


class Transcription:
    """Suarez 2017, equations 3, 6 and 7, with the author's names; one sequence in float64.

    At the first step layer 0 has neither its recurrent product nor the bias of it.
    """

    def __init__(self, state: dict, depth: int):
        self.p = {name: weight.double().numpy() for name, weight in state.items()}
        self.depth = depth

    def recurrent(self, name: str, v: np.ndarray) -> np.ndarray:
        return self.p[f"{name}.weight"] @ v

    def highway(self, a: np.ndarray, s: np.ndarray) -> np.ndarray:
        h, t = np.split(a, 2)
        h, t = np.tanh(h), 1 / (1 + np.exp(-t))
        return (1 - t) * s + t * h

    def run(self, indices) -> np.ndarray:
        """Logits [T, V] in the author's order of symbols."""
        hyper = "cell.HyperCell.inp.weight" in self.p
        main = "cell.RHNCell." if hyper else "cell."
        s = np.zeros(self.p["unembed.weight"].shape[1])
        s_hyper = np.zeros(self.p["cell.upscaleProj.0.weight"].shape[1]) if hyper else None
        logits = []
        for step, index in enumerate(indices):
            x = self.p["embed.weight"][index]
            for layer in range(self.depth):
                z = np.ones(2 * len(s))
                if hyper:
                    s_hyper = self.layer(
                        "cell.HyperCell.", layer, step, x, s_hyper, np.ones(2 * len(s_hyper))
                    )
                    name = f"cell.upscaleProj.{layer}"
                    z = np.tile(self.recurrent(name, s_hyper) + self.p[f"{name}.bias"], 2)
                s = self.layer(main, layer, step, x, s, z)
            logits.append(self.recurrent("unembed", s) + self.p["unembed.bias"])
        return np.stack(logits)

    def layer(self, prefix: str, layer: int, step: int, x, s, z) -> np.ndarray:
        a = np.zeros(2 * len(s))
        if layer == 0:
            a += self.recurrent(f"{prefix}inp", x) * z + self.p[f"{prefix}inp.bias"]
        if layer > 0 or step > 0:
            name = f"{prefix}cell.{layer}"
            a += self.recurrent(name, s) * z + self.p[f"{name}.bias"]
        return self.highway(a, s)


def write(folder, state, characters) -> tuple:
    # The format of the PyTorch of 2017.
    torch.save(state, folder / "weights.pt", _use_new_zipfile_serialization=False)
    vocabulary = {symbol: index for index, symbol in enumerate(characters)}
    (folder / "vocab.txt").write_text(repr(vocabulary), encoding="utf-8")
    return folder / "weights.pt", folder / "vocab.txt"


def run(capsys, weights, vocabulary, data, output, status=0) -> str:
    capsys.readouterr()
    arguments = [weights, vocabulary, "--data", data, "--output", output]
    assert cli.run(lambda: suarez.main([str(argument) for argument in arguments])) == status
    captured = capsys.readouterr()
    if status:
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err if status else captured.out


@pytest.mark.parametrize("kind", ["hyperrhn", "rhn"])
def test_outputs_equal_the_equations(corpus, tmp_path, capsys, kind):
    data, characters = corpus
    sizes = TINY | ({"hyper": None} if kind == "rhn" else {})
    state = state_dict(len(characters), **sizes)
    weights, vocabulary = write(tmp_path, state, characters)
    said = run(capsys, weights, vocabulary, data, tmp_path / "ours.pt")
    assert f"converted: {kind}_ptb, {sum(w.numel() for w in state.values()):,} weights" in said
    model, task = load_char_lm(str(tmp_path / "ours.pt"))
    entries = open_stream(data / "test", len(task.dictionary))[:12].astype(np.int64)
    with torch.no_grad():
        ours = model.double()(torch.from_numpy(entries)[None])[0][0].numpy()
    theirs = Transcription(state, sizes["depth"]).run(
        [characters.index(symbol) for symbol in task.vocabulary.decode(entries)]
    )
    order = task.vocabulary.encode("".join(characters))
    # Two orders of summation in float64.
    np.testing.assert_allclose(ours[:, order], theirs, rtol=0, atol=1e-11)


MISTAKES = {
    "a layer too few": (
        lambda s: (s.pop("cell.RHNCell.cell.2.weight"), s.pop("cell.RHNCell.cell.2.bias")),
        "weights.pt: has cell.HyperCell.cell.2.weight, which",
    ),
    "transposed": (lambda s: s.update({"cell.upscaleProj.1.weight": torch.zeros(4, 7)}), "stack expects"),
    "code": (lambda s: s.update(embed=Shell("touch ran")), "Weights only load failed"),
}


class Shell:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_state_dicts_are_one_line(corpus, tmp_path, capsys, monkeypatch, mistake):
    data, characters = corpus
    change, message = MISTAKES[mistake]
    state = state_dict(len(characters), **TINY)
    change(state)
    weights, vocabulary = write(tmp_path, state, characters)
    monkeypatch.chdir(tmp_path)
    assert message in run(capsys, weights, vocabulary, data, tmp_path / "ours.pt", status=1)
    assert not (tmp_path / "ours.pt").exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("__import__('os').system('true')", "malformed node or string"),
        ("{'a': 0, 'b': 2}", "vocab.txt: its indices are not 0 to "),
        (repr({chr(0x4E00 + index): index for index in range(40)}), "KeyError"),
    ],
)
def test_wrong_vocabularies_are_one_line(corpus, tmp_path, capsys, text, message):
    data, characters = corpus
    count = 40 if text.startswith("{'一'") else len(characters)
    weights, vocabulary = write(tmp_path, state_dict(count, **TINY), characters)
    vocabulary.write_text(text, encoding="utf-8")
    assert message in run(capsys, weights, vocabulary, data, tmp_path / "ours.pt", status=1)
