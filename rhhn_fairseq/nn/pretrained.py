"""Trained cells and layers as a directory: the weights in safetensors, their sizes in JSON.

``config.json`` holds the format's number, the kind of module and what its constructor takes; it is all that
is needed to build the module, and no code is read from a file. ``model.safetensors`` holds the parameters and
buffers of ``state_dict``. Both files are what Hugging Face's hub takes, and a name there works in place of a
directory if ``huggingface_hub`` is installed.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from rhhn_fairseq.cells.base import Cell
from rhhn_fairseq.cells.registry import CELLS, build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import read_json
from rhhn_fairseq.lines import replacing

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1

KINDS: dict[str, Callable[[dict], Any]] = {}
"""How each kind of module is built from the rest of its configuration."""


class Pretrained:
    """A module that can be saved and loaded. Subclasses that name a ``kind`` are entered into ``KINDS``."""

    kind: ClassVar[str]

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls.from_config

    def pretrained_config(self) -> dict:
        """What ``from_config`` builds this module from, in JSON's types."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved")

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """A module with fresh weights."""
        raise NotImplementedError(f"{cls.__name__} cannot be loaded")

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes this module into a directory; see ``rhhn_fairseq.nn.save_pretrained``."""
        save_pretrained(self, directory)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(cls, source: str | Path, **options) -> Self:
        """A saved module of this class; see ``rhhn_fairseq.nn.from_pretrained``.

        Raises:
            UsageError: also where the directory holds another class.
        """
        module = from_pretrained(source, **options)
        if not isinstance(module, cls):
            raise UsageError(f"{source} holds a {type(module).__name__}, not a {cls.__name__}")
        return module


def save_pretrained(module: nn.Module, directory: str | Path) -> None:
    """Writes a cell or a layer as ``config.json`` and ``model.safetensors``.

    Args:
        directory: made if it is missing; files of these names in it are replaced.

    Raises:
        UsageError: the module is none of these, it is quantised, or the files cannot be written.
    """
    with needed_for("saving and loading modules need"):
        safetensors = importlib.import_module("safetensors.torch")
    if isinstance(module, Cell):
        kind, config = "cell", _cell_config(module)
    elif isinstance(module, Pretrained):
        kind, config = module.kind, module.pretrained_config()
    else:
        raise UsageError(f"save_pretrained: {type(module).__name__} is neither a cell nor a layer")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be made ({error.strerror})") from error
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    config = {"format": FORMAT, "kind": kind} | config
    if not _build(config, "meta").state_dict().keys() <= tensors.keys():
        raise UsageError(f"save_pretrained: the {type(module).__name__} is quantised; save it before that")
    with replacing(folder / WEIGHTS) as file:
        file.write(safetensors.save(tensors, metadata={"format": "pt"}))
    with replacing(folder / CONFIG) as file:
        file.write(f"{json.dumps(config, indent=2)}\n".encode())


def from_pretrained(source: str | Path, *, device="cpu", revision: str | None = None) -> nn.Module:
    """The module that ``save_pretrained`` wrote, in evaluation.

    Args:
        source: its directory, or its name on Hugging Face's hub. revision: branch, tag or commit there.
        device: where the weights go.

    Raises:
        UsageError: no such directory, or its files are no such module.
    """
    with needed_for("saving and loading modules need"):
        safetensors = importlib.import_module("safetensors.torch")
    folder = _folder(source, revision)
    path = folder / CONFIG
    try:
        config = read_json(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; save_pretrained writes it") from error
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise UsageError(f"{weights}: no such file; save_pretrained writes it")
    try:
        # Copies, because what is loaded lies in the file.
        tensors = {name: tensor.clone() for name, tensor in safetensors.load_file(weights).items()}
    except Exception as error:
        raise UsageError(f"{weights}: is damaged or no safetensors file ({error})") from error
    _check_weights(_read(config, path, "meta"), tensors, weights)
    module = _read(config, path, "cpu")
    # Parameters take the type that was saved.
    module.load_state_dict(tensors, assign=True)
    return module.to(device).eval()


def _read(config: Any, path: Path, device: str) -> nn.Module:
    """The module of a configuration that was read from ``path``."""
    if not isinstance(config, dict) or not {"format", "kind"} <= config.keys():
        raise UsageError(f"{path}: is no configuration of a module, expected format and kind")
    if config["format"] != FORMAT:
        raise UsageError(f"{path}: format={config['format']!r} is unknown, this version reads {FORMAT}")
    try:
        return _build(config, device)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path}: does not describe a module ({reason})") from error


def _build(config: dict, device: str) -> nn.Module:
    """A module with fresh weights. On ``meta`` it takes no memory, however large."""
    rest = {key: value for key, value in config.items() if key not in ("format", "kind")}
    if config["kind"] not in KINDS:
        raise UsageError(f"kind={config['kind']!r} is unknown, choose from {', '.join(sorted(KINDS))}")
    with torch.device(device):
        return KINDS[config["kind"]](rest)


def _check_weights(module: nn.Module, tensors: dict, path: Path) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in sorted(own.keys() | tensors.keys()):
        given = tuple(tensors[name].shape) if name in tensors else "missing"
        expected = own.get(name, "missing")
        if given != expected:
            raise UsageError(f"{path}: {name} is {given}, and {expected} in the module of its {CONFIG}")


def _cell_config(cell: Cell) -> dict:
    """A cell's name in the register and all its options."""
    names = [
        name
        for name, entry in CELLS.items()
        if entry.config is type(cell.config)
        and (not isinstance(entry.cell, type) or isinstance(cell, entry.cell))
        and all(getattr(cell.config, key) == value for key, value in entry.defaults.items())
    ]
    if not names:
        raise UsageError(f"save_pretrained: the cell {type(cell).__name__} is not in the register")
    return {"cell": names[0]} | asdict(cell.config)


def _build_cell(config: dict) -> Cell:
    return build_cell(config.pop("cell"), config.pop("input_size"), config.pop("hidden_size"), **config)


KINDS["cell"] = _build_cell


def _folder(source: str | Path, revision: str | None) -> Path:
    """The directory of a module, downloaded if it is a name on the hub."""
    if Path(source).is_dir():
        return Path(source)
    words = str(source).split("/")
    if isinstance(source, Path) or len(words) != 2 or not all(words) or words[0] in (".", "..", "~"):
        raise UsageError(f"{source}: no such directory")
    with needed_for(f"{source}: no such directory; names on Hugging Face's hub need"):
        hub = importlib.import_module("huggingface_hub")
    patterns = [CONFIG, WEIGHTS]
    try:
        return Path(hub.snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    # Its own errors, those of the library below it, and of the network.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{source}: no such directory, and nothing of this name could be downloaded ({reason})"
        ) from error
