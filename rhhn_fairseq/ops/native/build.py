"""The compiled library: its structures, the build that is loaded, and the types of its functions."""

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

LEVELS = {"AVX512": ("avx512", "avx2", "any"), "AVX2": ("avx2", "any")}
"""The builds that a processor can run, best first, by torch's name for its capability."""

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""The types of operands that have compiled functions."""


def _fields(spec: str, kind) -> list[tuple[str, type]]:
    return [(name, kind) for name in spec.split()]


class GatedStruct(ctypes.Structure):
    """``struct Gated`` of gated.h."""

    _fields_ = [
        *_fields("T B H Z D ld_u ld_du keep_t", ctypes.c_int64),
        *_fields("forget_bias epsilon keep_scale zone_h_rate zone_c_rate", ctypes.c_double),
        *_fields("threads", ctypes.c_int64),
        *_fields("u gx z weight_d bias gate_gain gate_shift c_gain c_shift", ctypes.c_void_p),
        *_fields("mask resets keep zone_h zone_c c_scale h0 c0 h c y", ctypes.c_void_p),
        *_fields("dy dh dh_direct dc du dgx dz dweight_d sums", ctypes.c_void_p),
    ]


class HighwayStruct(ctypes.Structure):
    """``struct Highway`` of highway.cpp."""

    _fields_ = [
        *_fields("T B H L D ld_y", ctypes.c_int64),
        *_fields("keep_scale zone_rate", ctypes.c_double),
        *_fields("threads", ctypes.c_int64),
        *_fields("u gx z bias bias_x bias_z first mask resets keep zone_h s0 s o y", ctypes.c_void_p),
        *_fields("dy ds ds_direct past du dgx dz sums", ctypes.c_void_p),
    ]


class RecurrenceStruct(ctypes.Structure):
    """``struct Recurrence`` of sequence.h."""

    _fields_ = [*_fields("weights gal share", ctypes.c_void_p), *_fields("start stop", ctypes.c_int64)]


class HyperRecurrenceStruct(ctypes.Structure):
    """``struct HyperRecurrence`` of hyper_sequence.cpp."""

    _fields_ = [
        *_fields("previous start stop", ctypes.c_int64),
        *_fields("weight weight_e weight_z bias_z g_hyper gal share", ctypes.c_void_p),
    ]


class ProductStruct(ctypes.Structure):
    """``struct Product`` of product.cpp."""

    _fields_ = [
        *_fields("M K N ld_w ld_add threads", ctypes.c_int64),
        *_fields("x w add y", ctypes.c_void_p),
    ]


class MatmulStruct(ctypes.Structure):
    """``struct Matmul`` of matmul.cpp."""

    _fields_ = [
        *_fields("M K N ld_x next_x ld_w next_w ld_add ld_y threads", ctypes.c_int64),
        *_fields("x w panels add y", ctypes.c_void_p),
    ]


class IntegersStruct(ctypes.Structure):
    """``struct Integers`` of integers.cpp."""

    _fields_ = [
        *_fields("M K N threads", ctypes.c_int64),
        *_fields("x panels scales sums y", ctypes.c_void_p),
    ]


class EnergyStruct(ctypes.Structure):
    """``struct Energy`` of energy.cpp."""

    _fields_ = [
        *_fields("B R S A H threads", ctypes.c_int64),
        *_fields("q k v mask e de dq dk dv", ctypes.c_void_p),
    ]


STRUCTURES = {
    "gated": GatedStruct,
    "highway": HighwayStruct,
    "recurrence": RecurrenceStruct,
    "hyper_recurrence": HyperRecurrenceStruct,
    "product": ProductStruct,
    "matmul": MatmulStruct,
    "integers": IntegersStruct,
    "energy": EnergyStruct,
}
"""The structures that both languages declare, by their name in the C++ functions ``size_of_*``."""


def _path() -> Path | None:
    """Returns the best build that this processor can run; None if there is none."""
    for level in LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("any",)):
        for suffix in EXTENSION_SUFFIXES:
            path = Path(__file__).with_name(f"_{level}{suffix}")
            if path.is_file():
                return path
    return None


IS_BUILT = _path() is not None
"""Whether there is a library to load, for code that torch.compile traces: it cannot trace ``library``."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled functions; None if they were not built.

    Raises:
        ImportError: the library cannot be loaded, or was built from other sources than these: the structures
            differ in size.
    """
    path = _path()
    return None if path is None else load(path)


def load(path: Path) -> ctypes.CDLL:
    """Loads a build, checks its structures and declares its functions; see ``library``."""
    try:
        compiled = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded ({error}); install the package again") from error
    for name, structure in STRUCTURES.items():
        size = getattr(compiled, f"size_of_{name}", None)
        if size is None or size() != ctypes.sizeof(structure):
            raise ImportError(
                f"{path} was built from other sources: its struct {name} differs; install the package again"
            )
    _declare(compiled)
    return compiled


def _declare(compiled: ctypes.CDLL) -> None:
    """Sets the types of arguments and results of all functions."""
    address, integer = ctypes.c_void_p, ctypes.c_int64
    steps = ("lstm", "hyper_lstm", "highway", "energy")
    signatures: dict[str, tuple[type, ...]] = {
        f"{name}_{direction}_{dtype}": (address, integer)
        for name in steps
        for direction in ("forward", "backward")
        for dtype in DTYPES.values()
    }
    for direction in ("forward", "backward"):
        signatures[f"lstm_sequence_{direction}"] = (address, address)
        signatures[f"highway_sequence_{direction}"] = (address, address)
        signatures[f"hyper_lstm_sequence_{direction}"] = (address, address, address)
    signatures |= {"matmul": (address,), "product": (address,), "product_transposed": (address,)}
    signatures |= {"multiply_integers": (address,), "lay_panels": (address, address)}
    signatures["lstm_gates"] = (integer, integer, ctypes.c_float, *(address,) * 4)
    for name, types in signatures.items():
        function = getattr(compiled, name)
        function.argtypes, function.restype = types, None
    compiled.stays.argtypes, compiled.stays.restype = (integer, integer), ctypes.c_int
    compiled.panel_columns.argtypes, compiled.panel_columns.restype = (), integer


@functools.cache
def compiled() -> ctypes.CDLL:
    """Returns ``library``, for callers that only run if there is one.

    Raises:
        RuntimeError: the library was not built.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError("the compiled functions were not built; install the package again")
    return loaded


@functools.cache
def multiplies() -> bool:
    """Whether compiled products are available and fast, which they are with AVX2 or AVX-512."""
    return torch.backends.cpu.get_cpu_capability() in LEVELS and library() is not None


@functools.cache
def runs_sequences(dtype: torch.dtype) -> bool:
    """Whether there are functions that run many steps in one call for operands of a type."""
    return dtype == torch.float32 and multiplies()
