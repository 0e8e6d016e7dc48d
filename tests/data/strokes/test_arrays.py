"""NumPy's files from hostile hands: nothing is built that is no plain array, and nothing is waited for."""

import io
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from helpers.strokes_cli import object_array, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rhhn_fairseq.data.strokes import arrays as reader
from rhhn_fairseq.data.strokes.arrays import parse_npy, read_arrays
from rhhn_fairseq.errors import UsageError

RECONSTRUCT = np.zeros(1).__reduce__()[0]
SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 3))
NUMBERS = st.sampled_from("i1 u1 <i2 >i2 <i4 <i8 >u8 <f2 <f4 >f8 b1".split())
LISTS = st.lists(arrays.arrays(NUMBERS, SHAPES, fill=st.nothing()), max_size=4)


class Forged:
    """Pickles as a call of a function, with a state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def header(shape=(1,), descr="|O") -> bytes:
    file = io.BytesIO()
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def dtype(code, order="<", *fields) -> Forged:
    return Forged(np.dtype, (code, False, True), (3, order, *(fields or (None, None, None, -1, -1, 0))))


def made(shape, kind, data, fortran=False) -> Forged:
    return Forged(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, kind, fortran, data))


OBJECTS = dtype("O8", "|", None, None, None, -1, -1, 63)


def npy(*elements, protocol=4, kind=OBJECTS) -> bytes:
    content = pickle.dumps(made((len(elements),), kind, list(elements)), protocol=protocol)
    return header((len(elements),)) + content


def refusal(content: bytes) -> str:
    with pytest.raises(ValueError) as raised:
        parse_npy(content)
    return str(raised.value)


def test_objects_over_given_bytes_do_not_crash_the_process(tmp_path):
    # The flags of a type of objects tell NumPy that it is one; without them bytes become pointers.
    forged = dtype("O8", "|", None, None, None, -1, -1, 0)
    path = tmp_path / "forged.npy"
    path.write_bytes(header() + pickle.dumps(made((2,), forged, b"A" * 16), protocol=4))
    program = "import sys; from rhhn_fairseq.data.strokes.arrays import read_arrays\n"
    program += "print(read_arrays(sys.argv[1])[''].tolist())"
    result = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert result.returncode == 1, f"ended by signal {-result.returncode}"
    assert (
        "UsageError" in result.stderr
        and "is damaged or holds something that is not an array" in result.stderr
    )


NINE_BYTES = b"123456789"
GOOD = dtype("i2")
REFUSED = {
    "object dtype in a line": made((1,), OBJECTS, b"A" * 8),
    "list in a line": made((1,), GOOD, [1]),
    "void": made((1,), dtype("V8", "|", None, None, None, 8, 1, 0), b"A" * 8),
    "structured": made((1,), dtype("V2", "|", None, ("a",), {"a": (GOOD, 0)}, 2, 1, 0), b"AA"),
    "subarray": made((1,), dtype("V2", "|", (GOOD, (1,)), None, None, 2, 1, 0), b"AA"),
    "size": made((1,), dtype("i2", "<", None, None, None, 800, -1, 0), b"AA"),
    "long double": made((1,), dtype("f16"), b"A" * 16),
    "too few bytes": made((5, 3), GOOD, NINE_BYTES),
    "product beyond 64 bits": made((2**32, 2**32), GOOD, b""),
    "negative": made((-1, -1), GOOD, b"AA"),
    "many dimensions": made((1,) * 64, GOOD, b"AA"),
    "class itself": np.ndarray,
    "text for an array": "text",
    "list of lists": [[1, 2, 0]],
    "array of objects": object_array([random_rows(2)]),
    "program": Forged(os.system, ("true",)),
}


@pytest.mark.parametrize("element", REFUSED.values(), ids=REFUSED)
def test_what_is_no_plain_array_is_refused(element):
    assert refusal(npy(random_rows(2), element))


def test_each_protocol_and_both_orders(tmp_path):
    rows = [random_rows(3), np.asfortranarray(random_rows(4).astype(">f8")), np.zeros((0, 3), np.uint8)]
    for protocol in range(2, 5):
        found = parse_npy(header((3,)) + pickle.dumps(object_array(rows), protocol=protocol))
        for one, other in zip(found, rows, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    # Lists of arrays of one shape become an array of Python's numbers.
    file = io.BytesIO()
    np.save(file, np.array([random_rows(2), random_rows(2)], dtype=object))
    np.testing.assert_array_equal(parse_npy(file.getvalue()), [random_rows(2)] * 2)


@settings(max_examples=60, deadline=None)
@given(LISTS, st.integers(2, 4))
def test_lists_come_back_as_they_were(lists, protocol):
    found = parse_npy(header((len(lists),)) + pickle.dumps(object_array(lists), protocol=protocol))
    assert len(found) == len(lists)
    for one, other in zip(found, lists, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def check_survives(content: bytes) -> None:
    """Whatever the bytes, an array of plain numbers comes out, or a ValueError."""
    try:
        found = parse_npy(content)
    except ValueError:
        return
    for array in found if found.dtype == object else [found]:
        assert isinstance(array, np.ndarray) and array.dtype.kind in "biufSU"
        assert array.nbytes <= len(content) * 8
        array.tolist()


SEEDS = [npy(random_rows(2), random_rows(3), protocol=protocol) for protocol in range(2, 5)]
SEEDS.append(header((2, 3), "<i2") + random_rows(2).tobytes())
CODES = [code.code.encode("latin1") for code in pickletools.opcodes]
PIECES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(CODES),
    st.sampled_from([b"(", b"t", b"R", b"b", b"]", b"a", b"e", b"K\x02\x85", b"h\x02", b"j\x00\x00\x00\x00"]),
    st.sampled_from([b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n"]),
    st.sampled_from([b"X\x02\x00\x00\x00O8", b"X\x02\x00\x00\x00V8", b"J\xff\xff\xff\xff", b"C\x01b"]),
)
CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 6), PIECES), min_size=1, max_size=6)


def check_changed(seed: bytes, changes) -> None:
    content = seed
    for place, length, piece in changes:
        place %= len(content) + 1
        content = content[:place] + piece + content[place + length :]
    check_survives(content)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SEEDS), CHANGES)
def test_changed_files(seed, changes):
    check_changed(seed, changes)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30))
def test_programs_of_any_instructions(pieces):
    check_survives(header() + b"\x80\x02" + b"".join(pieces) + b".")


@pytest.mark.slow
def test_large_answers_to_small_files():
    # One array of 3,000 bytes named 200,000 times.
    rows = np.zeros((500, 3), np.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "LARGEST", 1 << 20)
        assert "too many bytes together" in refusal(npy(*[rows] * 1000))
        patch.setattr(reader, "MOST_INSTRUCTIONS", 1000)
        assert "more than 1,000 instructions" in refusal(header() + b"\x80\x02" + b"]" * 2000 + b".")
    # A million tuples within each other, and calls within calls.
    nested = b"\x80\x02)" + b"\x85" * 1_000_000 + b"."
    assert "not an array" in refusal(header() + nested)
    calls = b"\x80\x02cnumpy\ndtype\nq\x00)R" + b"\x85h\x00q\x01h\x01R" * 3 + b"."
    assert refusal(header() + calls)
    deep = b"\x80\x02)" + b"\x85q\x02cnumpy\ndtype\nh\x02R" * 100_000 + b"."
    assert "not an array" in refusal(header() + deep)


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '|V8', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<i2')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (1, 1, 1, 1), }",
        "{'descr': '<U1', 'fortran_order': False, 'shape': (), }",
        "(" * 9000,
        "",
    ],
)
def test_refused_headers(text):
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + b"\xff" * 4
    assert refusal(content)


def refused_file(path) -> str:
    with pytest.raises(UsageError) as raised:
        read_arrays(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_archives_that_unpack_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "LARGEST", 10_000)
    content = header((20_000,), "|i1") + bytes(20_000)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.npy", content)
    assert path.stat().st_size < 1000
    assert "has more than 10,000 bytes" in refused_file(path)
    # The same with a directory that states 100 bytes for it.
    packed = bytearray(path.read_bytes())
    for offset in (packed.index(b"PK\x03\x04") + 22, packed.index(b"PK\x01\x02") + 24):
        assert int.from_bytes(packed[offset : offset + 4], "little") == len(content)
        packed[offset : offset + 4] = (100).to_bytes(4, "little")
    path.write_bytes(packed)
    assert "bomb.npz" in refused_file(path)
    (tmp_path / "long.npy").write_bytes(content)
    assert "has more than 10,000 bytes" in refused_file(tmp_path / "long.npy")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "itself.npy").symlink_to("itself.npy")
    assert "pipe.npy: is no regular file" in refused_file(tmp_path / "pipe.npy")
    assert "folder.npy: cannot be read (Is a directory)" in refused_file(tmp_path / "folder.npy")
    assert "itself.npy: cannot be read (Too many levels" in refused_file(tmp_path / "itself.npy")
    assert "/dev/zero: is no regular file" in refused_file("/dev/zero")
