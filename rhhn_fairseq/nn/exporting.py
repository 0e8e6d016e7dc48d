"""Layers as ONNX graphs, for programs without torch."""

import copy
import importlib
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import replace_file
from rhhn_fairseq.nn.recurrent import RecurrentLayer
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight

LARGEST = 1 << 31
"""Size in bytes that an ONNX file must stay below."""


def export_onnx(layer: RecurrentLayer, path: str | Path, *, step: bool = False, state: bool = True) -> None:
    """Exports a layer in evaluation mode to one ONNX file, for any sequence length T and any batch size B.

    The graph has only ONNX's own operators. The loop over time is a Scan whose body is a step of the cell, so
    its size does not depend on T.

    Inputs are ``input`` [T, B, C], or [B, T, C] with batch_first, and one input [D L, B, width] per entry of
    the state: ``h_0`` and ``c_0`` for an LSTM, see ``state_names``. Outputs are ``output`` and the state
    after the last step: ``h_n``, ``c_n``. A state left out in torch starts from zeros; pass zeros here.

    Args:
        path: the file, replaced if it exists.
        step: whether T is 1 and there is no loop, for decoding.
        state: whether the graph takes a state. False starts every sequence as a call without one does; a
            graph that takes zeros skips no first step of an RHN or HyperRHN with ``first_step="skip"``.

    Raises:
        UsageError: the module is not a layer or is quantised, ``step`` is given for a bidirectional one, its
            weights are too large for an ONNX file, onnxscript is missing, or the file cannot be written.
    """
    _check(layer)
    if step and layer.bidirectional:
        raise UsageError(
            f"export_onnx: the {type(layer).__name__} is bidirectional and reads a whole sequence; "
            "leave out step"
        )
    traced = copy.deepcopy(layer).eval()
    traced.backend = "reference"
    weight = next(traced.parameters())
    T, B, C = 1 if step else 3, 2, layer.input_size
    shape, sizes = (T, B, C), {0: Dim("T", min=1), 1: Dim("B", min=1)}
    if layer.batch_first:
        shape, sizes = (B, T, C), {0: sizes[1], 1: sizes[0]}
    if step:
        del sizes[1 if layer.batch_first else 0]
    x = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        last = traced(x)[1]
        entries = (last,) if isinstance(last, torch.Tensor) else last
        names = _state_names(layer, len(entries))
        shapes = {1: Dim("B", min=1)}
    graph = graph_of(
        path,
        traced,
        (x, last) if state else (x,),
        (sizes, shapes if last is entries[0] else (shapes,) * len(entries))[: 1 + state],
        ["input", *(f"{name}_0" for name in names if state)],
        ["output", *(f"{name}_n" for name in names)],
    )
    with replace_file(path) as file:
        file.write(graph)


def graph_of(path: str | Path, module: nn.Module, examples: tuple, sizes, inputs, outputs) -> bytes:
    """Returns what the ONNX file ``path`` is to hold: the graph of a module, called with the examples.

    Args:
        sizes: of each example the named sizes of its dimensions. inputs, outputs: names of the tensors.

    Raises:
        UsageError: the weights are too large for an ONNX file, or onnxscript is missing.
    """
    with needed_for("ONNX graphs need"):
        for package in ("onnx", "onnxscript"):
            importlib.import_module(package)
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    if size >= LARGEST:
        raise UsageError(f"{path}: the weights have {size:,} bytes, a file of ONNX's fewer than {LARGEST:,}")
    with torch.no_grad(), warnings.catch_warnings():
        # Two inputs may share the name of a size.
        warnings.filterwarnings("ignore", message="# The axis name")
        program = torch.onnx.export(
            module.eval(),
            examples,
            dynamo=True,
            dynamic_shapes=sizes,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None  # It is None with ``dynamo=False`` only.
    return program.model_proto.SerializeToString()


def _check(layer: RecurrentLayer) -> None:
    name = type(layer).__name__
    if not isinstance(layer, RecurrentLayer):
        raise UsageError(f"export_onnx: {name} is no layer of rhhn_fairseq.nn")
    if any(isinstance(module, QuantisedWeight) for module in layer.modules()):
        raise UsageError(
            f"export_onnx: the {name} is quantised, which torch's exporter cannot trace; give it the layer "
            "before that"
        )


def _state_names(layer: RecurrentLayer, entries: int) -> list[str]:
    """Returns the names of the entries of the state that a caller sees."""
    if layer.lstm_state:
        return ["h", "c"]
    return list(layer.state_names) or [f"state{index}" for index in range(entries)]
