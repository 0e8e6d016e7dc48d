"""Synthetic handwriting: how the pen moves along the strokes of a font."""

from itertools import pairwise

import numpy as np

from rhhn_fairseq.data.strokes.hershey import (
    SMOOTHING,
    WORDS,
    HersheyConfig,
    _joined,
    _pen,
    _smooth,
    hershey,
)


def test_smooth_numbers_have_variance_one_and_forget_after_a_few():
    numbers = _smooth(np.random.default_rng(1), 200_000)
    # Of 200,000 numbers of which about every seventh is independent, errors are below a hundredth.
    assert abs(numbers.mean()) < 0.02 and abs(numbers.var() - 1) < 0.02
    for distance, expected in ((1, 0.75), (SMOOTHING, 0.0)):
        assert abs(np.mean(numbers[distance:] * numbers[:-distance]) - expected) < 0.02


def test_strokes_that_touch_are_one_without_a_repeated_point():
    strokes = [np.array(stroke, dtype=np.float64).reshape(-1, 2) for stroke in (
        [(0, 0), (1, 0)], [], [(1, 0), (2, 0)], [(3, 3)]
    )]  # fmt: skip
    assert [stroke.tolist() for stroke in _joined(strokes)] == [[[0, 0], [1, 0], [2, 0]], [[3, 3]]]


def test_the_pen_goes_from_end_to_end_and_a_dot_is_one_point():
    config = HersheyConfig(jitter=0.0)
    points = _pen(config, np.array([[0.0, 0.0], [60.0, 0.0], [100.0, 0.0]]), np.random.default_rng(1))
    assert len(points) == 9 and points[0].tolist() == [0, 0] and points[-1].tolist() == [100, 0]
    # Its steps are 12 in the mean, and uneven.
    steps = np.diff(points[:, 0])
    assert (steps > 0).all() and steps.std() > 0.5
    assert _pen(config, np.array([[5.0, 6.0]]), np.random.default_rng(1)).tolist() == [[5, 6]]


def test_lines_have_one_word_to_the_most():
    loaded = hershey(HersheyConfig(lines=60, max_words=3, fonts="futural")).load()
    texts = {split: [line.text for line in lines] for split, lines in loaded.splits.items()}
    assert {len(text.split()) for text in texts["train"]} == {1, 2, 3}
    assert len(texts["train"]) == 60 and len(texts["valid"]) == len(texts["test"]) == 3
    assert texts["train"][:3] != texts["valid"] != texts["test"]


def test_half_of_the_words_are_random_letters_and_some_have_doubled_ones():
    lines = hershey(HersheyConfig(lines=300, max_words=1)).load().splits["train"]
    made = [word for line in lines if (word := line.text.lower().strip(",.?!")) not in WORDS]
    assert 100 < len(made) < 200
    assert sum(any(a == b for a, b in pairwise(word)) for word in made) > len(made) / 5
