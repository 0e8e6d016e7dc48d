"""Converts a trained model: a checkpoint of fairseq's to safetensors and JSON, or back, or to ONNX.

Usage: %(prog)s checkpoints/checkpoint_best.pt --output my-model
       %(prog)s my-model --data data-bin/ptb --output checkpoint.pt
       %(prog)s checkpoints/checkpoint_best.pt --onnx my-graphs

A checkpoint becomes a directory with the character or handwriting model: ``rhhn sample``, ``rhhn write`` and
rhhn_fairseq.nn.from_pretrained read it, and need neither fairseq nor the data.

A directory becomes a checkpoint, for fairseq-eval-lm and fairseq-train --finetune-from-model.

With --onnx either becomes a directory of ONNX graphs, also a translation model, with a program run.py that
needs onnxruntime and numpy alone.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

MODELS = {"characters": "char_lm", "strokes": "handwriting"}
"""The name of both the model and the task of each kind of network."""

CRITERIONS = {"char_lm": "char_cross_entropy", "handwriting": "mixture_density"}


def main(argv=None) -> None:
    parser = make_parser("convert", __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="checkpoint, or directory of safetensors")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--output", metavar="PATH", help="the directory or checkpoint to write")
    to.add_argument("--onnx", metavar="DIR", help="the directory of ONNX graphs to write")
    add("--data", metavar="DIR", help="data directory (default for a checkpoint: its own symbols)")
    add(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="type of the weights in the directory (default: unchanged)",
    )
    args = parser.parse_args(argv)
    if args.onnx is not None:
        if args.dtype or (args.data and os.path.isdir(args.source)):
            raise UsageError(
                f"{'--dtype' if args.dtype else '--data'} has no effect on these graphs; leave it out"
            )

        from rhhn_fairseq.nn.whole_models import export_model

        export_model(load(args.source, args.data), args.onnx)
        print(f"written: {args.onnx}")
        return
    to_file = os.path.isdir(args.source)
    if to_file and args.data is None:
        raise UsageError(f"--data is missing: the data directory that {args.output} is for")
    if to_file and args.dtype is not None:
        raise UsageError(f"--dtype {args.dtype} is for a directory of safetensors; checkpoints are float32")

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.compat import checkpoints
    from rhhn_fairseq.files import check_output
    from rhhn_fairseq.saving import DTYPES

    if to_file:
        check_output("--output", args.output, [args.source])
        checkpoint = to_checkpoint(args.source, args.data)
        checkpoints.write(checkpoint, args.output)
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
    from rhhn_fairseq.models.loading import load_weights

    if "symbol_codes" not in load_weights(str(checkpoint)):
        raise UsageError(f"{checkpoint} holds no character or handwriting model: no symbol_codes in it")
    network = load(checkpoint, data)
    network.save_pretrained(directory, dtype)
    return network


def load(source: str | Path, data: str | None = None) -> torch.nn.Module:
    """Returns the character, handwriting or translation model of a checkpoint, or that of a directory.

    Args:
        data: the data directory of a character or translation model; None for that of the training.
    """
    import rhhn_fairseq.nn  # noqa: F401  (the kinds that a directory may hold)
    from rhhn_fairseq.saving import from_pretrained

    if os.path.isdir(source):
        return from_pretrained(source)
    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import (
        load_char_lm,
        load_handwriting,
        load_translation_models,
        load_weights,
    )

    names = load_weights(str(source)).keys()
    if "symbol_codes" not in names:
        return load_translation_models([str(source)], data).models[0]
    return load_handwriting(str(source))[0] if "statistics" in names else load_char_lm(str(source), data)[0]


def to_checkpoint(directory: str | Path, data: str) -> dict:
    """Returns a checkpoint of a saved character or handwriting network.

    It has no optimizer state: fairseq-eval-lm, fairseq-validate and the commands can read it, and
    fairseq-train can start from it with ``--finetune-from-model``. Everything but the model and its loss has
    fairseq's defaults.

    Args:
        directory: what ``save_pretrained`` wrote. data: the data directory to name in it.

    Raises:
        UsageError: the directory holds no such network, or the data have other symbols.
    """
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
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
    criterion = CRITERIONS[name]
    loss = defaults(CRITERION_DATACLASS_REGISTRY[criterion]) | {"_name": criterion}
    cfg = defaults(FairseqConfig) | {"model": model, "task": task, "criterion": loss}
    return new_checkpoint(cfg, network.state_dict(), task_state)


def new_checkpoint(cfg: dict, weights: Mapping[str, Tensor], task_state: dict) -> dict:
    """Returns a checkpoint of these weights without a training's state."""
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
