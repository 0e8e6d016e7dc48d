"""What ``run.sh`` runs: candidates beside today's code, and the weights of the training.

    python -m experiments.gpu.measure NAME cpu|cuda            a line of JSON for each contender
    python -m experiments.gpu.measure pack CHECKPOINT FOLDER   its weights in bfloat16 as weights.0, weights.1

All contenders run in one process, in turn. Each is first compared with today's code in float32 at a small
size, where rounding hides no mistake. On a CPU all sizes are tiny.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.machine import now
from benchmarks.translation import Config, build_models, draw_sentences, search
from experiments.gpu.decoding import GraphSearch
from experiments.gpu.two_streams import Lanes, run_two_streams
from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.backends import graphs

PIECE = 15_500_000
"""Bytes of a file of weights: 15.3 million parameters in bfloat16 are two."""

Contenders = dict[str, Callable[[], list[Tensor]]]
"""Calls that return what must be equal, by name; today's code first."""


def passes_of(calls: dict[str, Callable[[], Tensor]], *wanted: Tensor) -> Iterator[Contenders]:
    """Forward and backward passes of a mean of squares, as they are and then each as one CUDA graph."""

    def run(call):
        y = call()
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), wanted)]

    passes = {name: partial(run, call) for name, call in calls.items()}
    yield passes
    # Failed captures come last.
    yield {"today": passes["today"]} | {
        f"{name}, one graph": in_one_graph(call) for name, call in passes.items()
    }


def in_one_graph(call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Has a GPU replay a whole pass with all its streams, so that the host launches one graph."""
    kept: list[graphs.Recording] = []

    def run():
        if not kept:
            with policy.using(graphs=False):
                kept.append(graphs.record(lambda _: call(), []))
        kept[0].replay()
        return list(kept[0].outputs)

    return run if torch.cuda.is_available() else call


def translation_model(device: str, dtype: torch.dtype):
    arch, size, length = ("hyperlstm_gnmt_small", 40, 6) if device == "cpu" else ("hyperlstm_gnmt", 32000, 32)
    config = Config(archs=(arch,), attention="v2", device=device, vocab_size=size, length=length)
    models, dictionary = build_models(config)
    return models[arch].to(dtype).eval(), dictionary, config


def two_streams(device: str, dtype: torch.dtype, small: bool) -> Iterator[Contenders]:
    """Measured: 1.37 times today's speed in one graph."""
    T, B, H, N = (12, 4, 8, 4) if device == "cpu" else (100, 8 if small else 128, 1000, 128)
    x = torch.randn(T, B, H, device=device, dtype=dtype, requires_grad=True)
    cell, lanes = build_cell("hyperrhn", H, H, hyper_size=N), Lanes(2, torch.device(device))
    calls, cell = {"today": lambda: cell(x)[0]}, cell.to(device, dtype).eval()
    for chunk in (10, 25, 50):
        calls[f"chunks of {chunk}"] = lambda k=chunk: run_two_streams(cell, x, lanes=lanes, chunk=k)[0]
    yield from passes_of(calls, x, *cell.parameters())


def decoding(device: str, dtype: torch.dtype, small: bool) -> Iterator[Contenders]:
    """Expected: 1.5 to 3 times today's speed for one sentence."""
    model, dictionary, config = translation_model(device, dtype)
    for count in (2,) if small or device == "cpu" else (1, 64):
        tokens = draw_sentences(config, dictionary, count)[:, -16:]
        longest = tokens.shape[1] - 1
        own = GraphSearch(model.decoder, dictionary, count, 4, longest, longest)

        def today(tokens=tokens):
            found = search(model, tokens, dictionary, 4)
            return [torch.tensor([one["score"].item() for some in found for one in some])]

        def step_in_a_graph(tokens=tokens, own=own):
            with torch.no_grad():
                found = own.search(model.encoder(tokens))
            return [torch.tensor([score for some in found for _, score in some])]

        yield {f"today, {count} at a time": today, f"step in a graph, {count} at a time": step_in_a_graph}


def compare(contenders: Contenders, device: str, rounds: int, **about) -> None:
    """Prints errors beside today's code, median ms, and the median, least and largest ratio of speed."""
    rows, seconds, expected = {}, {}, None
    for key, call in contenders.items():
        rows[key] = about | {"contender": key}
        try:
            # The second call records graphs.
            found = [call() for _ in range(3)][-1]
            expected = expected or [tensor.double() for tensor in found]
            pairs = zip(found, expected, strict=True)
            errors = [(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in pairs]
            rows[key]["error"], seconds[key] = torch.stack(errors).max().item(), []
        except Exception as error:
            rows[key]["failed"] = f"{type(error).__name__}: {error}"[:500]
    for _ in range(rounds):
        for key, own in seconds.items():
            start = now(device)
            contenders[key]()
            own.append(now(device) - start)
    for key, row in rows.items():
        if own := seconds.get(key):
            speeds = [a / b for a, b in zip(next(iter(seconds.values())), own, strict=True)]
            row |= {"ms": 1e3 * median(own), "speed": [median(speeds), min(speeds), max(speeds)]}
        print(json.dumps(row), flush=True)


def pack(checkpoint: str, folder: str) -> None:
    state, buffer = torch.load(checkpoint, map_location="cpu", weights_only=True), io.BytesIO()
    state["model"] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state["model"].items()}
    torch.save(state | {"last_optimizer_state": None}, buffer)
    for number, at in enumerate(range(0, buffer.tell(), PIECE)):
        (Path(folder) / f"weights.{number}").write_bytes(buffer.getvalue()[at : at + PIECE])


def main(name: str, device: str) -> None:
    case = {case.__name__: case for case in (two_streams, decoding)}[name]
    for small, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        # cuDNN uses matrix units for bfloat16 only where it may round float32.
        torch.backends.cudnn.allow_tf32 = not small
        torch.manual_seed(1)
        for contenders in case(device, dtype, small):
            rounds = 0 if small else 1 if device == "cpu" else 7
            compare(contenders, device, rounds, candidate=name, dtype=str(dtype))


if __name__ == "__main__":
    pack(*sys.argv[2:]) if sys.argv[1] == "pack" else main(*sys.argv[1:])
