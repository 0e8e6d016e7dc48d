"""Writes a line as SVG, with onnxruntime: python run.py TEXT [BIAS [SEED]]; without a window TEXT is ""."""

import json
import sys
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession

ABOUT = json.loads(Path(__file__).with_name("model.json").read_text(encoding="utf-8"))
STEP = InferenceSession(Path(__file__).with_name("step.onnx"))


def read(point, text, state):
    """Returns the mixture [6 M + 1] after a normalised point [3], phi [U + 1], and the state."""
    named = {f"state_{number}": tensor for number, tensor in enumerate(state)}
    mixture, phi, *state = STEP.run(None, {"point": np.array([point], np.float32), "text": text} | named)
    return mixture[0].astype(float), phi[0], state


def write(text, bias=1.0, seed=1):
    """Yields offsets and pen bits; Graves 2013, equations 18 to 23, 61 and 62."""
    rng, symbols, bias = np.random.default_rng(int(seed)), ABOUT["symbols"], float(bias)
    places = np.array([[symbols.index(symbol) for symbol in text + " " * (" " in symbols)] or [0]])
    state, point = [np.zeros((1, size), np.float32) for size in ABOUT["state"]], np.zeros(3)
    if ABOUT["window"] is not None:
        state[ABOUT["window"]][0, places[0, 0]] = 1
    for _ in range(80 * len(text) or 400):
        mixture, phi, state = read(point, places, state)
        pen, weight, mean, scale, twist = np.split(mixture, 1 + np.array([0, 1, 3, 5]) * (len(mixture) // 6))
        odds = np.exp((weight - weight.max()) * (1 + bias))
        one, r = rng.choice(len(odds), p=odds / odds.sum()), np.tanh(twist)
        a, b = rng.normal(size=2)
        noise = np.array([a, r[one] * a + np.sqrt(1 - r[one] ** 2) * b])
        offset = mean.reshape(-1, 2)[one] + np.exp(scale.reshape(-1, 2)[one] - bias) * noise
        point = np.array([*offset, rng.random() < 1 / (1 + np.exp(-pen[0]))])
        yield offset * ABOUT["std"] + ABOUT["mean"], point[2]
        if phi[-1] > phi[:-1].max():
            return


if __name__ == "__main__":
    offsets, pens = zip(*write(*sys.argv[1:]), strict=True)
    # The pen touches the paper at the origin.
    places = np.cumsum([(0.0, 0.0), *offsets], axis=0)
    # A corpus has units of its own; a line is 100 high.
    places *= 100 / max(np.ptp(places[:, 1]), 0.01 * np.ptp(places[:, 0]), 1e-9)
    letters = ["M", "L", *np.where(pens[:-1], "M", "L")]
    path = "".join(f"{letter}{x:.1f} {y:.1f}" for letter, (x, y) in zip(letters, places, strict=True))
    (x, y), (right, bottom) = places.min(0) - 5, places.max(0) + 5
    view = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x} {y} {right - x} {bottom - y}">'
    print(view, f'<path d="{path}" fill="none" stroke="black"/></svg>')
