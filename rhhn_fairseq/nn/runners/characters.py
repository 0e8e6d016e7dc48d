"""Writes text: python run.py PROMPT [LENGTH [TEMPERATURE [SEED]]]. Needs onnxruntime and numpy alone."""

import json
import sys
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession

FOLDER = Path(__file__).parent
ABOUT = json.loads((FOLDER / "model.json").read_text(encoding="utf-8"))
STEP = InferenceSession(FOLDER / "step.onnx")


def read(entry, state=None):
    """Returns the logits [D] after an entry of the dictionary, and the state."""
    state = [np.zeros((1, size), np.float32) for size in ABOUT["state"]] if state is None else state
    named = {f"state_{number}": tensor for number, tensor in enumerate(state)}
    logits, *state = STEP.run(None, {"entry": np.array([entry])} | named)
    return logits[0], state


def write(prompt, length=200, temperature=0.7, seed=1):
    symbols, rng = ABOUT["symbols"], np.random.default_rng(int(seed))
    given = prompt.encode().decode("latin-1") if ABOUT["bytes"] else prompt
    written = [symbols.index(symbol) for symbol in (reversed(given) if ABOUT["reverse"] else given)]
    logits, state = read(ABOUT["start"])
    for entry in written:
        logits, state = read(entry, state)
    for _ in range(int(length)):
        odds = np.exp((logits - logits.max()).astype(np.float64) / float(temperature))
        written.append(int(rng.choice(len(odds), p=odds / odds.sum())))
        logits, state = read(written[-1], state)
    text = "".join(symbols[entry] for entry in (reversed(written) if ABOUT["reverse"] else written))
    return text.encode("latin-1").decode(errors="replace") if ABOUT["bytes"] else text


if __name__ == "__main__":
    print(write(*sys.argv[1:]))
