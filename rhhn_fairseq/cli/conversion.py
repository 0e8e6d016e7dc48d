"""Converts fairseq checkpoints to directories of ``saving``, and back."""

import dataclasses
from pathlib import Path

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from rhhn_fairseq.compat.checkpoints import NotACheckpoint
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.loading import load_char_lm, load_handwriting, load_weights
from rhhn_fairseq.saving import from_pretrained

MODELS = {"characters": "char_lm", "strokes": "handwriting"}
"""The name of both the model and the task of each kind of network."""


def to_directory(
    checkpoint: str | Path, directory: str | Path, data: str | None = None, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Writes the character or handwriting model of a checkpoint as a directory.

    Args:
        data: the data directory of a character model, not read for handwriting; None for the one it was
            trained on.
        dtype: of the weights in the file; None keeps theirs.

    Returns:
        the network that was written.

    Raises:
        UsageError: the checkpoint holds another kind of model, or a model of words.
    """
    try:
        names = load_weights(str(checkpoint)).keys()
    except NotACheckpoint as error:
        raise UsageError(f"{error}; --vocabulary converts the weights of Suarez 2017") from error
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
    network = from_pretrained(directory)
    if network.kind not in MODELS:
        raise UsageError(
            f"{directory} holds {type(network).__name__}; checkpoints are of characters or handwriting"
        )
    name = MODELS[network.kind]
    if name == "char_lm" and (Path(data) / "dict.txt").is_file():
        symbols = CharVocabulary.load(data).symbols
        if symbols != network.vocabulary.symbols:
            raise UsageError(
                f"--data {data}: has other symbols ({len(symbols)}) than {directory} "
                f"({len(network.vocabulary.symbols)})"
            )
    values = dataclasses.asdict(network.stack.config)
    if name == "char_lm":
        embed_dim = 0 if network.embedding is None else network.embedding.shape[1]
        values |= {"embed_dim": embed_dim, "embedding_dropout": network.embedding_dropout}
    else:
        values |= {"mixtures": network.mixtures, "window": network.window}
    task = {"_name": name, "data": data}
    if name == "char_lm":
        task["reverse"] = network.vocabulary.reverse
    options = MODEL_DATACLASS_REGISTRY[name]()
    given = {field: value for field, value in values.items() if hasattr(options, field)}
    model = dataclasses.asdict(options) | given | values["cell_options"]
    cfg = _container(FairseqConfig) | {
        "model": model | {"_name": name},
        "task": _container(TASK_DATACLASS_REGISTRY[name]) | task,
    }
    # fairseq reads the last entry, which holds the progress of training.
    history = {"optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": cfg,
        "model": network.state_dict(),
        "criterion": None,
        "optimizer_history": [history],
        "task_state": {"reverse": task["reverse"]} if "reverse" in task else {},
        "extra_state": {},
        "last_optimizer_state": None,
    }


def _container(config: type) -> dict:
    """Returns a configuration's defaults as plain values."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=False, enum_to_str=True)
