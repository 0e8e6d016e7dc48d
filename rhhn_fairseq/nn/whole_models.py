"""Whole models as ONNX graphs, with a program that runs them on numpy and onnxruntime alone.

A directory holds ``model.json``, ``run.py`` and the graph of one step: of a character model, a handwriting
model, or a translation model's decoder, which has its encoder beside it. Loops are in ``run.py``.

Shapes: B batch, D dictionary, M components, U positions of the text, S source time.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.data.text.words import first_input
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import replace_file
from rhhn_fairseq.layers.attention import Memory
from rhhn_fairseq.layers.window import one_hot
from rhhn_fairseq.nn.character import CharacterNetwork, refuse_words
from rhhn_fairseq.nn.exporting import graph_of
from rhhn_fairseq.nn.strokes import StrokeNetwork

RUNNERS = Path(__file__).with_name("runners")
MEMORY = ("values", "keys")


class CharacterStep(nn.Module):
    """Reads entries of the dictionary [B]; returns logits [B, D] and the state."""

    def __init__(self, network: CharacterNetwork):
        super().__init__()
        self.network: Any = network

    def forward(self, entry: Tensor, *state: Tensor):
        y, after = self.network.stack(self.network.embed(entry.unsqueeze(0)), state)
        return self.network.output(y[0]), *after


class StrokeStep(nn.Module):
    """Reads normalised points [B, 3] and the text's indices [B, U]; gives [B, 6 M + 1], phi and the state.

    Without a window the text is ignored, and phi is zero.
    """

    def __init__(self, network: StrokeNetwork):
        super().__init__()
        self.network: Any = network

    def forward(self, point: Tensor, text: Tensor, *state: Tensor):
        network, x = self.network, point.unsqueeze(0)
        if network.window:
            y, after, phi = network.stack(x, one_hot(text, len(network.symbol_codes), x.dtype), state)
        else:
            y, after = network.stack(x, state)
            phi = nn.functional.pad(0.0 * text, (0, 1)).unsqueeze(0)
        return y[0] @ network.weight_out + network.bias_out, phi[0], *after


class Encode(nn.Module):
    """Reads source pieces [B, S] without padding; returns values and keys [B, S, ...], then the start."""

    def __init__(self, encoder: nn.Module, sizes: tuple[int, ...]):
        super().__init__()
        self.encoder: Any = encoder
        self.sizes = sizes

    def forward(self, source: Tensor):
        memory = self.encoder.read(source.T, torch.ones_like(source.T, dtype=torch.bool), padded=False)
        zeros = (memory.values_NSM.new_zeros(source.shape[0], size) for size in self.sizes)
        return memory.values_NSM, memory.keys_NSA, *(memory.start or zeros)


class DecoderStep(nn.Module):
    """Reads the last pieces [B] of one sentence's hypotheses; returns log-probabilities [B, D] and the state.

    The memory is that of the sentence alone, [1, S, ...].
    """

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder: Any = decoder

    def forward(self, piece: Tensor, values: Tensor, keys: Tensor, *state: Tensor):
        mask = torch.ones(values.shape[:2], dtype=torch.bool)
        memory = Memory(values, keys, mask, piece.shape[0], None)
        y, _, after = self.decoder.decoder(self.decoder.embed_tokens(piece.unsqueeze(0)), memory, state)
        return self.decoder.output(y[0]).log_softmax(dim=-1), *after


def export_model(model: nn.Module, directory: str | Path) -> None:
    """Writes a character or handwriting network, or a GNMT model, as a directory; see the module's docstring.

    Args:
        directory: is made when all is exported; its files of the same names are replaced.

    Raises:
        UsageError: it is another kind of model, such as one of words, or one that starts a sequence
            otherwise than from zeros (``first_step="skip"``), or onnxscript is missing.
    """
    if any(getattr(module, "begins", False) for module in model.modules()):
        raise UsageError(
            "--onnx: the model was trained with --first-step skip, which graphs of a step cannot do"
        )
    directory = Path(directory)
    if (directory / "run.py").exists() and not (directory / "step.onnx").exists():
        raise UsageError(f"--onnx {directory}: has a run.py of its own, name another directory")
    traced: Any = copy.deepcopy(model).eval()
    set_backend(traced, "reference")
    files: dict[str, bytes] = {}
    step: nn.Module
    B, U, S = (Dim(name, min=1) for name in "BUS")
    if isinstance(traced, CharacterNetwork):
        refuse_words(traced, "--onnx")
        kind, about, sizes = "characters", _about_characters(traced), traced.stack.state_sizes
        step, inputs, outputs = CharacterStep(traced), {"entry": _ids(B)}, ["logits"]
    elif isinstance(traced, StrokeNetwork):
        kind, about, sizes = "strokes", _about_strokes(traced), traced.stack.state_sizes
        inputs = {"point": (torch.zeros(2, 3), {0: B}), "text": _ids(B, U)}
        step, outputs = StrokeStep(traced), ["mixture", "phi"]
    elif hasattr(traced, "encoder") and hasattr(traced.encoder, "memory"):
        kind, about = "translation", _about_translation(traced)
        sizes = traced.decoder.decoder.state_sizes
        encode = Encode(traced.encoder, sizes)
        encoded = [*MEMORY, *(f"state_{number}" for number in range(len(sizes)))]
        path = directory / "encoder.onnx"
        files[path.name] = _graph(path, encode, {"source": _ids(B, S)}, (), encoded)
        with torch.no_grad():
            values, keys, *_ = encode(torch.full((1, 3), traced.encoder.padding_idx + 1))
        memory = {name: (tensor, {1: S}) for name, tensor in zip(MEMORY, (values, keys), strict=True)}
        step, inputs, outputs = DecoderStep(traced.decoder), {"piece": _ids(B), **memory}, ["scores"]
    else:
        raise UsageError(f"--onnx: {type(model).__name__} is no model of characters, of handwriting, or GNMT")
    files["step.onnx"] = _graph(directory / "step.onnx", step, inputs, sizes, outputs)
    files["model.json"] = json.dumps(about, ensure_ascii=False, indent=1).encode()
    files["run.py"] = (RUNNERS / f"{kind}.py").read_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replace_file(directory / name) as file:
            file.write(content)


def _ids(*sizes) -> tuple[Tensor, dict]:
    """Returns an example of a tensor of indices, and its sizes by name."""
    return torch.ones([2 + at for at in range(len(sizes))], dtype=torch.long), dict(enumerate(sizes))


def _graph(path: Path, module: nn.Module, inputs: dict, sizes, outputs: list[str]) -> bytes:
    """Returns the graph of a module; it reads the inputs, by name an example and its sizes, and a state."""
    B = next(iter(next(iter(inputs.values()))[1].values()))
    states = {f"state_{number}": (torch.zeros(2, size), {0: B}) for number, size in enumerate(sizes)}
    examples, shapes = zip(*(inputs | states).values(), strict=True)
    sizes_of_states = [shapes[len(inputs) :]] if sizes else []
    return graph_of(
        path,
        module,
        examples,
        (*shapes[: len(inputs)], *sizes_of_states),
        [*inputs, *states],
        [*outputs, *(f"next_{number}" for number in range(len(sizes)))],
    )


def _about_characters(network: CharacterNetwork) -> dict:
    vocabulary = network.vocabulary
    occur = set(network.indices.tolist())
    decoded = [vocabulary.decode([entry]) if entry in occur else None for entry in range(network.entries)]
    symbols = [one.decode("latin-1") if isinstance(one, bytes) else one for one in decoded]
    return {
        "symbols": symbols,
        "bytes": vocabulary.mode == "bytes",
        "reverse": vocabulary.reverse,
        "start": first_input(vocabulary),
        "state": list(network.stack.state_sizes),
    }


def _about_strokes(network: Any) -> dict:
    normalisation = network.normalisation
    starts = network.window and network.stack.config.window_start == "first"
    return {
        "symbols": network.symbols,
        "mean": normalisation.mean,
        "std": normalisation.std,
        "state": list(network.stack.state_sizes),
        # The state that holds the window, where it starts at the text's first character.
        "window": len(network.stack.first.cell.state_sizes) if starts else None,
    }


def _about_translation(model: Any) -> dict:
    source, target = model.encoder.dictionary, model.decoder.dictionary
    return {"source": source.symbols, "target": target.symbols, "unk": source.unk(), "eos": target.eos()}
