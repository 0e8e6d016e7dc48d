"""Functions that the numpy transcriptions of the cells share, each written from its definition."""

import functools

import numpy as np


def sigmoid(a):
    return 1.0 / (1.0 + np.exp(-a))


def layer_norm(a_H, gain_H, shift_H, epsilon):
    """Normalises one vector by its own mean and biased variance."""
    mean = a_H.sum() / a_H.size
    variance = ((a_H - mean) ** 2).sum() / a_H.size
    return (a_H - mean) / np.sqrt(variance + epsilon) * gain_H + shift_H


def over_time(step):
    """Decorator that turns a transcription of one step into that of a sequence.

    Args:
        step: ``step(parameters, config, x_C, state, noise) -> (y_H, state)``; noise has the arrays [1, ·] of
            this step.
    """

    @functools.wraps(step)
    def naive(p, config, x_TC, state, noise):
        outputs = []
        for t, x in enumerate(x_TC):
            now = None if noise is None else {name: at(noise, name, t)[None] for name in noise}
            y, state = step(p, config, x, state, now)
            outputs.append(y)
        return np.stack(outputs), state

    return naive


def at(noise, name, t=0):
    """Returns the noise ``name`` at step ``t`` of one sequence, or None; arrays are [T or 1, ·]."""
    if noise is None or name not in noise:
        return None
    draw = noise[name]
    return draw[t if len(draw) > 1 else 0]


def drop(value, rate, keep):
    """Applies inverted dropout; ``keep`` is 1 where the value stays, None in evaluation."""
    return value if keep is None else value * keep / (1.0 - rate)


def zone(previous, new, rate, keep_previous):
    """Applies zoneout; ``keep_previous`` is 1 where the old value stays, None for the expectation."""
    share = rate if keep_previous is None else keep_previous
    return share * previous + (1.0 - share) * new
