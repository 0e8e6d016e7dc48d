"""Saves trained modules as a directory: the weights in safetensors, the configuration in JSON.

``config.json`` holds the number of the format, the kind of module, the dtype of its weights and the
arguments of its constructor. ``model.safetensors`` holds the parameters and buffers of ``state_dict``. No
code is loaded from either, and loading needs neither fairseq nor data. Both files fit Hugging Face's hub, and
a name there works in place of a directory if ``huggingface_hub`` is installed.

Cells, the layers of ``rhhn_fairseq.nn``, and the networks of characters and of strokes are saved this way.
The package contains three such directories, see ``packaged``.
"""

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import read_json, refuse_endless, replace_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 2
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
PACKAGED = Path(__file__).resolve().parent / "pretrained"

Tensors = Mapping[str, Tensor]

RENAMED = {
    "gate_gain": "gate_norm_weight",
    "gate_shift": "gate_norm_bias",
    "c_gain": "c_norm_weight",
    "c_shift": "c_norm_bias",
}
"""Names of parameters of cells in older files, where some are matrices [4, H], and today's, all vectors."""


@dataclass(frozen=True)
class Kind:
    """A kind of module that can be saved.

    Attributes:
        describe: returns what ``build`` needs of a module, in JSON types. UsageError if it cannot be saved.
        build: returns a module with fresh weights, from the result of ``describe`` and the stored tensors.
    """

    describe: Callable[[Any], dict]
    build: Callable[[dict, Tensors], nn.Module]


KINDS: dict[str, Kind] = {}
"""The kinds by name; each module that defines one adds it."""


class Pretrained:
    """Mixin for modules that can be saved and loaded; ``kind`` names their entry of ``KINDS``."""

    kind: ClassVar[str]

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Writes this module as ``config.json`` and ``model.safetensors``. Tied weights are stored twice.

        Args:
            directory: created if it is missing; existing files of these names are replaced.
            dtype: of the weights in the file; None keeps theirs. Loading restores the dtype of the module;
                values are rounded if this one is narrower.

        Raises:
            UsageError: the module is quantised or changed, its weights have several types, or ``dtype``
                cannot hold one of them.
        """
        save_pretrained(self, directory, dtype)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(cls, source: str | Path, **options) -> Self:
        """Loads a saved module of this class; see ``rhhn_fairseq.nn.from_pretrained``.

        Raises:
            UsageError: also if the directory holds another class.
        """
        module = from_pretrained(source, **options)
        if not isinstance(module, cls):
            raise UsageError(f"{source} holds {type(module).__name__}, not {cls.__name__}")
        return module


def packaged(name: str) -> Path:
    """Returns the directory of a trained network in the package: "characters", "handwriting" or "kanji"."""
    return PACKAGED / name


def save_pretrained(module: nn.Module, directory: str | Path, dtype: torch.dtype | None = None) -> None:
    """Saves a module as ``Pretrained.save_pretrained`` does.

    Raises:
        UsageError: also if ``dtype`` is no type that weights may have.
    """
    if dtype is not None and dtype not in DTYPES.values():
        known = ", ".join(map(str, DTYPES.values()))
        raise UsageError(f"save_pretrained: dtype={dtype!r} is not possible, choose from {known}")
    with needed_for("saving and loading modules need"):
        safetensors = importlib.import_module("safetensors.torch")
    state, kind = module.state_dict(), str(module.kind)
    config = {"format": FORMAT, "kind": kind} | KINDS[kind].describe(module)
    different = _shapes(_build(config, state, "meta").state_dict()).items() ^ _shapes(state).items()
    if different:
        raise UsageError(
            f"save_pretrained: the {type(module).__name__} has other weights than its options describe "
            f"({min(name for name, _ in different)}); save it before it is quantised, pruned or extended"
        )
    config["dtype"] = _dtype_of(module)
    tensors, places = {}, set()
    for name, tensor in state.items():
        stored = _stored(name, tensor, dtype)
        # The file has no two tensors of the same memory, as tied weights are.
        place = stored.untyped_storage().data_ptr()
        tensors[name] = stored.clone() if place in places else stored
        places.add(place)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with replace_file(folder / WEIGHTS, follow=False) as file:
        file.write(safetensors.save(tensors, metadata={"format": "pt"}))
    with replace_file(folder / CONFIG, follow=False) as file:
        file.write(f"{json.dumps(config, indent=2)}\n".encode())


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    # What a quantised weight keeps besides tensors has no shape.
    return {name: tuple(getattr(tensor, "shape", ())) for name, tensor in tensors.items()}


def _dtype_of(module: nn.Module) -> str:
    names = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    if len(names) > 1 or not names <= DTYPES.keys():
        given, known = ", ".join(sorted(names)), ", ".join(DTYPES)
        raise UsageError(f"save_pretrained: the weights are {given}, expected one of {known}")
    return names.pop()


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a tensor as it is stored in the file."""
    stored = tensor.detach().cpu().contiguous()
    if dtype is None or not stored.is_floating_point():
        return stored
    stored = stored.to(dtype)
    if not bool(stored.isfinite().all()):
        raise UsageError(f"{name} has numbers that {str(dtype).removeprefix('torch.')} cannot hold")
    return stored


def from_pretrained(source: str | Path, *, device="cpu", revision: str | None = None) -> nn.Module:
    """Loads a module that ``save_pretrained`` wrote, in evaluation mode.

    Args:
        source: its directory, or its name on Hugging Face's hub. revision: branch, tag or commit there.
        device: of the weights.

    Raises:
        UsageError: there is no such directory, or its files do not hold such a module.
    """
    folder = _folder(source, revision)
    config, path = read_config(folder), folder / CONFIG
    tensors = read_weights(folder)
    # No memory is allocated for weights before they are known to be in the file.
    _check_weights(_read(config, tensors, path, "meta"), tensors, folder / WEIGHTS)
    module = _read(config, tensors, path, "cpu")
    dtype = DTYPES[config["dtype"]]
    # Copies, because the loaded tensors are backed by the file.
    weights = {
        name: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }
    module.load_state_dict(weights, assign=True)
    # Zeros in place of biases are in no file, and have the type in which the module was built.
    return module.to(device=device, dtype=dtype).eval()


def read_config(folder: Path) -> dict:
    """Reads the configuration in a directory; only format, kind and dtype are checked.

    Raises:
        FileNotFoundError: there is none. UsageError: it has another format.
    """
    path = folder / CONFIG
    config = read_json(path)
    if not isinstance(config, dict) or not {"format", "kind"} <= config.keys():
        raise UsageError(f"{path}: is no configuration of a module, expected format and kind")
    if config["format"] != FORMAT:
        raise UsageError(f"{path}: format={config['format']!r} is unknown, this version reads {FORMAT}")
    for key, known in (("kind", KINDS), ("dtype", DTYPES)):
        value = config.get(key)
        if not isinstance(value, str) or value not in known:
            raise UsageError(f"{path}: {key}={value!r} is unknown, choose from {', '.join(sorted(known))}")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the tensors in a directory, by name. They are backed by the file and must not be changed.

    Raises:
        UsageError: the file is missing or damaged.
    """
    with needed_for("saving and loading modules need"):
        safetensors = importlib.import_module("safetensors.torch")
    weights = folder / WEIGHTS
    refuse_endless(weights)
    try:
        tensors = safetensors.load_file(weights)
    except Exception as error:
        raise UsageError(f"{weights}: is damaged or no safetensors file ({error})") from error
    for name, tensor in tensors.items():
        if problem := weight_problem(name, tensor):
            raise UsageError(f"{weights}: {name} {problem}")
    rename_old(tensors)
    return tensors


def rename_old(tensors: dict[str, Tensor]) -> None:
    """Gives tensors with the names of an older file today's names and shapes, in place."""
    for name in list(tensors):
        start, dot, last = name.rpartition(".")
        if last in RENAMED:
            tensors[start + dot + RENAMED[last]] = tensors.pop(name).flatten()


def weight_problem(name, weight, finite: bool = True) -> str | None:
    """Returns why something that a file holds cannot be a weight of that name, or None.

    finite: whether NaN and infinite numbers are refused.
    """
    if not isinstance(name, str) or not isinstance(weight, Tensor):
        return f"is of type {type(weight).__name__}, not a named tensor"
    if weight.layout != torch.strided or weight.is_complex() or weight.device.type == "meta":
        return f"is a tensor of {weight.layout} and {weight.dtype} on {weight.device}, no model has such"
    # Strides may repeat a few stored numbers to any size.
    if weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
        return f"has a shape of {weight.numel():,} numbers, and fewer are stored"
    if finite and weight.is_floating_point() and not bool(weight.isfinite().all()):
        return "holds NaN or infinite numbers: the run diverged"
    return None


def _read(config: dict, tensors: Tensors, path: Path, device: str) -> nn.Module:
    """Builds the module of a configuration that was read from ``path``."""
    refusal = f"asks for far more than the {len(tensors)} weights that are stored"
    try:
        # Of 16 bits each, eight numbers a weight.
        with Allowance(4 * sum(tensor.nbytes for tensor in tensors.values()), refusal):
            return _build(config, tensors, device)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path}: {reason}") from error


def _build(config: dict, tensors: Tensors, device: str) -> nn.Module:
    """Builds a module with fresh weights. On ``meta`` it takes no memory, however large it is."""
    rest = {key: value for key, value in config.items() if key not in ("format", "kind", "dtype")}
    with torch.device(device), _NoNormalNumbers() if device == "meta" else nullcontext():
        return KINDS[config["kind"]].build(rest, tensors)


class _NoNormalNumbers(TorchFunctionMode):
    """Draws no normal numbers: on ``meta`` torch imports its compiler for them, which takes a second."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.init.normal_:
            return args[0] if args else kwargs["tensor"]
        return (torch.empty_like if function is torch.randn_like else function)(*args, **kwargs)


class Allowance(TorchFunctionMode):
    """Refuses, in its context, to create tensors with more numbers in total than are allowed.

    Args:
        numbers: how many. refusal: the message.
    """

    MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.randn, torch.rand, torch.arange)

    def __init__(self, numbers: int, refusal: str):
        super().__init__()
        self.left, self.refusal = numbers, refusal

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.MAKERS or function is torch.Tensor:
            sizes = args[0] if args and isinstance(args[0], list | tuple) else args
            sizes = (kwargs or {}).get("size", sizes)
            self.left -= math.prod(size for size in sizes if isinstance(size, int))
            if self.left < 0:
                raise UsageError(self.refusal)
        return function(*args, **(kwargs or {}))


def _check_weights(module: nn.Module, tensors: Tensors, path: Path) -> None:
    own, stored = _shapes(module.state_dict()), _shapes(tensors)
    for name in sorted(own.keys() | stored.keys()):
        given, expected = (shapes.get(name, "missing") for shapes in (stored, own))
        if given != expected:
            raise UsageError(f"{path}: {name} is {given}, and {expected} in the module of its {CONFIG}")


def _folder(source: str | Path, revision: str | None) -> Path:
    """Returns the directory of a module, which is downloaded if ``source`` is a name on the hub."""
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, Path) or Path(source).exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        raise UsageError(f"{source}: no such directory")
    with needed_for(f"{source}: no such directory; names on Hugging Face's hub need"):
        hub = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(str(source), revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
