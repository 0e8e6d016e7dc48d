"""Lines of handwriting as arrays: their format, cleaning, normalisation, and files of arrays."""

import io

import numpy as np
import pytest
from helpers.strokes_cli import object_array, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rhhn_fairseq.data.strokes.arrays import read_arrays
from rhhn_fairseq.data.strokes.cleaning import CleaningConfig, clean
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.strokes.points import Line, from_offsets, from_strokes, to_strokes
from rhhn_fairseq.data.strokes.store import StrokeSplit, write_split
from rhhn_fairseq.data.strokes.stroke3 import stroke3
from rhhn_fairseq.errors import UsageError

places = st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000))


@settings(deadline=None)
@given(st.lists(st.lists(places, min_size=1, max_size=5), min_size=1, max_size=4))
def test_strokes_come_back_from_their_offsets(strokes):
    points = from_strokes([np.array(stroke) for stroke in strokes], "line")
    assert points.shape == (sum(map(len, strokes)), 3)
    assert points[0, :2].tolist() == [0, 0] and points[-1, 2] == 1
    assert points[:, 2].sum() == len(strokes)
    again = to_strokes(points)
    for found, stroke in zip(again, strokes, strict=True):
        # Coordinates count from the first point.
        np.testing.assert_array_equal(found, np.array(stroke) - strokes[0][0])


def test_first_rows():
    rows = np.array([[3, 4, 0], [1, 0, 1], [2, 2, 0]])
    assert from_offsets(rows, "a").tolist() == [[0, 0, 0], [3, 4, 0], [1, 0, 1], [2, 2, 1]]
    assert from_offsets(rows, "a", "moved").tolist() == [[0, 0, 0], [1, 0, 1], [2, 2, 1]]
    assert from_offsets(rows, "a", y_up=True)[:, 1].tolist() == [0, -4, 0, -2]
    # A first row (0, 0, 1) only marks the beginning.
    rows[0] = (0, 0, 1)
    for first_row in ("drawn", "moved"):
        assert from_offsets(rows, "a", first_row).tolist() == [[0, 0, 0], [1, 0, 1], [2, 2, 1]]
    assert not np.signbit(from_offsets(rows, "a", y_up=True)).any(axis=0)[0]


@pytest.mark.parametrize(
    "rows, reason",
    [
        ([[0, 0, 0], [1, float("nan"), 0]], r"point 1 is not finite \(1, nan, 0\)"),
        ([[0, 0, 0], [1, 1, 2]], "the pen bit of point 1 is 2, expected 0 or 1"),
    ],
)
def test_refused_arrays(rows, reason):
    with pytest.raises(UsageError, match=f"drawing: .*{reason}|drawing: {reason}"):
        from_offsets(np.array(rows, dtype=np.float64), "drawing")


def test_refused_strokes():
    for bad in (float("nan"), float("inf")):
        for strokes in ([[bad, 0.0]], [[0.0, 0.0], [1.0, bad]]):
            with pytest.raises(UsageError, match="line: point . is not finite"):
                from_strokes([np.array(strokes)], "line")
    with pytest.raises(UsageError, match="line: point 1 is not finite"):
        from_strokes([np.array([[-1.7e308, 0], [1.7e308, 0]])], "line")


def _line(offsets, pens=None):
    points = np.zeros((len(offsets), 3))
    points[:, 0] = offsets
    points[list(pens or []), 2] = 1
    points[-1, 2] = 1
    return Line("line", points)


def test_outliers():
    # The pen jumps out in step 3 and back in step 4, and a stroke ends in the point of step 3.
    line = _line([0, 1, 1, 500, -500, 1, 1, 1], pens=[3])
    points, count = clean(line, CleaningConfig(outliers="drop"))
    assert (count, points[:, 0].tolist(), points[:, 2].tolist()) == (
        2,
        [0, 1, 1, 1, 1, 1],
        [0, 0, 1, 0, 0, 1],
    )
    points, count = clean(line, CleaningConfig(outliers="clip", max_step=20))
    assert (count, points[:, 0].tolist()) == (2, [0, 1, 1, 20, -20, 1, 1, 1])
    points, count = clean(line, CleaningConfig())
    assert count == 0 and points is line.points
    assert clean(line, CleaningConfig(outliers="drop", max_step=600))[1] == 0
    with pytest.raises(UsageError, match="--max-step 20 is for --outliers drop or clip"):
        CleaningConfig(max_step=20)
    assert line.points[:, 0].tolist() == [0, 1, 1, 500, -500, 1, 1, 1] and line.points[:, 2].sum() == 2
    # A step within a stroke leaves no end of a stroke behind.
    assert clean(_line([0, 1, 500, 1, 1]), CleaningConfig(outliers="drop"))[0][:, 2].tolist() == [0, 0, 0, 1]
    # Where nothing moves, there is no median to measure by.
    assert clean(_line([0, 0, 0]), CleaningConfig(outliers="drop"))[1] == 0


def test_lengths_and_scale():
    line = _line([0, 2, 2, 2, 4])
    assert clean(line, CleaningConfig(min_points=6)) == ("short", 0)
    assert clean(line, CleaningConfig(max_points=4)) == ("long", 0)
    assert clean(line, CleaningConfig(min_points=5, max_points=5))[0] is line.points
    points, _ = clean(line, CleaningConfig(scale="step"))
    assert points[:, 0].tolist() == [0, 1, 1, 1, 2] and points[-1, 2] == 1
    # Where the pen rests, it makes no step.
    assert clean(_line([0, 0, 0, 0, 2, 2]), CleaningConfig(scale="step"))[0][4:, 0].tolist() == [1, 1]
    assert clean(line, CleaningConfig(scale="height")) == ("flat", 0)
    tall = Line("line", np.stack([np.zeros(11), np.r_[0, np.ones(10)], np.zeros(11)], axis=1))
    points, _ = clean(tall, CleaningConfig(scale="height"))
    # From the 10th to the 90th percentile there are eight of the ten units.
    np.testing.assert_allclose(points[1:, 1], 1 / 8)
    # Points that outliers leave are counted after they are gone.
    outlier = _line([0, 1, 900, 1])
    assert clean(outlier, CleaningConfig(outliers="drop", min_points=4)) == ("short", 1)
    assert len(clean(outlier, CleaningConfig(outliers="drop", max_points=3))[0]) == 3


@pytest.mark.parametrize("kind", ["standard", "isotropic", "none"])
def test_normalisation(kind):
    offsets = np.random.default_rng(1).normal((3, -1), (20, 5), (5000, 2))
    normalisation = Normalisation.measure(offsets, kind)
    points = np.concatenate([np.concatenate([np.zeros((1, 2)), offsets]), np.ones((5001, 1))], axis=1)
    normal = normalisation.apply(points)
    assert normal[0].tolist() == [0, 0, 1]
    if kind == "standard":
        # The statistics are rounded to float32.
        np.testing.assert_allclose(normal[1:, :2].mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(normal[1:, :2].std(axis=0), 1, atol=1e-6)
    if kind == "isotropic":
        assert normalisation.std[0] == normalisation.std[1] and normalisation.mean == (0, 0)
        np.testing.assert_allclose(np.square(normal[1:, :2]).mean(), 1, atol=1e-6)
    if kind == "none":
        np.testing.assert_array_equal(normal, points)
    np.testing.assert_allclose(normalisation.invert(normal), points, rtol=0, atol=1e-11)
    assert Normalisation.from_bits(normalisation.to_bits()) == normalisation


def test_refused_normalisation():
    offsets = np.array([[1.0, 5.0], [2.0, 5.0]])
    with pytest.raises(UsageError, match="--normalise standard: dy is the same in every step"):
        Normalisation.measure(offsets, "standard")
    # The deviation of equal numbers may be a little above zero.
    equal = np.stack([np.arange(1000.0), np.full(1000, 0.1)], axis=1)
    assert equal[:, 1].std() > 0
    with pytest.raises(UsageError, match="--normalise standard: dy is the same in every step"):
        Normalisation.measure(equal, "standard")
    assert Normalisation.measure(offsets, "isotropic").std[0] > 0


def test_lists_of_arrays_are_read_as_numpy_reads_them(tmp_path):
    lists = {split: object_array([random_rows(n, seed) for n in (3, 5)]) for seed, split in enumerate("ab")}
    np.savez_compressed(tmp_path / "lists.npz", **lists)
    np.save(tmp_path / "list.npy", lists["a"])
    np.save(tmp_path / "fortran.npy", np.asfortranarray(random_rows(4)))
    found = read_arrays(tmp_path / "lists.npz")
    assert found.keys() == lists.keys()
    for name, expected in (*lists.items(), ("", lists["a"])):
        read = found[name] if name else read_arrays(tmp_path / "list.npy")[""]
        for one, other in zip(read, expected, strict=True):
            assert one.dtype == np.int16
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(read_arrays(tmp_path / "fortran.npy")[""], random_rows(4))


def test_lists_that_python_2_wrote(tmp_path):
    # numpy.save of Python 2: protocol 2, old module names, the numbers as a byte string.
    content = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
        b"(K\x01K\x01\x85cnumpy\ndtype\nq\x03U\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK?tb\x89]h\x01h\x02K\x00\x85U\x01b\x87R(K\x01K\x01K\x03\x86h\x03U\x02i2K\x00K\x01"
        b"\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06\x01\x00\xfe\xff\x00\x00tba"
        b"tb."
    )
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    (tmp_path / "old.npy").write_bytes(header.getvalue() + content)
    (rows,) = read_arrays(tmp_path / "old.npy")[""]
    assert rows.tolist() == [[1, -2, 0]]


def test_damaged_files(tmp_path):
    whole = tmp_path / "whole.npz"
    np.savez(whole, train=object_array([random_rows(9)]), other=random_rows(50))
    content = whole.read_bytes()
    bad = tmp_path / "bad"
    for cut in (0, 3, 40, 300, len(content) - 30):
        bad.write_bytes(content[:cut])
        with pytest.raises(UsageError, match="bad: is cut off or damaged"):
            read_arrays(bad)
    np.save(tmp_path / "rows.npy", random_rows(50))
    for cut in (8, 100, 200):
        bad.write_bytes((tmp_path / "rows.npy").read_bytes()[:cut])
        with pytest.raises(UsageError, match="bad: is damaged"):
            read_arrays(bad)
    with pytest.raises(UsageError, match="nowhere.npy: cannot be read"):
        read_arrays(tmp_path / "nowhere.npy")


def test_a_split_comes_back_from_disk(tmp_path):
    lines = [Line(f"n{n}", from_offsets(random_rows(n), "a"), "é\n" if n == 3 else None) for n in (2, 3, 7)]
    write_split(tmp_path, "train", lines)
    split = StrokeSplit(tmp_path, "train")
    assert (len(split), split.sizes.tolist()) == (3, [3, 4, 8])
    assert (split.names, split.texts) == (["n2", "n3", "n7"], ["", "é\n", ""])
    for index, line in enumerate(lines):
        np.testing.assert_array_equal(split.points(index), line.points)


def test_options_hold_for_every_form_of_file(tmp_path):
    rows = np.array([[3, 4, 0], [1, 2, 0], [1, -1, 1]], dtype=np.int16)
    np.save(tmp_path / "one.npy", rows)
    np.save(tmp_path / "list.npy", object_array([rows, rows[:2]]))
    np.save(tmp_path / "block.npy", np.stack([rows] * 12))
    np.savez(tmp_path / "lists.npz", train=object_array([rows]), valid=object_array([rows]))
    for path in sorted(tmp_path.iterdir()):
        splits = stroke3([path], first_row="moved", y_up=True, split="50/25/25").load().splits
        assert splits
        for lines in splits.values():
            # Lines stay in their order within a split.
            numbers = [int(line.name.partition("[")[2].strip("]") or 0) for line in lines]
            assert numbers == sorted(numbers)
            for line in lines:
                assert line.points[:, :2].tolist() == [[0, 0], [1, -2], [1, 1]][: len(line.points)]


def test_damaged_splits(tmp_path):
    lines = [Line("a", from_offsets(random_rows(4), "a"))] * 2
    write_split(tmp_path, "train", lines)
    with pytest.raises(
        UsageError,
        match=r"valid.points.npy: is missing; the directory has these splits of handwriting: train",
    ):
        StrokeSplit(tmp_path, "valid")
    for name in ("train.jsonl", "train.starts.npy", "train.points.npy"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError):
            StrokeSplit(tmp_path, "train")
        (tmp_path / name).write_bytes(content)
    for starts in ([0, 9, 10], [1, 5, 10], [0, 10], [0, 5, 9, 10], [0, 5, 11], [5, 10], []):
        np.save(tmp_path / "train.starts.npy", np.array(starts, dtype=np.int64))
        with pytest.raises(UsageError, match="do not fit together"):
            StrokeSplit(tmp_path, "train")
    np.save(tmp_path / "train.starts.npy", np.array([0, 5, 10]))
    assert len(StrokeSplit(tmp_path, "train")) == 2
