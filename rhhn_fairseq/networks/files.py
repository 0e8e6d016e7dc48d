"""Trained networks as a directory of two files: ``model.safetensors`` and ``config.json``.

The weights carry the names of the networks' parameters. The configuration has the options of the stack, and
what else a network needs to be built without its data: its kind, the symbols' mode, the corpus. Reading a
directory runs no code of it and imports no fairseq. The package has two such directories, see ``packaged``.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.text.vocabulary import NEWLINE, CharVocabulary, escape, escape_byte
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json, read_regular
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.layers.window import WindowConfig
from rhhn_fairseq.networks.character import CharacterNetwork
from rhhn_fairseq.networks.strokes import StrokeNetwork

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
FORMAT = 1
KINDS = ("characters", "strokes")
DTYPES = {"float16": torch.float16, "float32": torch.float32}
PACKAGED = Path(__file__).resolve().parents[1] / "pretrained"

# Larger files were written by no network of the papers' tables.
LARGEST_WEIGHTS = 1 << 30


@dataclass(frozen=True)
class Characters:
    """A character language model: its network in evaluation, and its symbols."""

    network: CharacterNetwork
    vocabulary: CharVocabulary


def packaged(name: str) -> Path:
    """The directory of a trained network that comes with the package: "characters" or "handwriting"."""
    return PACKAGED / name


def character_config(network: CharacterNetwork, vocabulary: CharVocabulary) -> dict:
    """The configuration of a character language model."""
    return {
        "kind": "characters",
        "stack": dataclasses.asdict(network.stack.config),
        "embed_dim": 0 if network.embedding is None else network.embedding.shape[1],
        "mode": vocabulary.mode,
        "newline_occurs": vocabulary.newline_occurs,
        "corpus": vocabulary.corpus,
    }


def stroke_config(network: StrokeNetwork) -> dict:
    """The configuration of a handwriting network."""
    return {
        "kind": "strokes",
        "stack": dataclasses.asdict(network.stack.config),
        "mixtures": (len(network.bias_out) - 1) // 6,
    }


def save(network: nn.Module, config: Mapping, directory: str | Path, dtype: str = "float16") -> None:
    """Writes a network's two files; each is written beside its place and renamed.

    Args:
        config: of ``character_config`` or ``stroke_config``.
        dtype: of the weights in the file; buffers of whole numbers stay what they are.

    Raises:
        UsageError: the directory cannot be written, the type is unknown, or float16 cannot hold a weight.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: choose from {', '.join(DTYPES)}")
    tensors = {}
    for name, tensor in network.state_dict().items():
        stored = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
        if stored.is_floating_point() and not bool(stored.isfinite().all()):
            raise UsageError(f"{name} has numbers that {dtype} cannot hold")
        tensors[name] = stored.contiguous()
    text = json.dumps({"format": FORMAT, "dtype": dtype} | dict(config), indent=2) + "\n"
    contents = {WEIGHTS_NAME: save_tensors(tensors), CONFIG_NAME: text.encode("ascii")}
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            beside = directory / f".{name}.writing"
            beside.write_bytes(content)
            beside.replace(directory / name)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written ({error.strerror})") from error


def load_characters(directory: str | Path) -> Characters:
    """A character language model from its two files, float32, on the CPU.

    Raises:
        UsageError: a file is missing, damaged, or the two do not belong together.
    """
    config, weights = _read(directory, "characters")
    codes = weights.get("symbol_codes", torch.zeros(0, dtype=torch.long)).tolist()
    written = escape_byte if config.get("mode") == "bytes" else lambda code: escape(chr(code))
    with _belonging(directory):
        vocabulary = CharVocabulary(
            [written(code) for code in codes if code != NEWLINE],
            config["mode"],
            config["newline_occurs"],
            config["corpus"],
        )
        stack = StackConfig(**config["stack"])
        indices = torch.from_numpy(vocabulary.model_indices())
        own = torch.from_numpy(vocabulary.codes())
        network = CharacterNetwork(stack, indices, own, len(vocabulary), config["embed_dim"])
    return Characters(_filled(network, weights, directory), vocabulary)


def load_strokes(directory: str | Path) -> StrokeNetwork:
    """A handwriting network from its two files, float32, on the CPU.

    Raises:
        UsageError: a file is missing, damaged, or the two do not belong together.
    """
    config, weights = _read(directory, "strokes")
    with _belonging(directory):
        stack = (WindowConfig if "window" in config["stack"] else StackConfig)(**config["stack"])
        symbols = "".join(map(chr, weights["symbol_codes"].tolist()))
        normalisation = Normalisation.from_bits(weights["statistics"].numpy())
        network = StrokeNetwork(stack, normalisation, symbols, config["mixtures"])
    return _filled(network, weights, directory)


class _belonging:
    """Says in one line that the configuration is not what a network was saved with."""

    def __init__(self, directory: str | Path):
        self.directory = directory

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, (KeyError, TypeError, ValueError, OverflowError)):
            raise UsageError(
                f"{Path(self.directory) / CONFIG_NAME}: does not fit its weights "
                f"({type(error).__name__}: {error})"
            ) from error


def _read(directory: str | Path, kind: str) -> tuple[dict, dict[str, Tensor]]:
    path = Path(directory) / CONFIG_NAME
    try:
        config = read_json(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("kind") not in KINDS:
        raise UsageError(f"{path}: is not the configuration of a saved network of format {FORMAT}")
    if config["kind"] != kind:
        raise UsageError(f"{path}: is of a network of {config['kind']}, not of {kind}")
    path = Path(directory) / WEIGHTS_NAME
    try:
        weights = load_tensors(read_regular(path, LARGEST_WEIGHTS))
    except SafetensorError as error:
        raise UsageError(f"{path}: is damaged or no safetensors file ({error})") from error
    return config, {
        name: weight.float() if weight.is_floating_point() else weight for name, weight in weights.items()
    }


def _filled(network: nn.Module, weights: Mapping[str, Tensor], directory: str | Path):
    """The network with these weights, in evaluation."""
    own = network.state_dict()
    path = Path(directory) / WEIGHTS_NAME
    for name in sorted(own.keys() | weights.keys()):
        stored, expected = (tuple(table[name].shape) if name in table else None for table in (weights, own))
        if stored != expected:
            raise UsageError(
                f"{path}: {name} is {stored or 'missing'}, by {CONFIG_NAME} it is {expected or 'no weight'}"
            )
    network.load_state_dict(dict(weights))
    return network.eval()
