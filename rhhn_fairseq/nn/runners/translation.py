"""Translates lines of pieces, as spm_encode prints them: python run.py [BEAM] < PIECES. Needs onnxruntime."""

import json
import sys
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession

ABOUT = json.loads(Path(__file__).with_name("model.json").read_text(encoding="utf-8"))
NUMBERS, EOS = {piece: number for number, piece in enumerate(ABOUT["source"])}, ABOUT["eos"]
ENCODER, STEP = (InferenceSession(Path(__file__).with_name(f"{name}.onnx")) for name in ("encoder", "step"))


def encode(line):
    """Returns the memory of a line of pieces, the decoder's first state, and the number of pieces."""
    source = np.array([[*(NUMBERS.get(piece, ABOUT["unk"]) for piece in line.split()), EOS]])
    values, keys, *state = ENCODER.run(None, {"source": source})
    return {"values": values, "keys": keys}, state, source.size


def step(pieces, memory, state):
    """Returns the log-probabilities [B, D] of what follows the pieces [B], and the state."""
    named = {f"state_{number}": tensor for number, tensor in enumerate(state)}
    scores, *state = STEP.run(None, {"piece": np.array(pieces)} | memory | named)
    return scores, state


def translate(line, beam=5):
    """Returns the pieces of the hypothesis with the highest mean log-probability."""
    memory, state, length = encode(line)
    beams, done = [(0.0, [EOS])], []
    for _ in range(2 * length + 10):
        scores, state = step([pieces[-1] for _, pieces in beams], memory, state)
        total = scores + np.array([[score] for score, _ in beams])
        best = [divmod(int(place), total.shape[1]) for place in np.argsort(-total, axis=None)[: 2 * beam]]
        done += [(total[b, p] / len(beams[b][1]), beams[b][1][1:]) for b, p in best[:beam] if p == EOS]
        best = [(b, p) for b, p in best if p != EOS][:beam]
        beams, state = (
            [(total[b, p], [*beams[b][1], p]) for b, p in best],
            [s[[b for b, _ in best]] for s in state],
        )
        if len(done) >= beam:
            break
    return [ABOUT["target"][piece] for piece in max(done or [(0, beams[0][1][1:])])[1]]


if __name__ == "__main__":
    for line in sys.stdin:
        pieces = translate(line, *map(int, sys.argv[1:])) if line.strip() else ()
        print("".join(pieces).replace("\u2581", " ").strip(), flush=True)
