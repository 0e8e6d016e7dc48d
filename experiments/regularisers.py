"""What regularises a hypernetwork: trainings of minutes on a tenth of Penn Treebank, which they overfit.

    python -m experiments.regularisers PTB RECORD [NAME=VALUE ...]

PTB is a folder with ``ptb.train.txt.gz`` and ``ptb.valid.txt.gz``. RECORD gets a line of JSON for a training:
its options, the fields of ``Trial``, and bits per character on the training text in the last epoch and on the
validation text after each. All of it runs in ``rhhn_fairseq.nn`` on one thread: Adam with a rate that falls
to zero, clip 1, lanes of 100 symbols with carried states, which are zeros at the start of an epoch.
"""

import gzip
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import rhhn_fairseq.nn as rnn

STEPS, WARM_UP, VALID_LANES, VALID_STEPS = 100, 100, 32, 500


@dataclass
class Trial:
    """Options of a training; dropouts and penalties are off at 0.

    Attributes:
        share: of the training text; of the validation text three times that, at most all.
        out, rec: dropout of the layer's output, of the update.
        ar: penalty on outputs.
        hyper_drop, z_drop: weight drop inside the hypernetwork, and of the map from its state to z.
        spread, z: penalties on how far scaling vectors are from their mean, and on what the hypernetwork's
            state adds to the embeddings z; they need the slow loop over steps.
        learned: 1 for a learned initial state.
    """

    cell: str = "LNHyperLSTM"
    width: int = 196
    hyper: int = 64
    epochs: int = 10
    batch: int = 16
    lr: float = 0.012
    share: float = 0.1
    seed: int = 1
    out: float = 0.0
    rec: float = 0.0
    ar: float = 0.0
    hyper_drop: float = 0.0
    z_drop: float = 0.0
    spread: float = 0.0
    z: float = 0.0
    learned: int = 0

    def make(self, symbols: int) -> nn.Module:
        options: dict = {"recurrent_dropout": self.rec}
        options |= {"initial_state": "learned"} if self.learned else {}
        options |= {"backend": "reference"} if self.spread or self.z else {}
        options |= {"hyper_size": self.hyper} if "Hyper" in self.cell else {}
        return getattr(rnn, self.cell)(symbols, self.width, **options)

    def drops(self) -> dict[str, float]:
        """Returns the rate of each weight of a HyperLSTM layer that is dropped, by its name."""
        rates = {
            "weight_hyper": self.hyper_drop,
            "hyper.weight_h": self.hyper_drop,
            "scaling.weight_z": self.z_drop,
        }
        return {f"stack.cells.0.{name}": rate for name, rate in rates.items() if rate}


@torch.no_grad()
def evaluate(layer: nn.Module, head: nn.Module, text: Tensor, symbols: int) -> float:
    """Returns bits per character of the text in 32 lanes."""
    length, state, total = len(text) // VALID_LANES, None, 0.0
    lanes = text[: length * VALID_LANES].view(VALID_LANES, length).t()
    layer.eval()
    for x, y in zip(lanes[:-1].split(VALID_STEPS), lanes[1:].split(VALID_STEPS), strict=True):
        h, state = layer(F.one_hot(x, symbols).float(), state)
        total += F.cross_entropy(head(h).flatten(0, 1), y.flatten(), reduction="sum").item()
    layer.train()
    return total / (length - 1) / VALID_LANES / math.log(2)


def train(trial: Trial, train_text: Tensor, valid_text: Tensor, symbols: int) -> dict:
    """Trains and returns the line of the record."""
    torch.manual_seed(trial.seed)
    layer, head = trial.make(symbols), nn.Linear(trial.width, symbols)
    nn.init.xavier_uniform_(head.weight)
    nn.init.zeros_(head.bias)
    named, weights = dict(layer.named_parameters()), [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(weights, lr=trial.lr)
    scaling: list[tuple[Tensor, Tensor]] = []
    if trial.spread or trial.z:
        # The hypernetwork's state and d_h [4, B, H] at every step; evaluation does not read them.
        maps = layer.stack.cells[0].scaling
        maps.register_forward_hook(lambda *call: scaling.append((call[1][0], call[2][0])))
    length = len(train_text) // trial.batch
    lanes = train_text[: length * trial.batch].view(trial.batch, length).t()
    updates = (length - 1) // STEPS
    total, done, start, valid, mean = updates * trial.epochs, 0, time.process_time(), [], 0.0
    for _ in range(trial.epochs):
        state, mean = None, 0.0
        for t in range(0, updates * STEPS, STEPS):
            rate = trial.lr * min(1.0, (done + 1) / WARM_UP) * (1 - done / total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            x, y = lanes[t : t + STEPS], lanes[t + 1 : t + STEPS + 1]
            state = None if state is None else rnn.detach_state(state)
            dropped = {name: F.dropout(named[name], rate) for name, rate in trial.drops().items()}
            h, state = functional_call(layer, dropped, (F.one_hot(x, symbols).float(), state))
            loss = F.cross_entropy(head(F.dropout(h, trial.out)).flatten(0, 1), y.flatten())
            full = loss + trial.ar * h.pow(2).mean()
            if scaling:
                e, d = map(torch.stack, zip(*scaling, strict=True))
                full = full + trial.spread * (d - d.mean((0, 2), keepdim=True).detach()).pow(2).mean()
                full = full + trial.z * (e @ maps.weight_z).pow(2).mean()
                scaling.clear()
            optimizer.zero_grad()
            full.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            done, mean = done + 1, mean + loss.item() / updates / math.log(2)
        valid.append(round(evaluate(layer, head, valid_text, symbols), 4))
        scaling.clear()
    count, seconds = sum(weight.numel() for weight in weights), round(time.process_time() - start)
    return asdict(trial) | {"parameters": count, "train": round(mean, 4), "valid": valid, "seconds": seconds}


def main(folder: str, record: str, *words: str) -> None:
    kinds = {field.name: field.type for field in fields(Trial)}
    given = dict(word.split("=") for word in words)
    trial = Trial(**{name: kinds[name](value) for name, value in given.items()})
    texts = [
        gzip.decompress((Path(folder) / f"ptb.{split}.txt.gz").read_bytes()).decode()
        for split in ("train", "valid")
    ]
    symbols = sorted(set("".join(texts)))
    number = {symbol: n for n, symbol in enumerate(symbols)}
    shares = trial.share, min(1.0, 3 * trial.share)
    cut = [text[: int(share * len(text))] for text, share in zip(texts, shares, strict=True)]
    torch.set_num_threads(1)
    line = train(trial, *(torch.tensor([number[s] for s in text]) for text in cut), len(symbols))
    with open(record, "a") as file:
        print(json.dumps(line), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
