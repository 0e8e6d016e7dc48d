"""What 8-bit weights cost a character language model in bits, and what they save in time.

Usage: python -m rhhn_fairseq.bench.quantised checkpoints/checkpoint_best.pt ptb.test.txt

The text is read in lanes of equal length, each from a zero state; every symbol but a lane's first is scored.
Both models read the same lanes. Time is that of one step of decoding with a state, the median of five
rounds.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.bench.machine import describe_machine
from rhhn_fairseq.cli import run
from rhhn_fairseq.data.text.prompt import prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.loading import load_char_lm
from rhhn_fairseq.networks.character import CharacterNetwork
from rhhn_fairseq.nn import quantize_dynamic

CHUNK = 50
ROUNDS, STEPS = 5, 200


@torch.no_grad()
def bits_per_character(model: CharacterNetwork, tokens_BT: Tensor) -> float:
    """Returns the mean bits of every symbol but the first of each lane."""
    nats, state = 0.0, None
    inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
    for read, wanted in zip(inputs.split(CHUNK, dim=1), targets.split(CHUNK, dim=1), strict=True):
        y_TBH, state = model.stack(model.embed(read.T), state)
        logits = model.output(y_TBH).flatten(0, 1).double()
        nats += F.cross_entropy(logits, wanted.T.flatten(), reduction="sum").item()
    return nats / targets.numel() / math.log(2)


@torch.no_grad()
def microseconds(model: CharacterNetwork, rows: int) -> float:
    """Returns the microseconds of one step of decoding."""
    tokens = model.indices[:1].expand(1, rows)
    _, state = model.stack(model.embed(tokens))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            y_TBH, _ = model.stack(model.embed(tokens), state)
            model.output(y_TBH)
        rounds.append((time.perf_counter() - start) / STEPS * 1e6)
    return statistics.median(rounds)


def lanes(model: CharacterNetwork, path: str, count: int, symbols: int) -> Tensor:
    """Returns the beginning of a text as dictionary indices [B, T], in the model's reading order.

    Raises:
        UsageError: the text has symbols that the model does not know, or is too short for the lanes.
    """
    if symbols < 2:
        raise UsageError(f"--symbols {symbols} is too small, the smallest is 2")
    try:
        text = Path(path).read_text(encoding="utf-8")[:symbols]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 ({error})") from error
    # The first is what the model reads before a text.
    tokens = torch.tensor(prompt_indices(model.vocabulary, text, path)[1:])
    if not 1 <= count <= len(tokens) // 2:
        raise UsageError(f"--lanes {count}: choose from 1 to {len(tokens) // 2}, half of the symbols read")
    return tokens[: len(tokens) // count * count].view(count, -1)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="of a character language model")
    parser.add_argument("text", help="a text file of its symbols")
    parser.add_argument("--lanes", type=int, default=32, help="sequences side by side (default: %(default)s)")
    parser.add_argument("--symbols", type=int, default=450_000, help="read at most (default: %(default)s)")
    args = parser.parse_args(argv)
    model, _ = load_char_lm(args.checkpoint)
    quantised = quantize_dynamic(model)
    tokens = lanes(model, args.text, args.lanes, args.symbols)
    print(", ".join(f"{name} {value}" for name, value in describe_machine("cpu").items()))
    print(f"{tokens.numel():,} symbols in {len(tokens)} lanes, {torch.get_num_threads()} threads")
    for name, each in (("float32", model), ("int8", quantised)):
        times = ", ".join(f"{rows} rows {microseconds(each, rows):.0f} us" for rows in (1, 8))
        bits = bits_per_character(each, tokens)
        print(f"{name:8} {bits:.5f} bits per character, a step: {times}", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
