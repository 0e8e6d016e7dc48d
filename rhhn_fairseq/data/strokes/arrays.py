"""Reads NumPy's files without trusting them.

``numpy.load`` unpickles lists of arrays, and a pickle can run any program. Even a pickle that may name only
NumPy's own functions can build arrays over arbitrary addresses. So nothing here is unpickled, and only
plain numbers and texts are read, after their type, shape and length are checked.
"""

import re
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rhhn_fairseq.data.strokes.buffers import array_over, plain_dtype
from rhhn_fairseq.data.strokes.object_arrays import parse_object_array
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import open_regular, read_within, readable

# The largest files of QuickDraw unpack to some 200 MB.
LARGEST = 1 << 30
"""The most bytes that a file may have, unpacked."""

LONGEST_HEADER = 1 << 16
_MAGIC = b"\x93NUMPY"
_DESCRIPTION = re.compile(rb"'descr': *'([<>|=]?)([biufSUO])([0-9]{0,9})' *[,}]")
_ORDER = re.compile(rb"'fortran_order': *(True|False) *[,}]")
# Python 2 wrote an L after some numbers.
_SHAPE = re.compile(rb"'shape': *\(((?:[0-9]{1,18}L? *, *)*(?:[0-9]{1,18}L? *)?)\) *[,}]")


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a .npz file by name, or that of a .npy file under the name "".

    Returns:
        Read-only arrays of numbers or texts. A list of arrays, as sketch-rnn's files have it, is an array
        [n] of objects, each of which is an array of numbers.

    Raises:
        UsageError: the file cannot be read, is damaged, has more than ``LARGEST`` bytes unpacked, or holds
            something that is neither an array nor a list of arrays.
    """
    with open_regular(path) as file:
        start = file.read(len(_MAGIC))
        file.seek(0)
        if not start:
            raise UsageError(f"{path}: is empty")
        if start == _MAGIC:
            return {"": _parse(read_within(file, LARGEST, str(path)), str(path))}
        if start.startswith(b"PK"):
            return _read_archive(file, str(path))
    raise UsageError(f"{path}: is neither a .npy nor a .npz file")


def _read_archive(file: BinaryIO, path: str) -> dict[str, np.ndarray]:
    with readable(path), zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        remaining = LARGEST
        if sum(entry.file_size for entry in entries) > remaining:
            raise UsageError(f"{path}: unpacks to more than {LARGEST:,} bytes, the most that is read")
        arrays = {}
        for entry in entries:
            name = f"{path}:{entry.filename}"
            with readable(name), archive.open(entry) as member:
                content = read_within(member, remaining, name)
            remaining -= len(content)
            arrays[entry.filename.removesuffix(".npy")] = _parse(content, name)
    return arrays


def _parse(content: bytes, name: str) -> np.ndarray:
    """Returns the array that the bytes of a .npy file hold."""
    try:
        return parse_npy(content)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name}: is damaged or holds something that is not an array ({reason})") from error


def parse_npy(content: bytes) -> np.ndarray:
    """Like ``read_arrays``, from the bytes of a .npy file; ValueError says why that is not possible.

    The header is matched and not evaluated: deeply nested text can crash Python's parser, which
    ``numpy.load`` calls.
    """
    major = content[6] if content.startswith(_MAGIC) and len(content) > 12 else 0
    if major not in (1, 2, 3):
        raise ValueError("it has no header of NumPy's format 1, 2 or 3")
    begin = 10 if major == 1 else 12
    end = begin + int.from_bytes(content[8:begin], "little")
    header = content[begin : min(end, LONGEST_HEADER)]
    description, order, shape_text = (pattern.search(header) for pattern in (_DESCRIPTION, _ORDER, _SHAPE))
    if not (description and order and shape_text):
        raise ValueError("its header does not describe an array of numbers, of texts or of arrays")
    shape = tuple(int(size.rstrip(b"L ")) for size in shape_text[1].split(b",") if size.strip())
    if description[2] == b"O":
        return parse_object_array(content[end:], shape, LARGEST)
    dtype = plain_dtype(*(group.decode() for group in description.groups()))
    return array_over(content[end:], dtype, shape, order[1] == b"True")
