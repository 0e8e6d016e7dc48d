"""Ten pictures of a lecture on recurrent networks, each trained and drawn within a minute on one core.

``python -m experiments.lecture PICTURE`` draws one, ``all`` draws every one. The networks read the source of
Python's standard library, bits or random numbers, so nothing is downloaded.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from experiments.hopfield import Hopfield, capacity_curve, flip
from experiments.ngram import NGrams
from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.data.problems.generated import Adding, TemporalXor
from rhhn_fairseq.data.text.corpora import stdlib
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.data.text.words import prompt_indices
from rhhn_fairseq.files import replace_file
from rhhn_fairseq.generate.characters import SamplingConfig, generate
from rhhn_fairseq.inspection.gradients import gradient_flow
from rhhn_fairseq.inspection.plotting import add_legend, colour_of, encode, literal, new_figure, styled
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.nn import CharacterNetwork, detach_state, from_pretrained, layer_of, packaged

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials" / "lecture"
PICTURES = {}


def picture(draw):
    """Enters a function that returns a figure under its name, drawn in the common style."""
    PICTURES[draw.__name__] = styled()(draw)
    return PICTURES[draw.__name__]


class Reader(nn.Module):
    """A recurrent layer and a linear output at every step, [T, B, C] -> [T, B, classes]."""

    def __init__(self, cell: str, C: int, H: int, classes: int, **options):
        super().__init__()
        self.layer, self.output = layer_of(cell)(C, H, **options), nn.Linear(H, classes)

    def forward(self, x, state=None):
        y, state = self.layer(x, state)
        return self.output(y), state


def update(model: nn.Module, optimizer, loss, clip: float = 1.0) -> float:
    """Makes one update and returns the norm of the gradient before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(norm)


def source(size: int = 400_000) -> tuple[CharVocabulary, torch.Tensor, torch.Tensor]:
    """Returns the symbols of the standard library's source, and its text to train on and to test with."""
    codes = np.frombuffer(stdlib(size).inputs[0].source.data, dtype=np.uint8)
    vocabulary = CharVocabulary.from_codes(sorted(set(codes.tolist())), "text")
    text = torch.from_numpy(vocabulary.encode_codes(codes))
    return vocabulary, text[:size], text[size : size + size // 20]


def read(model: CharacterNetwork, tokens: torch.Tensor, state=None):
    """Returns the mean loss in bits over tokens [T + 1, B], and the state after them."""
    y, state = model.stack(model.embed(tokens[:-1]), state)
    loss = F.cross_entropy(model.output(y).flatten(0, 1), tokens[1:].flatten())
    return loss / np.log(2), tuple(entry.detach() for entry in state)


def train_text(vocabulary, text, cell: str, updates: int, at: dict, lr=0.005, B=16, T=64, H=128):
    """Trains a character model on lanes of a text; ``at[n]`` is called with it after n updates."""
    torch.manual_seed(1)
    size = len(vocabulary.model_indices())
    model = CharacterNetwork(StackConfig(cell=cell, input_size=size, hidden_size=H), vocabulary)
    optimizer, state = torch.optim.Adam(model.parameters(), lr=lr), None
    lanes = text[: len(text) // B * B].view(B, -1).T
    at.get(0, lambda model: None)(model)
    for n in range(1, updates + 1):
        start = (n - 1) * T % (len(lanes) - T)
        loss, state = read(model, lanes[start : start + T + 1], state)
        update(model, optimizer, loss)
        at.get(n, lambda model: None)(model)
    return model


def test_bits(model, test) -> float:
    """Returns bits per character of a text that is read in 50 lanes."""
    with torch.no_grad():
        return float(read(model, test[: len(test) // 50 * 50].view(50, -1).T)[0])


@picture
def xor(figure):
    """Elman's XOR: every third bit is the exclusive or of the two before it; the error by position."""
    problem, generator = TemporalXor(30), np.random.default_rng(1)
    axes = figure.subplots()
    # The state of Jordan's network is its output, so that its width says how much it remembers.
    systems = ("elman", 16, {}), ("jordan", 16, {}), ("jordan", 2, {"inner_size": 16})
    for n, (cell, H, options) in enumerate(systems):
        torch.manual_seed(1)
        model = Reader(cell, 1, H, 2, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(500):
            x, y = map(torch.from_numpy, problem.render(problem.draw(generator, 32)))
            update(model, optimizer, F.cross_entropy(model(x.transpose(0, 1))[0].permute(1, 2, 0), y))
        x, y = map(torch.from_numpy, problem.render(problem.draw(generator, 2000)))
        with torch.no_grad():
            chance = model(x.transpose(0, 1))[0].softmax(-1)[..., 1].T
        error = (chance - y).square().mean(0).sqrt()
        look = {"marker": "osD"[n], "color": colour_of(n), "markersize": (7, 5, 5)[n]}
        axes.plot(range(2, 31), error, label=f"{cell.title()}, {H} units", **look)
    axes.axhline(0.5, color="0.5", linestyle=":", label="chance")
    axes.set_xticks(range(3, 31, 3))
    axes.set(xlabel="position of the predicted bit", ylabel="root mean squared error", ylim=(0, 0.6))
    axes.set_title("Exclusive or in time: only every third bit can be known")
    add_legend(figure, axes, 4)


@picture
def vanishing(figure):
    """Vanishing gradients: how much of the last step's gradient reaches earlier steps."""
    vocabulary, text, test = source()
    tokens, axes = test[: 8 * 61].view(8, 61).T, figure.subplots()
    for n, cell in enumerate(("elman", "gru", "lstm")):
        norms, name = [], cell.upper() if n else "Elman"
        measure = dict.fromkeys((0, 300), lambda model, to=norms: to.append(gradient_flow(model, tokens)[0]))
        train_text(vocabulary, text, cell, 300, measure)
        axes.semilogy(range(1, 61), norms[0], "--", color=colour_of(n), label=f"{name}, before training")
        axes.semilogy(range(1, 61), norms[1], color=colour_of(n), label=name)
    axes.set(xlabel="step; the loss is that of the last", ylabel="norm of dLoss / d state")
    axes.set_title("How much of the last step's gradient arrives, before and after training")
    add_legend(figure, axes, 3)


@picture
def truncation(figure):
    """Truncated BPTT: the network must give the bit that it read ten steps before."""
    axes, delay, T = figure.subplots(), 10, 240
    for n, length in enumerate((5, 8, 12, 20, 40)):
        torch.manual_seed(1)
        model, curve, generator = Reader("lstm", 1, 32, 2), [], torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(25):
            bits, state = torch.randint(2, (T + delay, 32), generator=generator), None
            for start in range(0, T, length):
                x = bits[delay + start : delay + start + length, :, None].float()
                y, state = model(x, state)
                state = detach_state(state)
                loss = F.cross_entropy(y.flatten(0, 1), bits[start : start + length].flatten())
                update(model, optimizer, loss)
                curve.append(float(loss.detach()) / np.log(2))
        means = np.array(curve).reshape(25, -1).mean(1)
        axes.plot(np.arange(1, 26) * T, means, color=colour_of(n), label=f"{length} steps")
    axes.set(xlabel="steps read", ylabel="loss in bits", ylim=(0, 1.1))
    axes.set_title("A bit from ten steps before, by the length of truncated back-propagation")
    add_legend(figure, axes, 5)


@picture
def clipping(figure):
    """Gradient clipping: an IRNN on the adding problem, with and without."""
    problem, panels = Adding(60), figure.subplots(1, 2)
    for n, (clip, label) in enumerate(((float("inf"), "no clipping"), (1.0, "norm clipped to 1"))):
        torch.manual_seed(1)
        model, generator = Reader("irnn", 2, 64, 1), np.random.default_rng(1)
        optimizer, norms, losses = torch.optim.SGD(model.parameters(), lr=0.02), [], []
        for _ in range(250):
            x, y = map(torch.from_numpy, problem.render(problem.draw(generator, 32)))
            loss = F.mse_loss(model(x.transpose(0, 1))[0][-1, :, 0], y.flatten())
            norms.append(update(model, optimizer, loss, clip))
            losses.append(float(loss.detach()))
        for axes, values in zip(panels, (norms, losses), strict=True):
            axes.semilogy(values, color=colour_of(n), label=label, linewidth=1)
    for axes, title in zip(panels, ("norm of the gradient, before clipping", "loss"), strict=True):
        axes.set(xlabel="updates")
        axes.set_title(title, fontsize=10.5)
    panels[1].axhline(1 / 6, color="0.5", linestyle=":")
    add_legend(figure, panels[0])


@picture
def dropout(figure):
    """Dropout variants as masks: white is dropped, kept from the step before, or cut."""
    T, H = 24, 32
    kinds = {
        "recurrent dropout, every step": (dict(recurrent_dropout=0.3), "update", True),
        "recurrent dropout, one mask": (
            dict(recurrent_dropout=0.3, recurrent_mask="sequence"), "update", True),
        "variational dropout (Gal)": (dict(gal_dropout=0.3), "gal", True),
        "zoneout: white keeps its value": (dict(zoneout=0.3), "zoneout", False),
        "h-detach: white cuts gradients": (dict(h_detach=0.3), "h_detach", False),
    }  # fmt: skip
    panels = figure.subplots(2, 3).flatten()
    for axes, (title, (options, name, kept)) in zip(panels, kinds.items(), strict=False):
        generator = torch.Generator().manual_seed(1)
        mask = build_cell("lstm", 4, H, **options).sample_noise(T, 1, generator=generator)[name]
        image = mask[:, 0].bool().expand(T, H)
        axes.imshow((image if kept else ~image).T.numpy(), cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
        axes.set_title(title, fontsize=8.5)
        axes.set(xlabel="step", ylabel="unit")
    keep = torch.rand(H, H, generator=torch.Generator().manual_seed(1)) > 0.3
    panels[-1].imshow(keep.numpy(), cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
    panels[-1].set_title("weight drop: one mask a pass", fontsize=8.5)
    panels[-1].set(xlabel="unit", ylabel="unit")
    for axes in panels:
        axes.grid(False)


@picture
def gates(figure):
    """LSTM and GRU beside Elman's network: bits per character, and a gate of each while it reads."""
    vocabulary, text, test = source()
    line = "    def close(self):\n        return self.file is None"
    panels = figure.subplots(3, 1, height_ratios=(3, 1, 1))
    steps = (20, 50, 100, 150, 200, 300)
    for n, cell in enumerate(("elman", "gru", "lstm")):
        bits = []
        score = dict.fromkeys(steps, lambda m, b=bits: b.append(test_bits(m, test)))
        model = train_text(vocabulary, text, cell, steps[-1], score)
        panels[0].plot(steps, bits, color=colour_of(n), marker="osD"[n], label=cell.upper() if n else "Elman")
        if not n:
            continue
        layer, state, rows = model.stack.cells[0], None, []
        for token in torch.tensor(prompt_indices(vocabulary, line)):
            x = model.embed(token.view(1, 1))
            h = x.new_zeros(1, 128) if state is None else state[0]
            with torch.no_grad():
                sums = layer.project(x)[0][0] + h @ layer.weight_h
                _, state = model.stack(x, state)
            # The LSTM's columns are i, f, g, o, with 1 added to f; the GRU's are r, z, n.
            rows.append((sums[0, 128:256] + (cell == "lstm")).sigmoid())
        gate = torch.stack(rows[1:]).T
        strongest = gate[gate.std(1).argsort(descending=True)[:16]].numpy()
        panels[n].imshow(strongest, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        panels[n].set_xticks(range(len(line)), [c.replace("\n", "↵") for c in line], family="monospace")
        panels[n].set(ylabel="unit", yticks=[])
        panels[n].set_title(("update gate z of the GRU", "forget gate of the LSTM")[n - 1], fontsize=9)
        panels[n].grid(False)
    panels[0].set(xlabel="updates", ylabel="bits per character", ylim=(2, 4.2))
    add_legend(figure, panels[0], 3)


@picture
def temperature(figure):
    """Sampling temperature: the next character's distribution, and text that is drawn from it."""
    model, prompt, shown = from_pretrained(packaged("characters")), "def ", 16
    indices = prompt_indices(model.vocabulary, prompt)
    with torch.no_grad():
        y, _ = model.stack(model.embed(torch.tensor(indices)[:, None]))
        logits = model.output(y[-1])[0]
    best = logits.topk(shown).indices
    names = [literal(repr(model.vocabulary.decode([int(n)]))[1:-1]) for n in best]
    axes, lines = figure.subplots(), []
    for n, value in enumerate((0.3, 0.7, 1.0, 1.5)):
        shares = (logits / value).softmax(-1)[best]
        axes.bar(np.arange(shown) + 0.2 * n - 0.3, shares, 0.2, color=colour_of(n), label=f"{value}")
        drawn = generate(model, indices, SamplingConfig(temperature=value))
        text = model.vocabulary.decode([next(drawn) for _ in range(60)])
        lines.append(f"{value}  {prompt}{repr(text)[1:-1]:.90}")
    axes.set_xticks(range(shown), names, family="monospace")
    axes.set(ylabel="probability", xlabel=f"character after {prompt!r}\n\n" + literal("\n".join(lines)))
    axes.xaxis.label.set(family="monospace", fontsize=8, horizontalalignment="left", x=0)
    axes.set_title("The next character at four temperatures")
    axes.legend(title="temperature")


@picture
def ngrams(figure):
    """Kneser-Ney: n-grams of every order against an LSTM that learns for a minute."""
    vocabulary, text, test = source()
    places = np.searchsorted(np.sort(vocabulary.model_indices()), torch.cat([text, test]).numpy())
    model = NGrams(places[: len(text)], len(vocabulary.model_indices()), 12)
    bits = [-np.log2(p).mean() for p in model.probabilities(places[len(text) :])]
    axes = figure.subplots()
    axes.plot(range(1, 13), bits, marker="o", label="n-grams, Kneser-Ney")
    steps, scores = (100, 400, 1200), []
    train_text(
        vocabulary, text, "lstm", steps[-1], dict.fromkeys(steps, lambda m: scores.append(test_bits(m, test)))
    )
    for n, (step, score) in enumerate(zip(steps, scores, strict=True), 1):
        axes.axhline(score, color=colour_of(n), linestyle="--", label=f"LSTM, {step} updates: {score:.2f}")
    axes.set(xlabel="order n", ylabel="bits per character of the test text", xticks=range(1, 13))
    axes.set_title(f"Best n-gram: order {np.argmin(bits) + 1}, {min(bits):.2f} bits per character")
    add_legend(figure, axes)


LETTERS = {
    "H": "#   # #   # #   # ##### #   # #   # #   #",
    "O": " ###  #   # #   # #   # #   # #   #  ### ",
    "P": "####  #   # #   # ####  #     #     #    ",
}


@picture
def hopfield(figure):
    """Hopfield's network: recall of damaged letters, and the capacity of random patterns."""
    patterns = []
    for letter in LETTERS.values():
        rows = [list(letter[start : start + 5]) for start in range(0, 42, 6)]
        patterns.append(np.where(np.array(rows) == "#", 1.0, -1.0).repeat(3, 0).repeat(3, 1).flatten())
    memory, generator = Hopfield(np.array(patterns)), np.random.default_rng(1)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.3))
    for row, pattern in zip(left.subplots(3, 3), patterns, strict=True):
        damaged = flip(pattern, 0.25, generator)
        states = damaged, memory.recall(damaged, generator), pattern
        for axes, state, title in zip(row, states, ("damaged", "recalled", "stored"), strict=True):
            axes.imshow(state.reshape(21, 15), cmap="Blues", vmin=-1, vmax=1.4)
            axes.set(xticks=[], yticks=[])
            axes.set_title(title, fontsize=9)
    loads = np.arange(0.04, 0.25, 0.02)
    axes = right.subplots()
    for n, units in enumerate((100, 400)):
        overlap = capacity_curve(units, loads, 8, 1)
        axes.plot(loads, overlap, marker="os"[n], color=colour_of(n), label=f"{units} units")
    axes.axvline(0.138, color="0.5", linestyle=":", label="0.138 (Amit et al. 1985)")
    axes.set(xlabel="patterns per unit", ylabel="overlap after recall", ylim=(0, 1.05))
    axes.legend()


@picture
def tuning(figure):
    """Tuning, after Melis: which cell is better depends on how many settings have been tried."""
    vocabulary, text, test = source()
    generator, panels = np.random.default_rng(1), figure.subplots(1, 2)
    for n, cell in enumerate(("elman", "lstm")):
        rates, bits = 10 ** generator.uniform(-4, -1, 12), []
        for rate in rates:
            model = train_text(vocabulary, text, cell, 60, {}, lr=rate, H=64)
            bits.append(test_bits(model, test))
        label = cell.upper() if n else "Elman"
        panels[0].semilogx(rates, bits, "os"[n], color=colour_of(n), label=label)
        # The best of k of these trials, on average over all choices with replacement (Dodge et al. 2019).
        ordered, k = np.sort(bits), np.arange(1, 13)
        share = (1 - np.arange(13)[:, None] / 12) ** k
        panels[1].plot(k, (ordered[:, None] * (share[:-1] - share[1:])).sum(0), color=colour_of(n))
    panels[0].set(xlabel="learning rate, drawn at random", ylabel="bits per character")
    panels[1].set(xlabel="trials", ylabel="best of them, on average")
    add_legend(figure, panels[0])


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.lecture", description=__doc__)
    parser.add_argument("picture", choices=[*PICTURES, "all"])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name in PICTURES if args.picture == "all" else [args.picture]:
        figure = new_figure(4.5)
        PICTURES[name](figure)
        args.output.mkdir(parents=True, exist_ok=True)
        with replace_file(args.output / f"{name}.png") as file:
            file.write(encode(figure, "png"))
        print(f"written: {args.output / name}.png")


if __name__ == "__main__":
    main()
