"""How legible a handwriting model writes: a recogniser reads 100 words that the model was never trained on.

    python -m experiments.legibility MODEL [--bias 1] [--seed 1]

MODEL is a checkpoint, a directory of `rhhn convert`, or "packaged". The recogniser is a bidirectional LSTM
of this package with torch's CTC loss (Graves et al. 2006). It learns from words in the same fonts, half
of them random letters, within some five minutes of one core, and is kept in runs/legibility. The figure is
the character error rate in percent, upper and lower case taken as one: several letters differ in size alone.
"""

import argparse
import string
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

from rhhn_fairseq.cli import running
from rhhn_fairseq.data.strokes import hershey
from rhhn_fairseq.generate.strokes import WritingConfig, write
from rhhn_fairseq.nn import LSTM
from rhhn_fairseq.saving import from_pretrained, packaged

READER = Path("runs/legibility/reader.pt")
FONTS = "futural,cursive,scripts"
SYMBOLS = " " + string.ascii_letters + ",.?!"
UPDATES, SHORT = 1400, 400
"""Updates of the recogniser. The first read a few letters: on whole words CTC's loss would rest for long."""

UNSEEN = """
pizzazz quizzical balloon coffee committee address bubble rabbit hammer kitten puzzle dizzy fuzzy jersey
giraffe zephyr xylophone quartz sphinx vortex jukebox oxygen rhythm crypt lynx nymph awkward bookkeeper
llama vacuum skiing taxiing radii aardvark savvy divvy trekked glowworm withhold hitchhiker jigsaw knapsack
mnemonic pneumonia queue wizard yacht zigzag banana umbrella volcano walnut acorn badger cactus dolphin
eclipse falcon gazelle harpoon igloo jasmine koala lantern magnet nectar octopus penguin quiver raccoon
saffron thimble urchin violin whisker expedite flummox grotesque hypnosis inkwell juggler kerosene labyrinth
marzipan nougat obelisk plankton quagmire rhubarb syrup tarantula uvula velvet wombat xenon yodel buzz fluff
grass mitten
""".split()


class Reader(nn.Module):
    """Log-probabilities of CTC [ceil(T / 3), B, S + 1] from points [T, B, 4], three a step; 0 is blank."""

    def __init__(self, H: int = 128):
        super().__init__()
        self.rnn = LSTM(12, H, num_layers=2, bidirectional=True)
        self.out = nn.Linear(2 * H, len(SYMBOLS) + 1)

    def forward(self, x_TBC: Tensor) -> Tensor:
        T, B, _ = x_TBC.shape
        triples = F.pad(x_TBC, (0, 0, 0, 0, 0, -T % 3)).reshape(-1, 3, B, 4).transpose(1, 2)
        return self.out(self.rnn(triples.reshape(-1, B, 12))[0]).log_softmax(-1)

    @torch.no_grad()
    def read(self, points: np.ndarray) -> str:
        """Returns the text of a line [N, 3] by the best symbol of each step."""
        best = self(features(points)[:, None])[:, 0].argmax(-1)
        return "".join(SYMBOLS[symbol - 1] for symbol in torch.unique_consecutive(best).tolist() if symbol)


def features(points: np.ndarray) -> Tensor:
    """Returns (dx, dy, pen bit, whether the pen came through the air) [N, 4], in median steps."""
    lengths = np.hypot(*points[:, :2].T)
    offsets = points[:, :2] / max(np.median(lengths[lengths > 0]), 1e-6)
    air = np.concatenate([[1], points[:-1, 2]])
    columns = [np.clip(offsets, -20, 20), points[:, 2:], air[:, None]]
    return torch.from_numpy(np.concatenate(columns, axis=1).astype(np.float32))


def train() -> Reader:
    """Returns a recogniser that has learnt."""
    torch.manual_seed(1)
    rng, fonts, reader = np.random.default_rng(5), hershey._load_fonts(FONTS), Reader()
    optimizer = torch.optim.Adam(reader.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=UPDATES, pct_start=0.1)
    for update in trange(UPDATES, desc="recogniser", unit="update"):
        short = update < SHORT
        look = dict(step=float(rng.uniform(0.06, 0.14)), jitter=float(rng.uniform(0, 0.012)))
        config = hershey.HersheyConfig(seed=1000 + update, max_words=1 if short else 2, **look)
        known = [] if short else list(rng.choice(hershey.WORDS, 16))
        words = [*known, *(_letters(rng, 2 + update // 100 if short else 9) for _ in range(32 - len(known)))]
        lines = [hershey._line(config, fonts, words, "train", n) for n in range(32 if short else 16)]
        inputs = nn.utils.rnn.pad_sequence([features(line.points) for line in lines])
        targets = [torch.tensor([SYMBOLS.index(symbol) + 1 for symbol in line.text]) for line in lines]
        steps = torch.tensor([-(-len(line.points) // 3) for line in lines])
        sizes = torch.tensor([len(target) for target in targets])
        loss = F.ctc_loss(reader(inputs), torch.cat(targets), steps, sizes, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return reader


def _letters(rng: np.random.Generator, most: int) -> str:
    return "".join(rng.choice(list(string.ascii_lowercase), size=rng.integers(1, most)))


def error_rate(read: list[str], texts: list[str]) -> float:
    """Returns the edit distances of the texts over their length, in percent."""
    wrong = sum(_distance(a.strip().lower(), b.lower()) for a, b in zip(read, texts, strict=True))
    return 100 * wrong / sum(map(len, texts))


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def load(name: str) -> nn.Module:
    """Returns the model of a checkpoint, of a directory, or that of the package."""
    if name == "packaged" or Path(name).is_dir():
        return from_pretrained(packaged("handwriting") if name == "packaged" else name).float().eval()
    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import load_handwriting

    return load_handwriting(name)[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.legibility", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--bias", type=float, default=1.0, help="of the writing (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the writing (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, reader = load(args.model), Reader()
    if not READER.exists():
        READER.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train().state_dict(), READER)
    reader.load_state_dict(torch.load(READER))
    config, fonts = hershey.HersheyConfig(seed=7, max_words=1), hershey._load_fonts(FONTS)
    real = [hershey._line(config, fonts, UNSEEN, "test", number) for number in range(100)]
    own = error_rate([reader.read(line.points) for line in real], [line.text for line in real])
    written = write(model, WritingConfig(lines=1, bias=args.bias, seed=args.seed), UNSEEN)
    read = [reader.read(line.points) for line in written]
    print(f"recogniser on real strokes: {own:.1f} %")
    ended = sum(line.finished for line in written)
    print(f"{args.model}: {error_rate(read, UNSEEN):.1f} %, {ended} of 100 ended")
    wrong = [f"{word} as {text.strip()}" for word, text in zip(UNSEEN, read, strict=True)]
    print("; ".join(pair for pair in wrong if pair.split(" as ")[0] != pair.split(" as ")[1].lower()))


if __name__ == "__main__":
    raise SystemExit(running.run(main))
