"""Converts a trained model: a checkpoint of fairseq's to safetensors and JSON, or back.

Usage: %(prog)s checkpoints/checkpoint_best.pt --output my-model
       %(prog)s my-model --data data-bin/ptb --output checkpoint.pt
       %(prog)s WEIGHTS --vocabulary FILE --data data-bin/ptb --output suarez.pt

A checkpoint becomes a directory with the character or handwriting model: ``rhhn sample``, ``rhhn write`` and
rhhn_fairseq.nn.from_pretrained read it, and need neither fairseq nor the data.

A directory becomes a checkpoint, for fairseq-eval-lm and fairseq-train --finetune-from-model.

With --vocabulary, WEIGHTS is a state dict of jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS (Suarez 2017),
FILE the dictionary from characters to indices beside it. No code in either is run.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rhhn_fairseq.cli.average import save
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MODELS = {"characters": "char_lm", "strokes": "handwriting"}
"""The name of both the model and the task of each kind of network."""

LARGEST_VOCABULARY_FILE = 1 << 20


def main(argv=None) -> None:
    parser = make_parser("convert", __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="checkpoint, directory of safetensors, or the author's state dict")
    add("--output", required=True, metavar="PATH", help="the directory or checkpoint to write")
    add("--data", metavar="DIR", help="data directory (default for a checkpoint: its own symbols)")
    add("--vocabulary", metavar="FILE", help="the author's dictionary of characters")
    add(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="type of the weights in the directory (default: unchanged)",
    )
    args = parser.parse_args(argv)
    is_directory = os.path.isdir(args.source)
    if is_directory and args.vocabulary is not None:
        raise UsageError(f"--vocabulary goes with the author's weights, and {args.source} is a directory")
    to_file = is_directory or args.vocabulary is not None
    if to_file and args.data is None:
        raise UsageError(f"--data is missing: the data directory that {args.output} is for")
    if to_file and args.dtype is not None:
        raise UsageError(f"--dtype {args.dtype} is for a directory of safetensors; checkpoints are float32")

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.files import check_output
    from rhhn_fairseq.saving import DTYPES

    if to_file:
        check_output("--output", args.output, [args.source, args.vocabulary])
        if is_directory:
            checkpoint = to_checkpoint(args.source, args.data)
        else:
            checkpoint = from_author(args.source, args.vocabulary, args.data)
        save(checkpoint, args.output)
        name, weights = checkpoint["cfg"]["model"]["_name"], checkpoint["model"]
    else:
        dtype = DTYPES[args.dtype] if args.dtype else None
        network = to_directory(args.source, args.output, args.data, dtype)
        name, weights = network.kind, network.state_dict()
    count = sum(weight.numel() for weight in weights.values() if weight.is_floating_point())
    print(f"converted: {name}, {count:,} weights")
    print(f"written: {args.output}")


def to_directory(
    checkpoint: str | Path, directory: str | Path, data: str | None = None, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Writes the character or handwriting model of a checkpoint as a directory.

    Args:
        data: the data directory of a character model, see ``load_char_lm``; not read for handwriting.
        dtype: of the weights in the file; None keeps theirs.

    Returns:
        the network that was written.

    Raises:
        UsageError: the checkpoint holds another kind of model, or a model of words.
    """
    from rhhn_fairseq.models.loading import load_char_lm, load_handwriting, load_weights

    names = load_weights(str(checkpoint)).keys()
    if "symbol_codes" not in names:
        raise UsageError(f"{checkpoint} holds no character or handwriting model: no symbol_codes in it")
    if "statistics" in names:
        network, _ = load_handwriting(str(checkpoint))
    else:
        network, _ = load_char_lm(str(checkpoint), data)
    network.save_pretrained(directory, dtype)
    return network


def to_checkpoint(directory: str | Path, data: str) -> dict:
    """Returns a checkpoint of a saved character or handwriting network.

    It has no optimizer state: fairseq-eval-lm and the commands can read it, and fairseq-train can start from
    it with ``--finetune-from-model``. Everything but the model has fairseq's defaults.

    Args:
        directory: what ``save_pretrained`` wrote. data: the data directory to name in it.

    Raises:
        UsageError: the directory holds no such network, or the data have other symbols.
    """
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.tasks import TASK_DATACLASS_REGISTRY
    from omegaconf import OmegaConf

    from rhhn_fairseq.data.text.vocabulary import CharVocabulary
    from rhhn_fairseq.saving import from_pretrained

    def defaults(config: type) -> dict:
        return OmegaConf.to_container(OmegaConf.structured(config), resolve=False, enum_to_str=True)

    network = from_pretrained(directory)
    if network.kind not in MODELS:
        raise UsageError(
            f"{directory} holds {type(network).__name__}; checkpoints are of characters or handwriting"
        )
    name = MODELS[network.kind]
    values = dataclasses.asdict(network.stack.config)
    task, task_state = {"_name": name, "data": data}, {}
    if name == "char_lm":
        own = network.vocabulary
        if (Path(data) / "dict.txt").is_file() and CharVocabulary.load(data).symbols != own.symbols:
            raise UsageError(f"--data {data}: has other symbols than the {len(own.symbols)} of {directory}")
        embed_dim = 0 if network.embedding is None else network.embedding.shape[1]
        values |= {"embed_dim": embed_dim, "embedding_dropout": network.embedding_dropout}
        task["reverse"] = own.reverse
        task_state = {"reverse": own.reverse, "mode": own.mode}
    else:
        values |= {"mixtures": network.mixtures, "window": network.window}
    options = MODEL_DATACLASS_REGISTRY[name]()
    given = {field: value for field, value in values.items() if hasattr(options, field)}
    model = dataclasses.asdict(options) | given | values["cell_options"] | {"_name": name}
    task = defaults(TASK_DATACLASS_REGISTRY[name]) | task
    cfg = defaults(FairseqConfig) | {"model": model, "task": task}
    return _checkpoint(cfg, network.state_dict(), task_state)


def from_author(weights: str | Path, vocabulary: str | Path, data: str | Path) -> dict:
    """Returns a checkpoint of a HyperRHN or RHN of Suarez 2017, for the same uses as ``to_checkpoint``.

    The author's weights are [out, in], this project's [in, out]; the halves [h, t] have the same order. Both
    models omit the recurrent map and its bias at the first step: ``first_step=skip``. The author numbers the
    characters in sorted order, so the rows of the embedding and of the output layer are permuted.

    Args:
        weights: the state dict. vocabulary: the dictionary of characters, a Python literal.
        data: the directory of the corpus, prepared with ``rhhn prepare``.

    Raises:
        UsageError: the files hold something else, weights that are not finite, or other characters than the
            data. RuntimeError: the weights are of no such model.
    """
    from fairseq import options as fairseq_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    from rhhn_fairseq.files import read_regular
    from rhhn_fairseq.tasks.char_lm import CharLMTask

    state = read_state_dict(weights)
    table = ast.literal_eval(read_regular(vocabulary, LARGEST_VOCABULARY_FILE).decode("utf-8").strip())
    if sorted(table.values()) != list(range(len(state["embed.weight"]))):
        raise UsageError(f"{vocabulary}: its indices are not 0 to {len(state['embed.weight']) - 1}")
    hyper = "cell.upscaleProj.0.weight" in state
    depth = sum(".cell." in name for name in state) // (4 if hyper else 2)
    sizes = {"hidden-size": state["unembed.weight"].shape[1], "embed-dim": state["embed.weight"].shape[1]}
    sizes["rhn-depth"] = depth
    if hyper:
        sizes["hyper-size"] = state["cell.upscaleProj.0.weight"].shape[1]
    arguments = [str(data), "--arch", "hyperrhn_ptb" if hyper else "rhn_ptb", "--first-step", "skip"]
    arguments += [f"--{name}={size}" for name, size in sizes.items()]
    parser = fairseq_options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments))
    task = CharLMTask.setup_task(cfg.task)
    symbols = ["\n"] * task.vocabulary.newline_occurs + list(task.vocabulary.symbols)
    if set(symbols) != set(table):
        raise UsageError(
            f"{vocabulary} and {data} differ in {sorted(set(symbols) ^ set(table))[:8]}; prepare the corpus "
            "with rhhn prepare ptb --variant raw"
        )
    model = task.build_model(cfg.model)
    converted = rename(state, [table[symbol] for symbol in symbols], depth)
    if state:
        raise UsageError(f"{weights}: has {next(iter(state))}, which the author's model has not")
    model.load_state_dict(converted | {"symbol_codes": model.symbol_codes})
    cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return _checkpoint(cfg, model.state_dict(), task.state_dict())


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Reads tensors by name without running any code; UsageError for anything else and for other numbers."""
    import torch

    from rhhn_fairseq.compat.checkpoints import check_file
    from rhhn_fairseq.files import open_regular
    from rhhn_fairseq.saving import weight_problem

    with open_regular(path) as file:
        check_file(str(path), file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not {"embed.weight", "unembed.weight"} <= state.keys():
        raise UsageError(f"{path}: is no model of jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS")
    for name, weight in state.items():
        if problem := weight_problem(name, weight):
            raise UsageError(f"{path}: {name} {problem}")
    return dict(state)


def rename(state: dict[str, Tensor], order: list[int], depth: int) -> dict[str, Tensor]:
    """Takes the author's weights out of ``state``; returns them with our names and layout, in float32."""
    import torch

    def take(name: str) -> tuple[Tensor, Tensor]:
        return state.pop(f"{name}.weight").float().T, state.pop(f"{name}.bias").float()

    out, bias = take("unembed")
    ours = {"embedding": state.pop("embed.weight").float()[order]}
    ours |= {"weight_out": out[:, order], "bias_out": bias[order]}
    cells = {"cell.": ""}
    if "cell.upscaleProj.0.weight" in state:
        cells = {"cell.HyperCell.": "hyper.", "cell.RHNCell.": ""}
        pairs = [take(f"cell.upscaleProj.{layer}") for layer in range(depth)]
        names = ("stack.cells.0.weight_z", "stack.cells.0.bias_z")
        ours |= {name: torch.stack(each) for name, each in zip(names, zip(*pairs, strict=True), strict=True)}
    for theirs, inner in cells.items():
        prefix = f"stack.cells.0.{inner}"
        ours[f"{prefix}weight_x"], ours[f"{prefix}bias_x"] = take(f"{theirs}inp")
        for layer in range(depth):
            ours[f"{prefix}weight_s.{layer}"], ours[f"{prefix}bias_s.{layer}"] = take(f"{theirs}cell.{layer}")
    return {name: weight.contiguous() for name, weight in ours.items()}


def _checkpoint(cfg: dict, weights: Mapping[str, Tensor], task_state: dict) -> dict:
    # fairseq reads the last entry, which holds the progress of training.
    history = {"optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": cfg,
        "model": weights,
        "criterion": None,
        "optimizer_history": [history],
        "task_state": task_state,
        "extra_state": {},
        "last_optimizer_state": None,
    }
