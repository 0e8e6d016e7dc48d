"""Writing from a handwriting model: what is drawn, how weights change, pictures, and scripts/write.py."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.strokes_cli import random_rows
from helpers.tiny_handwriting import NORMALISATION, build, disturb
from helpers.written_pictures import svg_lines
from matplotlib.colors import to_hex
from matplotlib.image import imread

from rhhn_fairseq.data.strokes.points import Line, from_offsets
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate.picture import (
    column_changes,
    draw,
    output_paths,
    smoothed,
)
from rhhn_fairseq.generate.strokes import (
    BEHIND,
    PAST,
    Hand,
    WritingConfig,
    Written,
    of_the_text,
    stroke_changes,
    stub,
    write,
)
from rhhn_fairseq.inspection.colours import QUANTITY_OF_LINES
from rhhn_fairseq.inspection.plotting import LINE_COLOUR_MAP
from rhhn_fairseq.layers.mixture import Mixture


@pytest.mark.parametrize("cell, options", [("ln_hyperlstm", {}), ("rhn", {"first_step": "skip"})])
def test_points_are_drawn_one_after_the_other(cell, options):
    """By hand: each point is drawn from the mixture after the ones before, read as one sequence."""
    model = disturb(build(cell, **options))
    (line,) = write(model, WritingConfig(lines=1, points=12, bias=0.3, temperature=0.8, seed=5))
    assert line.points.shape == (13, 3) and line.finished and line.text is None and line.primed == 0
    assert line.points[0].tolist() == [0, 0, 0] and line.points[-1, 2] == 1
    read = torch.from_numpy(NORMALISATION.apply(line.points))
    with torch.no_grad():
        raw, _ = model(read[None])
    uniform = np.random.default_rng([5, 0, 0]).random((12, 2))
    normal = np.random.default_rng([5, 0, 1]).normal(size=(12, 2))
    for t in range(11):
        noise = torch.from_numpy(np.r_[uniform[t, 0], normal[t], uniform[t, 1]])
        drawn = Mixture.of(raw[0, t].double()).sharpened(0.3, 0.8).draw(noise)
        # One pass over the sequence rounds otherwise than single steps in float32.
        torch.testing.assert_close(drawn, read[t + 1], rtol=0, atol=1e-4)


def test_lines_follow_from_seed_and_number():
    model = build()
    two = write(model, WritingConfig(lines=2, points=10))
    three = write(model, WritingConfig(lines=3, points=15))
    for one, other in zip(two, three, strict=False):
        # The last point of a line has the pen lifted.
        np.testing.assert_array_equal(one.points[:-1], other.points[:10])
    assert (two[0].points != two[1].points).any()
    other = write(model, WritingConfig(lines=1, points=10, seed=2))[0]
    assert (other.points != two[0].points).any()
    before = torch.random.get_rng_state()
    write(model, WritingConfig(lines=1, points=3))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_in_training_mode_writes_as_in_evaluation():
    model = build(output_dropout=0.5, recurrent_dropout=0.5)
    first, again = (
        write(each, WritingConfig(lines=1, points=5))[0] for each in (model.eval(), model.train())
    )
    np.testing.assert_array_equal(first.points, again.points)


def test_a_primed_line_is_read_before_writing():
    model = disturb(build("hyperlstm"))
    prime = Line("p", from_offsets(random_rows(9), "p"))
    line = write(model, WritingConfig(lines=1, points=6), prime=prime)[0]
    assert line.primed == 10 and line.points.shape == (16, 3)
    np.testing.assert_allclose(line.points[:10], prime.points, rtol=0, atol=1e-9)
    assert line.changes.shape == (16, 4)
    # Row n has the change of reading point n - 1.
    hand = Hand(model, None)
    with torch.no_grad():
        steps = [hand.step(torch.from_numpy(point))[1] for point in NORMALISATION.apply(prime.points)]
    np.testing.assert_array_equal(line.changes[:11], [np.zeros(4), *steps])
    # What comes after depends on what was read.
    moved = dataclasses.replace(prime, points=prime.points * (3, 1, 1))
    other = write(model, WritingConfig(lines=1, points=6), prime=moved)[0]
    assert np.abs(other.points[10:] - line.points[10:]).max() > 1e-3


def _speedy(model, kappa_step):
    """A model whose window moves by a fixed step a point."""
    window = model.stack.first.window
    with torch.no_grad():
        window.weight.zero_()
        window.bias.zero_()
        window.bias[-len(window.bias) // 3 :] = np.log(kappa_step)
    return model


def test_writing_ends_when_the_window_has_passed_the_text():
    model = _speedy(build(window=2), 0.5)
    short, long = write(model, WritingConfig(lines=1), ["abc", "abcdab"])
    # A space follows the text. Position 5 is nearer than 4 after 10 steps of 0.5; a stroke begun there goes.
    assert (short.finished, long.finished) == (True, True)
    assert [len(short.points), len(long.points)] == [1 + 10, 1 + 16]
    assert [short.text, long.text] == ["abc", "abcdab"]
    slow = write(_speedy(model, 0.01), WritingConfig(lines=2, points=20), ["ab", "c"])
    assert [(line.finished, len(line.points)) for line in slow] == [(False, 21)] * 4
    assert [line.text for line in slow] == ["ab", "ab", "c", "c"]
    prime = Line("p", from_offsets(random_rows(5), "p"), "ab")
    (line,) = write(_speedy(model, 0.5), WritingConfig(lines=1), ["abc"], prime)
    # "ab abc " has seven characters, and reading six points moved the window already.
    assert line.finished and len(line.points) == 1 + 16 and line.primed == 6


@pytest.mark.parametrize(
    "pens, places, kept",
    [
        # Joined writing: the last stroke began in the text.
        ([0, 1, 0, 0, 0, 0], [0, 0, 0, 0, BEHIND, PAST], 6),
        ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, BEHIND, PAST], 6),
        # It belongs to the word after.
        ([0, 1, 0, 1, 0, 0], [0, 0, 0, 0, BEHIND, PAST], 4),
        ([0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, PAST], 5),
        ([0, 1, 0, 0, 0, 1], [0, 0, 0, 0, BEHIND, PAST], 6),
    ],
)
def test_a_stroke_that_began_in_the_text_belongs_to_it(pens, places, kept):
    assert of_the_text(np.array([[1, 0, pen] for pen in pens]), np.array(places)) == kept


def test_refused_writing():
    plain, reading = build(), build(window=2)
    config = WritingConfig(lines=1, points=3)
    with pytest.raises(UsageError, match="--text: the model was trained without --window"):
        write(plain, config, ["a"])
    with pytest.raises(UsageError, match="--text: contains '!z', .*; the characters are ' abcdeh'"):
        write(reading, config, ["az!"])
    with pytest.raises(UsageError, match="p: has no text, but a model with a window reads"):
        write(reading, config, ["a"], Line("p", np.zeros((3, 3))))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("late", [False, True])
def test_changes_are_the_norms_of_the_matrices_changes(window, late):
    """In both layers, made in full; the window and its place come after the first cell's state."""
    state = {"hyper_state": "previous"} if late else {}
    model = disturb(build("hyperlstm", window, layers=2, **state)).double()
    hand = Hand(model, torch.tensor([[0, 1, 2]]) if window else None)
    assert hand.names == tuple(f"{layer} {gate}" for layer in (1, 2) for gate in "ifgo")
    stack = model.stack
    cells = [stack.first.cell, *stack.upper.cells] if window else list(stack.cells)
    second = len(cells[0].state_sizes) + (2 if window else 0)
    matrices, found = [], []
    for point in torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64):
        before = hand.state
        with torch.no_grad():
            found.append(hand.step(point)[1])
            after = before if late else hand.state
            scales = [cell.scaling(after[at + 2])[0] for cell, at in zip(cells, (0, second), strict=True)]
        parts = [cell.weight_h.chunk(4, 1) for cell in cells]
        pairs = zip(sum(parts, ()), torch.cat(scales), strict=True)
        matrices.append([W * d for W, d in pairs])
    assert found[0].tolist() == [0.0] * 8
    for changes, now, last in zip(found[1:], matrices[1:], matrices[:-1], strict=True):
        expected = [(new - old).norm().item() for new, old in zip(now, last, strict=True)]
        np.testing.assert_allclose(changes, expected, rtol=1e-9)
        assert min(expected) > 1e-6


def _written(strokes, changes=None, primed=0, names=()):
    """A line of horizontal strokes, each a list of x, at y = 0, 1, ..."""
    rows, last = [], np.zeros(2)
    for y, stroke in enumerate(strokes):
        for number, x in enumerate(stroke):
            rows.append([*(np.array([x, y]) - last), number == len(stroke) - 1])
            last = np.array([x, y])
    points = np.array(rows, dtype=np.float64)
    changes = np.zeros((len(points), 0)) if changes is None else np.array(changes, dtype=np.float64)
    return Written(points, primed, None, True, changes, names)


def test_mean_changes_by_place_in_a_stroke():
    # The pen is lifted after points 2 and 5; a step has the change of reading the point before.
    points = np.zeros((8, 3))
    points[[2, 5, 7], 2] = 1
    changes = np.array([[9.0], [9.0], [1.0], [5.0], [7.0], [3.0], [15.0], [17.0]])
    line = Written(points, 0, None, True, changes, ("i",))
    within, at_the_end, at_the_start = stroke_changes([line, dataclasses.replace(line, primed=5)])
    # Within: steps 2 and 5, then 5. At the end: 3 and 6, then 6. At the start: 4 and 7, then 7.
    assert within == pytest.approx((1 + 3 + 3) / 3)
    assert at_the_end == pytest.approx((5 + 15 + 15) / 3)
    assert at_the_start == pytest.approx((7 + 17 + 17) / 3)
    two = dataclasses.replace(line, changes=np.hstack([changes, 7 * changes]), names=("i", "f"))
    assert stroke_changes([two]) == pytest.approx([5 * change for change in stroke_changes([line])])
    assert stroke_changes([dataclasses.replace(line, names=(), changes=np.zeros((8, 0)))]) is None
    no_start = dataclasses.replace(line, points=points[:4], changes=changes[:4])
    assert stroke_changes([no_start]) is None


def test_column_changes_lie_under_the_pens_way():
    line = _written([[0, 4], [8, 2]], [[0], [1.0], [3.0], [2.0]], names=("W",))
    found = column_changes(line, columns=8)[0]
    # From 0 to 4 at 1, up and on to 8 at 3, back to 2 at 2; columns hold the largest.
    assert found.tolist() == [1, 1, 2, 2, 3, 3, 3, 3]
    at_the_right = _written([[0, 4], [4]], [[0], [1.0], [5.0]], names=("W",))
    assert column_changes(at_the_right, columns=2)[0].tolist() == [1, 5]
    still = _written([[5, 5]], [[0], [7.0]], names=("W",))
    assert column_changes(still, columns=3)[0].tolist() == [7, 0, 0]


def test_primed_points_have_a_colour_of_their_own(tmp_path):
    whole = _written([[0, 10, 20, 30, 40]], primed=3)
    draw([whole], [tmp_path / "a.svg"])
    found = svg_lines(tmp_path / "a.svg")
    (blue,), (black,) = found["#d55e00"], found["#000000"]
    # The pen stayed down, so the writing begins where the reading ended.
    np.testing.assert_allclose(black[0], blue[-1], atol=1e-3)
    assert (len(blue), len(black)) == (3, 3)


def test_a_dot_is_drawn_in_png(tmp_path):
    """A stroke of one point, and one whose points are all in one place."""
    for number, dot in enumerate(([5], [5, 5, 5])):
        path = tmp_path / f"{number}.png"
        draw([_written([[0], dot, [10]])], [path])
        inked = np.flatnonzero((imread(path)[..., 0] < 0.8).any(axis=0))
        # Three dots, each one pen wide, over the whole width of the page.
        groups = np.split(inked, np.flatnonzero(np.diff(inked) > 1) + 1)
        middles = [group.mean() for group in groups]
        assert len(groups) == 3 and max(map(len, groups)) <= 4
        assert middles[1] - middles[0] == pytest.approx(middles[2] - middles[1], abs=1)


def test_changes_are_the_colour_of_the_strokes(tmp_path):
    changes = [[0, 0], *[[0, 0]] * 4, *[[1.0, 7.0]] * 5]
    line = _written([[*range(5)], [*range(5, 10)]], changes, names=("f", "o"))
    draw([line, line], [tmp_path / "a.svg", tmp_path / "b.svg"])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    strokes = svg_lines(tmp_path / "a.svg")
    # The root mean square of the second stroke's changes is 5 of 7, the 98th percentile.
    strong = to_hex(LINE_COLOUR_MAP(5 / 7))
    assert strokes.keys() == {QUANTITY_OF_LINES[0], strong}
    assert [len(stroke) for colour in strokes.values() for stroke in colour] == [5] * 4
    draw([line], [tmp_path / "a.png", tmp_path / "b.png"])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    draw([line], [tmp_path / "plain.svg"], changes=False)
    assert svg_lines(tmp_path / "plain.svg").keys() == {"#000000"}


def test_smooth_curves_go_through_the_points():
    """Against the recursion of Catmull-Rom splines by Barry and Goldman 1988, centripetal."""
    stroke = np.random.default_rng(1).normal(size=(6, 2))
    curves = smoothed(stroke)
    np.testing.assert_array_equal(curves[:, 0], stroke[:-1])
    np.testing.assert_array_equal(curves[:, 3], stroke[1:])
    for number in range(1, 4):
        p = stroke[number - 1 : number + 3]
        t = np.r_[0, np.cumsum(np.sqrt(np.linalg.norm(np.diff(p, axis=0), axis=1)))]
        for u in (0.2, 0.5, 0.9):
            at = t[1] + u * (t[2] - t[1])
            levels = p
            for width in (1, 2):
                levels = [
                    ((t[k + width] - at) * levels[k] + (at - t[k]) * levels[k + 1]) / (t[k + width] - t[k])
                    for k in range(4 - width)
                ]
            expected = ((t[2] - at) * levels[0] + (at - t[1]) * levels[1]) / (t[2] - t[1])
            bernstein = np.array([(1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u * u * (1 - u), u**3])
            np.testing.assert_allclose(bernstein @ curves[number], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(3 * (curves[0, 1] - stroke[0]), stroke[1] - stroke[0])
    np.testing.assert_allclose(3 * (stroke[-1] - curves[-1, 2]), stroke[-1] - stroke[-2])
    # The pen may rest.
    assert np.isfinite(smoothed(np.array([[0.0, 0.0]] * 3 + [[1.0, 0.0]]))).all()
    np.testing.assert_allclose(smoothed(np.array([[0.0, 0.0], [3.0, 6.0]]))[0, 1:3], [[1, 2], [2, 4]])


def test_a_stroke_that_the_end_cut_off_is_not_drawn(tmp_path):
    whole, started = _written([[0, 10, 20]]), _written([[0, 10, 20], [40, 42]])
    draw([dataclasses.replace(started, cut=True)], [tmp_path / "a.svg"])
    draw([whole], [tmp_path / "b.svg"])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    # Strokes that the pen lifted, longer ones, and what was only read stay.
    assert stub(started) == 0 and stub(dataclasses.replace(started, cut=True)) == 2
    assert stub(dataclasses.replace(_written([[0], [1, 2, 3]]), cut=True)) == 0
    assert stub(dataclasses.replace(started, cut=True, primed=4)) == 0
    assert stub(dataclasses.replace(_written([[0, 1]]), cut=True)) == 0


def test_output_paths(tmp_path):
    assert [path.name for path in output_paths(tmp_path / "a")] == ["a.svg", "a.png"]
    assert [path.name for path in output_paths(tmp_path / "v1.5")] == ["v1.5.svg", "v1.5.png"]
    assert output_paths(tmp_path / "a.png") == [tmp_path / "a.png"]
    assert output_paths(tmp_path / "a.SVG") == [tmp_path / "a.SVG"]
    with pytest.raises(UsageError, match="there is no directory .*nowhere"):
        output_paths(tmp_path / "nowhere" / "a")
