"""Describes an architecture: its layers, shapes and parameters, beside the paper's count."""

import difflib

import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import nn

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import explain
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models import char_lm_table, classifier_table, gnmt_table, handwriting_table
from rhhn_fairseq.ops.backends import format_rows

OF_PROBLEMS = classifier_table.ARCHITECTURES
ARCHITECTURES = (
    char_lm_table.ARCHITECTURES | gnmt_table.ARCHITECTURES | handwriting_table.ARCHITECTURES | OF_PROBLEMS
)

LARGEST_VOCABULARY = 1 << 31


def known_architectures() -> list[str]:
    """Returns the names of the project's architectures."""
    own = (name for name, model in MODEL_REGISTRY.items() if hasattr(model, "for_vocabulary"))
    return sorted({*own, *OF_PROBLEMS})


def build_empty(arch: str, vocab_size: int | None = None) -> nn.Module:
    """Builds the model of an architecture without memory for its weights (torch's meta device).

    Args:
        arch: a name of ``known_architectures``. vocab_size: number of symbols; None for the paper's corpus.

    Raises:
        UsageError: no such architecture; no vocabulary size although the table has none, or one although
            the model reads numbers; or a size out of range.
    """
    known = known_architectures()
    if arch not in known:
        close = difflib.get_close_matches(arch, known, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"choose from {', '.join(known)}"
        raise UsageError(f"--arch {arch} is unknown, {hint}")
    config = MODEL_DATACLASS_REGISTRY[arch]()
    if arch in OF_PROBLEMS:
        if vocab_size is not None:
            raise UsageError(f"--arch {arch} reads numbers, it has no --vocab-size")
        with torch.device("meta"):
            return MODEL_REGISTRY[arch].for_problem(config, OF_PROBLEMS[arch].problem)
    if vocab_size is None:
        if arch not in ARCHITECTURES:
            raise UsageError(f"--arch {arch} stands in no table, give --vocab-size")
        vocab_size = ARCHITECTURES[arch].vocab_size
    if vocab_size < 1:
        raise UsageError(f"--vocab-size {vocab_size} is too small, the smallest is 1")
    if vocab_size > LARGEST_VOCABULARY:
        raise UsageError(f"--vocab-size {vocab_size} is too large, the largest is {LARGEST_VOCABULARY:,}")
    with torch.device("meta"):
        return MODEL_REGISTRY[arch].for_vocabulary(config, vocab_size)


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trainable parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def describe(arch: str, vocab_size: int | None = None) -> str:
    """Returns a table of an architecture's parameters; see ``build_empty`` for arguments and errors."""
    model = build_empty(arch, vocab_size)
    rows = [(key, "x".join(map(str, p.shape)), f"{p.numel():,}") for key, p in model.named_parameters()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{arch}: {type(model).__bases__[0].__name__}"]
    lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    total = count_parameters(model)
    lines.append(f"parameters: {total:,}")
    row = ARCHITECTURES.get(arch)
    if row is not None:
        if vocab_size is None or vocab_size == row.vocab_size:
            same = "equal" if total == row.parameters else f"differs by {total - row.parameters:+,}"
            lines.append(f"expected:   {row.parameters:,} ({same})")
        if row.reported():
            lines.append(f"figures:    {row.reported()}")
    return "\n".join(lines)


def describe_backends(
    arch: str, vocab_size: int | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> str:
    """Returns which backend runs an architecture's cells in training and decoding, and why not the others.

    Args:
        arch, vocab_size: see ``build_empty``, also for errors.
        device, dtype: of the model. The device need not be there.
    """
    cells = {}
    for module in build_empty(arch, vocab_size).modules():
        if isinstance(module, Cell):
            cells.setdefault((type(module).__name__, module.config.hidden_size), module)
    lines = []
    for (name, units), cell in cells.items():
        for mode, T, B in (("training", 100, 128), ("decoding", 1, 5)):
            cell.train(mode == "training")
            with torch.set_grad_enabled(mode == "training"):
                rows = explain(cell, T, B, device, dtype)
            of = f"{name} of {units} units, {mode} with T={T}, B={B}"
            lines.append(f"{of} on {device} in {str(dtype).removeprefix('torch.')}:")
            lines.append(format_rows(rows))
    return "\n".join(lines)
