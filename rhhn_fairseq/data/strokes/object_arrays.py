"""Reads lists of arrays as NumPy pickles them, without unpickling.

A pickle is a program for a small stack machine. Here the machine finds no function, only records: each call
becomes the function's name and its arguments. The records are then compared with the few forms that NumPy
has written for arrays of numbers since Python 2, and the numbers are taken from their bytes.
"""

import io
import math
import pickle
import pickletools
from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.data.strokes.buffers import MOST_DIMENSIONS, NUMBERS, array_over

# A million lines of handwriting take some 18 million.
MOST_INSTRUCTIONS = 20_000_000

# What NumPy names in a pickled array, by the last part of the module: the rest differs between versions.
_FUNCTIONS = {
    ("multiarray", "_reconstruct"): "_reconstruct",
    ("numeric", "_frombuffer"): "_frombuffer",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    # Protocol 2 has no empty bytes and writes a call of ``bytes`` instead.
    ("builtins", "bytes"): "bytes",
    ("__builtin__", "bytes"): "bytes",
}
_MODULES = ("numpy", "_codecs", "builtins", "__builtin__")


@dataclass(frozen=True)
class Function:
    """The name of a function, in place of the function."""

    name: str

    def __call__(self, *arguments):
        return Call(self.name, arguments)


@dataclass(eq=False)
class Call:
    """A call that a pickle asks for, and the state that it gives to the result."""

    function: str
    arguments: tuple
    state: object = None

    def __setstate__(self, state) -> None:
        self.state = state


UNPICKLING = (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError)
"""What a damaged pickle raises besides ValueError."""


def parse_object_array(content: bytes, shape: tuple[int, ...], limit: int) -> np.ndarray:
    """Returns the list of arrays in a pickle.

    Args:
        shape: of the list, as the header of the file says. limit: the most bytes that the arrays may have
            together.

    Returns:
        An array of objects, which are arrays of numbers. If the pickle holds single numbers, as NumPy
        writes for arrays of equal shape, an array of float64.

    Raises:
        ValueError: the pickle is damaged or holds anything else.
    """
    try:
        outer = _call(run(content), "_reconstruct")
        _check_reconstruct(outer)
        version, outer_shape, dtype, fortran, elements = outer.state
    except UNPICKLING as error:
        raise ValueError("its pickle is not that of an array") from error
    if (version, fortran) != (1, False) or not _is_object_dtype(dtype) or not isinstance(elements, list):
        raise ValueError("its pickle is not that of a list of arrays")
    if _shape(outer_shape) != shape or math.prod(shape) != len(elements):
        raise ValueError(f"its pickle has another shape than {shape}, which its header says")
    if elements and all(type(element) in (bool, int, float) for element in elements):
        return _numbers(elements, shape)
    if len(shape) != 1:
        raise ValueError(f"a list of shape {shape}")
    return _list(elements, limit)


def _numbers(elements: list, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.array([float(element) for element in elements]).reshape(shape)
    except OverflowError as error:
        raise ValueError("a number beyond float64") from error


def _list(elements: list, limit: int) -> np.ndarray:
    # A pickle can name one array any number of times.
    arrays: dict[int, np.ndarray] = {}
    result = np.empty(len(elements), dtype=object)
    for index, element in enumerate(elements):
        if id(element) not in arrays:
            arrays[id(element)] = _array(element)
        result[index] = arrays[id(element)]
        limit -= result[index].nbytes
        if limit < 0:
            raise ValueError("its arrays have too many bytes together")
    return result


def _array(value) -> np.ndarray:
    """Returns the array of numbers that a call would make."""
    try:
        if isinstance(value, Call) and value.function == "_frombuffer":
            data, dtype, shape, order = value.arguments
            if value.state is not None or order not in ("C", "F"):
                raise ValueError("a buffer in an unknown order")
            return array_over(_bytes(data), _number_dtype(dtype), _shape(shape), order == "F")
        call = _call(value, "_reconstruct")
        _check_reconstruct(call)
        version, shape, dtype, fortran, data = call.state
        if version != 1 or type(fortran) not in (bool, int):
            raise ValueError("an array of an unknown version")
        return array_over(_bytes(data), _number_dtype(dtype), _shape(shape), bool(fortran))
    except TypeError as error:
        raise ValueError("something that is not an array of numbers") from error


def _call(value, function: str) -> Call:
    if not isinstance(value, Call) or value.function != function:
        raise ValueError("something that is not an array")
    return value


def _check_reconstruct(call: Call) -> None:
    subtype, shape, kind = call.arguments
    if subtype != Function("ndarray") or shape != (0,) or _bytes(kind) != b"b":
        raise ValueError("an array of an unknown form")


def _shape(value) -> tuple[int, ...]:
    known = type(value) is tuple and len(value) <= MOST_DIMENSIONS
    if not (known and all(type(size) is int and 0 <= size < 2**63 for size in value)):
        raise ValueError("a shape that no line of handwriting has")
    return value


def _bytes(value) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    # Python 2's byte strings come as text that latin1 maps one to one.
    if isinstance(value, str):
        return value.encode("latin1")
    if isinstance(value, Call) and value.state is None:
        if (value.function, value.arguments) == ("bytes", ()):
            return b""
        if value.function == "encode":
            text, encoding = value.arguments
            if isinstance(text, str) and encoding == "latin1":
                return text.encode("latin1")
    raise ValueError("an array without bytes")


def _dtype_fields(value) -> tuple[str, tuple]:
    """Returns the code of a dtype, such as i2, and its state: byte order and seven other fields."""
    call = _call(value, "dtype")
    code, align, copy = call.arguments
    if not isinstance(code, str) or align not in (0, 1) or copy not in (0, 1):
        raise ValueError("a type of an unknown form")
    if type(call.state) is not tuple or len(call.state) != 8:
        raise ValueError("a type of an unknown version")
    return code, call.state


def _is_object_dtype(value) -> bool:
    code, state = _dtype_fields(value)
    return code in ("O4", "O8") and state == (3, "|", None, None, None, -1, -1, 63)


def _number_dtype(value) -> np.dtype:
    """Returns the dtype of plain numbers; its flags, fields and sizes must be those of every such dtype."""
    code, (version, order, *rest) = _dtype_fields(value)
    if (code[:1], code[1:]) not in NUMBERS:
        raise ValueError(f"elements of type {code[:20]}, which are not plain numbers")
    if version != 3 or order not in ("<", ">", "|", "=") or rest != [None, None, None, -1, -1, 0]:
        raise ValueError(f"a changed type {code}")
    return np.dtype(order + code)


# What pickles of numbers, texts, bytes, tuples, lists and calls consist of.
_INSTRUCTIONS = set(
    """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINSTRING BINSTRING SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    BYTEARRAY8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS BINPUT LONG_BINPUT MEMOIZE
    BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
    """.split()
)


class _Recorder(pickle.Unpickler):
    """An unpickler that finds no function, only names that record their calls."""

    def find_class(self, module: str, name: str) -> Function:
        known = _FUNCTIONS.get((module.rpartition(".")[2], name))
        if known is None or module.partition(".")[0] not in _MODULES:
            asked = " ".join(f"{module[:40]}.{name[:40]}".split())
            raise ValueError(f"it asks for {asked}, which no array needs")
        return Function(known)


def run(content: bytes):
    """Returns the values of a pickle, with records in place of calls.

    Raises:
        ValueError: it has another instruction, or names a function that no array needs.
        Exception: another one of ``UNPICKLING``, if it is damaged.
    """
    for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
        if count > MOST_INSTRUCTIONS:
            raise ValueError(f"its pickle has more than {MOST_INSTRUCTIONS:,} instructions")
        if instruction.name not in _INSTRUCTIONS:
            raise ValueError(f"its pickle has an instruction {instruction.name}, which no array needs")
        # The unpickler allocates memory for all numbers below.
        if instruction.name in ("BINPUT", "LONG_BINPUT") and argument > count:
            raise ValueError("its pickle skips numbers of values")
    return _Recorder(io.BytesIO(content), encoding="latin1").load()
