"""Prints the layers, shapes and parameter count of an architecture, beside the paper's count.

Usage: %(prog)s --arch ln_hyperlstm_ptb
       %(prog)s --arch ln_hyperlstm_ptb --backends --device cuda --dtype bfloat16
       %(prog)s --cell gru
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn


def main(argv=None) -> None:
    parser = make_parser("describe", __doc__)
    parser.add_argument("--arch", help="name of an architecture, as fairseq-train takes it")
    parser.add_argument(
        "--cell", help="cell in place of the architecture's; without --arch that of char_lm, with 50 symbols"
    )
    parser.add_argument("--vocab-size", type=int, help="number of symbols (default: the paper's corpus)")
    parser.add_argument(
        "--backends", action="store_true", help="print which backend runs the cells, and why not the others"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device for --backends (default: cpu)")
    dtypes = ("float32", "float64", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="type for --backends (default: float32)")
    args = parser.parse_args(argv)
    for option in ("device", "dtype"):
        if getattr(args, option) is not None and not args.backends:
            raise UsageError(f"--{option} {getattr(args, option)} goes with --backends")
    if args.arch is None and args.cell is None:
        raise UsageError("name an architecture with --arch, or a cell with --cell")
    arch, vocab_size = args.arch, args.vocab_size
    if arch is None:
        arch, vocab_size = "char_lm", vocab_size or 50

    import torch

    print(describe(arch, vocab_size, args.cell))
    if args.backends:
        model = build_empty(arch, vocab_size, args.cell)
        print(describe_backends(model, args.device or "cpu", getattr(torch, args.dtype or "float32")))


def architecture_rows() -> dict:
    """Returns the rows of all tables of architectures, by name."""
    from rhhn_fairseq.models import char_lm_table, classifier_table, gnmt_table, handwriting_table

    tables = (char_lm_table, gnmt_table, handwriting_table, classifier_table)
    return {name: row for table in tables for name, row in table.ARCHITECTURES.items()}


def known_architectures() -> list[str]:
    """Returns the names of the project's architectures."""
    from fairseq.models import MODEL_REGISTRY

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)

    own = {
        name
        for name, model in MODEL_REGISTRY.items()
        if hasattr(model, "for_vocabulary") or hasattr(model, "for_problem")
    }
    return sorted(own | architecture_rows().keys())


def build_empty(arch: str, vocab_size: int | None = None, cell: str | None = None) -> nn.Module:
    """Builds the model of an architecture without memory for its weights (torch's meta device).

    Args:
        arch: a name of ``known_architectures``. vocab_size: number of symbols; None for the paper's corpus.
        cell: replaces the architecture's.

    Raises:
        UsageError: no such architecture or cell; no vocabulary size although the table has none, or one
            although the model reads numbers; or a size below 1.
    """
    known = known_architectures()
    import torch
    from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

    from rhhn_fairseq.compat.recipes import recipe_of
    from rhhn_fairseq.models.classifier_table import BASE_PROBLEM

    if arch not in known:
        hint = nearest(arch, known) or f"choose from {', '.join(known)}"
        raise UsageError(f"--arch {arch} is unknown, {hint}")
    kind, config, row = MODEL_REGISTRY[arch], MODEL_DATACLASS_REGISTRY[arch](), architecture_rows().get(arch)
    for name, value in recipe_of(arch, {}).items():
        if hasattr(config, name):
            setattr(config, name, value)
    if cell is not None:
        config.cell = cell
    with torch.device("meta"):
        if hasattr(kind, "for_problem"):
            if vocab_size is not None:
                raise UsageError(f"--arch {arch} reads numbers, it has no --vocab-size")
            return kind.for_problem(config, row.problem if row else BASE_PROBLEM)
        if vocab_size is None:
            if row is None:
                raise UsageError(f"--arch {arch} stands in no table, give --vocab-size")
            vocab_size = row.vocab_size
        if vocab_size < 1:
            raise UsageError(f"--vocab-size {vocab_size} is too small, the smallest is 1")
        return kind.for_vocabulary(config, vocab_size)


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trainable parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def describe(arch: str, vocab_size: int | None = None, cell: str | None = None) -> str:
    """Returns a table of an architecture's parameters; see ``build_empty`` for arguments and errors."""
    model = build_empty(arch, vocab_size, cell)
    rows = [(key, "x".join(map(str, p.shape)), f"{p.numel():,}") for key, p in model.named_parameters()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    row = architecture_rows().get(arch)
    kind = type(model) if row is None else type(model).__bases__[0]
    lines = [f"{arch}: {kind.__name__}"]
    lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    total = count_parameters(model)
    lines.append(f"parameters: {total:,}")
    if row is not None and cell is None:
        if vocab_size is None or vocab_size == row.vocab_size:
            same = "equal" if total == row.parameters else f"differs by {total - row.parameters:+,}"
            lines.append(f"expected:   {row.parameters:,} ({same})")
        if row.reported():
            lines.append(f"figures:    {row.reported()}")
    return "\n".join(lines)


def describe_backends(model: nn.Module, device: str = "cpu", dtype: torch.dtype | None = None) -> str:
    """Returns which backend runs a model's cells in training and decoding, and why not the others.

    Args:
        model: see ``build_empty``.
        device, dtype: of the model, in float32 by default. The device need not be there.
    """
    import torch

    from rhhn_fairseq.cells.running import Cell
    from rhhn_fairseq.cells.selection import explain
    from rhhn_fairseq.ops.backends import format_rows

    cells, dtype, lines = {}, dtype or torch.float32, []
    for module in model.modules():
        if isinstance(module, Cell):
            cells.setdefault((type(module).__name__, module.config.hidden_size), module)
    for (name, units), cell in cells.items():
        for mode, T, B in (("training", 100, 128), ("decoding", 1, 5)):
            cell.train(mode == "training")
            with torch.set_grad_enabled(mode == "training"):
                rows = explain(cell, T, B, device, dtype)
            of = f"{name} of {units} units, {mode} with T={T}, B={B}"
            lines.append(f"{of} on {device} in {str(dtype).removeprefix('torch.')}:")
            lines.append(format_rows(rows))
    return "\n".join(lines)
