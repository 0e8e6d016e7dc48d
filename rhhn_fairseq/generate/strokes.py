"""Drawing handwriting from a model, point by point.

Graves 2013 (arXiv 1308.0850), sections 4.3 and 5.4 to 5.5: a point is drawn from the mixture and becomes the
next input; a bias or a temperature makes the writing tidier; priming lets the model read a line first and
continue in its style. With a window, the text of that line precedes the text to write.

Shapes: N points of a line, U positions of the text, M matrices that a hypernetwork generates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.data.strokes.points import Line, to_strokes
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.changes import step_changes, watch
from rhhn_fairseq.layers.mixture import Mixture, check_sharpness
from rhhn_fairseq.options import check_fields, option

# A stroke of up to this many points is at most one straight segment.
LONGEST_STUB = 2

BEHIND, PAST = 1, 2
"""Places of the window: at the space behind the text, and past that, where the line is finished."""

POINTS = 400
# The most points per character before a line is abandoned: about three times what IAM-OnDB's writers take.
POINTS_PER_CHARACTER = 80


@dataclass(frozen=True)
class WritingConfig:
    """How lines are written; ``UsageError`` names the value that cannot work.

    Line n of a seed does not depend on how many others are written. See ``Mixture.sharpened`` for bias and
    temperature.
    """

    lines: int = option(3, help="lines to write for each text", low=1)
    points: int | None = option(None, help="points per line, with a text the maximum", low=1)
    bias: float = option(0.0, help="0 is the model's own hand, larger is tidier")
    temperature: float = option(1.0, help="below 1 is tidier")
    seed: int = option(1, help="seed of the random numbers", low=0)

    def __post_init__(self):
        check_fields(self, flags=True)
        check_sharpness(self.bias, self.temperature)

    def most_points(self, text: str | None) -> int:
        """Returns the maximum number of points to draw for a line of this text."""
        if self.points is not None:
            return self.points
        return POINTS if text is None else POINTS_PER_CHARACTER * len(text)


@dataclass
class Written:
    """One written line.

    Attributes:
        points: [N, 3] in the corpus's units, the primed ones first.
        primed: how many of them were read. text: what was to be written, None without a window.
        finished: whether the window passed the text's end; true without a window.
        changes: norms [N, M] of the change of each generated matrix in the step that produced the point; zero
            in the first step. names: of the M matrices.
        cut: whether the drawing stopped with the pen down, within a stroke. The last point's pen bit is 1
            nevertheless.
    """

    points: np.ndarray
    primed: int
    text: str | None
    finished: bool
    changes: np.ndarray
    names: tuple[str, ...]
    cut: bool = False


class Hand:
    """A model that writes a line step by step, with its state and the weights it generated last.

    Args:
        heard: indices [1, U] of the text, None without a window.
    """

    def __init__(self, model: nn.Module, heard: Tensor | None):
        self.model, self.heard = model, heard
        dtype = model.weight_out.dtype
        self.state = tuple(torch.zeros(1, size, dtype=dtype) for size in model.stack.state_sizes)
        self.watched = watch(model.stack)
        self.names = matrix_names(model)
        self._factors: list[Tensor] | None = None

    def step(self, point: Tensor) -> tuple[Mixture, np.ndarray, Tensor | None]:
        """Reads a point [3].

        Returns:
            the distribution of the next point; how much each generated matrix changed [M], zero in the first
            step; and phi [U + 1], the window's weights over the text, None without a window.
        """
        # Without a state the model begins as in training, which zeros as a state would not say.
        state = None if self._factors is None else self.state
        raw, extra = self.model(point.view(1, 1, 3), text=self.heard, state=state)
        factors = [layer.factors(self.state, extra["state"]) for layer in self.watched]
        changes = step_changes(self.watched, factors, self._factors or factors)
        self.state, self._factors = extra["state"], factors
        phi = extra["phi"][0, 0] if self.model.window else None
        return Mixture.of(raw[0, 0].double()), changes, phi


@torch.no_grad()
def write(
    model: nn.Module, config: WritingConfig, texts: Sequence[str] = (), prime: Line | None = None
) -> list[Written]:
    """Writes lines independently, so that a line does not depend on what else is written.

    Args:
        model: a ``Handwriting`` model on the CPU; it is set to evaluation mode.
        texts: what to write, ``config.lines`` times each; requires a window.
        prime: a line to read first, in the corpus's units, with its text if the model has a window.

    Raises:
        UsageError: a model without a window gets a text, one with a window gets none, a character is unknown,
            or a primed line lacks the text that a window reads.
    """
    if model.window:
        if not texts:
            raise UsageError("--text is missing: a model that was trained with --window needs a text")
        if not all(texts):
            raise UsageError("--text is empty")
    elif texts:
        raise UsageError("--text: the model was trained without --window, so it cannot write a given text")
    return [
        _write_line(model, config, text, prime, number)
        for text in (texts if model.window else [None])
        for number in range(config.lines)
    ]


@torch.no_grad()
def draw_points(
    model: nn.Module,
    config: WritingConfig,
    text: str | None = None,
    prime: Line | None = None,
    number: int = 0,
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Draws one line, point by point.

    Args:
        model, prime: as in ``write``. text: what to write, None without a window.
        number: of the line among those of its seed and text.

    Yields:
        a point (dx, dy, pen bit) [3] in the corpus's units, the primed ones first; how much each generated
        matrix changed in the step that produced it [M]; and where the window was: 0 in the text, ``BEHIND``
        at the space behind it, ``PAST`` when it has left both, after which drawing stops.

    Raises:
        UsageError: as ``write``.
    """
    model.eval()
    heard, space = None, ""
    if text is not None:
        # With a space after the text the model finishes the last letter as it finishes any word.
        space = " " if " " in model.symbols else ""
        heard = _before(prime, model.symbols) + text + space
        _check("--text", heard, model.symbols)
        heard = torch.tensor([[model.symbols.index(symbol) for symbol in heard]])
    hand = Hand(model, heard)
    # Without a primed line, the model still reads the point where the pen first touches.
    read = np.zeros((1, 3)) if prime is None else model.normalisation.apply(prime.points)
    point, *others = torch.from_numpy(read)
    yield read[0], np.zeros(len(hand.names)), 0
    for other in others:
        changes = hand.step(point)[1]
        point = other
        yield _in_units(model, point), changes, 0
    for random in torch.from_numpy(_noise(config.seed, number, config.most_points(text))):
        mixture, changes, phi = hand.step(point)
        point = mixture.sharpened(config.bias, config.temperature).draw(random)
        place = 0
        if phi is not None:
            # At the character of the largest weight; the position after all ends a line (Graves, 5.3).
            left = len(phi) - 1 - int(phi.argmax())
            place = PAST if left == 0 else BEHIND if left <= len(space) else 0
        yield _in_units(model, point), changes, place
        if place == PAST:
            return


def matrix_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the M matrices whose changes are measured."""
    return tuple(name for layer in watch(model.stack) for name in layer.names)


def _write_line(model, config: WritingConfig, text, prime: Line | None, number: int) -> Written:
    return collect(model, list(draw_points(model, config, text, prime, number)), text, prime)


def collect(model: nn.Module, drawn: list, text: str | None, prime: Line | None) -> Written:
    """Returns the line of which ``draw_points`` has given all points."""
    points, changes, places = map(np.stack, zip(*drawn, strict=True))
    primed = 0 if prime is None else len(prime.points)
    finished = text is None or bool(places[-1] == PAST)
    if finished and text is not None:
        count = primed + of_the_text(points[primed:], places[primed:])
        points, changes = points[:count], changes[:count]
    cut = bool(points[-1, 2] < 0.5)
    points[-1, 2] = 1
    return Written(points, primed, text, finished, changes, matrix_names(model), cut)


def _in_units(model: nn.Module, point: Tensor) -> np.ndarray:
    """Returns a normalised point, not the first of a line, in the corpus's units."""
    return model.normalisation.invert(np.stack([np.zeros(3), point.numpy()]))[1]


def _before(prime: Line | None, symbols: str) -> str:
    """Returns the text that a window reads before the text to write."""
    if prime is None:
        return ""
    if not prime.text:
        raise UsageError(
            f"{prime.name}: has no text, but a model with a window reads the text of a primed line"
        )
    _check(prime.name, prime.text, symbols)
    return prime.text + (" " if " " in symbols else "")


def _check(name: str, text: str, symbols: str) -> None:
    unknown = sorted(set(text) - set(symbols))
    if unknown:
        raise UsageError(
            f"{name}: contains {''.join(unknown)!r}, which did not occur in training; the characters are "
            f"{symbols!r}"
        )


def _noise(seed: int, line: int, steps: int) -> np.ndarray:
    """Returns a line's random numbers for ``Mixture.draw``, [steps, 4]; no row depends on ``steps``."""
    uniform = np.random.default_rng([seed, line, 0]).random((steps, 2))
    normal = np.random.default_rng([seed, line, 1]).normal(size=(steps, 2))
    return np.concatenate([uniform[:, :1], normal, uniform[:, 1:]], axis=1)


def of_the_text(points: np.ndarray, places: np.ndarray) -> int:
    """Returns how many points [N, 3] that a model drew for a finished line to keep.

    A last stroke that began when the window had left the text belongs to a word that nobody asked for.

    Args:
        places: [N], where the window was, see ``draw_points``.
    """
    lifted = np.flatnonzero(points[:, 2] > 0.5)
    begun = int(lifted[-1]) + 1 if len(lifted) else 0
    return begun if begun < len(points) and places[begun] else len(points)


def stub(line: Written) -> int:
    """Returns how many points at a line's end belong to a stroke that was cut off before it had a shape.

    A model that passes its text's end, or reaches the limit of points, may just have set the pen down again.
    """
    last = len(to_strokes(line.points)[-1])
    written = len(line.points) - line.primed
    return last if line.cut and last <= LONGEST_STUB and last < written else 0


def stroke_changes(lines: Sequence[Written]) -> tuple[float, float, float] | None:
    """Returns mean changes of the weights per step, as root mean squares over the matrices.

    Returns:
        the means over the steps that read a point within a stroke, nan if there are none; that read the last
        point of a stroke; and that read the first point of a stroke that follows another. None if no weights
        change or no step reads an end or a start.
    """
    read: list[list[float]] = [[], [], []]
    for line in lines:
        if not line.names:
            return None
        sizes = np.sqrt(np.square(line.changes).mean(axis=1))
        lifted = line.points[:, 2] > 0.5
        # Step n reads point n - 1. The first step that can change the weights is the second.
        for n in range(max(2, line.primed), len(sizes)):
            place = 1 if lifted[n - 1] else 2 if lifted[n - 2] else 0
            read[place].append(float(sizes[n]))
    if not (read[1] and read[2]):
        return None
    within, at_the_end, at_the_start = (float(np.mean(values)) if values else np.nan for values in read)
    return within, at_the_end, at_the_start
