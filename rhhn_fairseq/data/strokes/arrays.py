"""Reads NumPy's files without trusting them.

``numpy.load`` unpickles lists of arrays, and a pickle can run any program. Even a pickle that may name only
NumPy's own functions can build arrays over arbitrary addresses. Here the unpickler finds no function, only
records of calls, and the numbers are taken from their bytes after type, shape and length are checked.
"""

import io
import math
import pickle
import pickletools
import re
import zipfile
from pathlib import Path

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import open_regular, read_within, readable

# The largest files of QuickDraw unpack to some 200 MB.
LARGEST = 1 << 30
"""The most bytes that a file may have, unpacked."""

# A million lines of handwriting take some 18 million.
MOST_INSTRUCTIONS = 20_000_000

_MAGIC = b"\x93NUMPY"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_NUMBERS = re.compile(r"[<>|=]?([biu]1|[iu][248]|f[248])")
_TEXTS = re.compile(r"[<>|=]?[SU][1-9][0-9]{0,5}")


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
        if start == _MAGIC:
            return {"": _parse(read_within(file, LARGEST, str(path)), str(path))}
        arrays, remaining = {}, LARGEST
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                name = f"{path}:{entry.filename}"
                with readable(name), archive.open(entry) as member:
                    content = read_within(member, remaining, name)
                remaining -= len(content)
                arrays[entry.filename.removesuffix(".npy")] = _parse(content, name)
        return arrays


def _parse(content: bytes, name: str) -> np.ndarray:
    try:
        return parse_npy(content)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name}: is damaged or holds something that is not an array ({reason})") from error


def parse_npy(content: bytes) -> np.ndarray:
    """Like ``read_arrays``, from the bytes of a .npy file; ValueError says why that is not possible."""
    file = io.BytesIO(content)
    try:
        shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        rest = content[file.tell() :]
        if dtype.kind == "O":
            return _parse_list(_recorded(rest), shape)
        if not (_NUMBERS.fullmatch(dtype.str) or _TEXTS.fullmatch(dtype.str)):
            raise ValueError(f"elements of type {dtype.str}, which are no numbers or texts")
        return _array_over(rest, dtype, shape, fortran)
    except ValueError:
        raise
    # Whatever else the parts of a damaged file cause in NumPy, in the unpickler or in the checks below.
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _array_over(data: bytes, dtype: np.dtype, shape: tuple[int, ...], fortran: bool) -> np.ndarray:
    """Returns a read-only array of numbers or texts over bytes; ValueError unless they fit exactly."""
    if type(shape) is not tuple or len(shape) > 3 or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("a shape that no line of handwriting has")
    # NumPy multiplies modulo 2**64.
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"an array of {dtype} and shape {shape} has {expected:,} bytes, not {len(data):,}")
    if dtype.kind == "U":
        # Invalid code points fail here; NumPy would fail when the text is used.
        data.decode("utf-32-be" if dtype.str.startswith(">") else "utf-32-le")
    flat = np.frombuffer(data, dtype=dtype) if data else np.zeros(0, dtype=dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


class _Call:
    """A call in a pickle: what is called (the name of the subclass), its arguments, the result's state."""

    state: tuple = ()

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state) -> None:
        self.state = state


# What NumPy names in a pickled array. Protocol 2 has no empty bytes and writes a call of ``bytes`` instead.
_NAMES = {name: type(name, (_Call,), {}) for name in ("_reconstruct", "ndarray", "dtype", "encode", "bytes")}
_MODULES = ("numpy", "_codecs", "builtins", "__builtin__")

# What pickles of numbers, texts, bytes, tuples, lists and calls consist of.
_INSTRUCTIONS = set(
    """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINSTRING BINSTRING SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES
    BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS BINPUT LONG_BINPUT
    MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
    """.split()
)


class _Recorder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if name not in _NAMES or module.partition(".")[0] not in _MODULES:
            raise ValueError(f"it asks for {module[:40]}.{name[:40]}, which no array needs")
        return _NAMES[name]


def _recorded(content: bytes):
    """Returns the values of a pickle, with records in place of calls."""
    for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
        if count > MOST_INSTRUCTIONS:
            raise ValueError(f"its pickle has more than {MOST_INSTRUCTIONS:,} instructions")
        # The unpickler allocates memory for all numbers below that of a BINPUT.
        skips = instruction.name in ("BINPUT", "LONG_BINPUT") and argument > count
        if instruction.name not in _INSTRUCTIONS or skips:
            raise ValueError(f"its pickle has an instruction {instruction.name}, which no array needs")
    return _Recorder(io.BytesIO(content), encoding="latin1").load()


def _parse_list(outer, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the list of arrays of numbers that a call makes.

    Of arrays of equal shape NumPy writes single numbers instead; they become an array of float64.
    """
    _, _, dtype, _, elements = _state(outer, "_reconstruct")
    if _state(dtype, "dtype") != (3, "|", None, None, None, -1, -1, 63) or math.prod(shape) != len(elements):
        raise ValueError(f"its pickle is not that of a list of shape {shape}")
    if elements and all(type(element) in (bool, int, float) for element in elements):
        return np.array([float(element) for element in elements]).reshape(shape)
    # A pickle can name one array any number of times.
    arrays: dict[int, np.ndarray] = {}
    result = np.empty(shape, dtype=object)
    remaining = LARGEST
    for index, element in enumerate(elements):
        if id(element) not in arrays:
            _, one_shape, one_dtype, fortran, data = _state(element, "_reconstruct")
            arrays[id(element)] = _array_over(_bytes(data), _plain(one_dtype), one_shape, bool(fortran))
        # In a list of several dimensions this is no element, and fails.
        result[index] = arrays[id(element)]
        remaining -= arrays[id(element)].nbytes
        if remaining < 0:
            raise ValueError("its arrays have too many bytes together")
    return result


def _state(value, name: str) -> tuple:
    if type(value) is not _NAMES[name]:
        raise ValueError("something that is not an array of numbers")
    return value.state


def _plain(value) -> np.dtype:
    """Returns the dtype of plain numbers; its flags, fields and sizes must be those of every such dtype."""
    version, order, *rest = _state(value, "dtype")
    code = value.arguments[0]
    known = _NUMBERS.fullmatch(code) and order in ("<", ">", "|", "=") and version == 3
    if not known or rest != [None, None, None, -1, -1, 0]:
        raise ValueError("elements that are not plain numbers")
    return np.dtype(order + code)


def _bytes(value) -> bytes:
    if type(value) is _NAMES["bytes"]:
        return b""
    if type(value) is _NAMES["encode"]:
        value, _ = value.arguments
    # Python 2's byte strings come as text that latin1 maps one to one.
    return value.encode("latin1") if isinstance(value, str) else memoryview(value).tobytes()
