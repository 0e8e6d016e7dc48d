"""From the two files of ``networks.files`` to a checkpoint of fairseq's; ``exporting`` goes the other way."""

import dataclasses
from pathlib import Path

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json
from rhhn_fairseq.lines import replacing
from rhhn_fairseq.networks import files

MODELS = {"characters": "char_lm", "strokes": "handwriting"}
"""The model, and the task, of each kind of network."""


def to_checkpoint(directory: str | Path, checkpoint: str | Path, data: str) -> None:
    """Writes a saved character or handwriting network as a checkpoint.

    It has no optimizer's state: fairseq-eval-lm and the commands read it, and fairseq-train starts from it
    with ``--finetune-from-model``. Everything but the model has fairseq's defaults.

    Args:
        directory: what ``exporting.export`` wrote. data: the data directory to name in it.

    Raises:
        UsageError: the directory holds no such network, or the file cannot be written.
    """
    path = Path(directory) / files.CONFIG_NAME
    try:
        config = read_json(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; rhhn export writes it") from error
    name = MODELS.get(config.get("kind")) if isinstance(config, dict) else None
    if name is None:
        raise UsageError(f"{path}: is of no network of characters or strokes")
    if name == "char_lm":
        network = files.load_characters(directory).network
        own = {"embed_dim": config["embed_dim"]}
    else:
        network = files.load_strokes(directory)
        own = {"mixtures": config["mixtures"], "window": network.window}
    values = dataclasses.asdict(network.stack.config)
    options = MODEL_DATACLASS_REGISTRY[name]()
    given = {field: value for field, value in values.items() if hasattr(options, field)}
    model = dataclasses.asdict(options) | given | values["cell_options"] | own
    cfg = _container(FairseqConfig) | {
        "model": model | {"_name": name},
        "task": _container(TASK_DATACLASS_REGISTRY[name]) | {"_name": name, "data": data},
    }
    state = {
        "args": None,
        "cfg": cfg,
        "model": network.state_dict(),
        "criterion": None,
        # fairseq reads the last entry, in which a training says how far it came.
        "optimizer_history": [{"optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": {},
        "extra_state": {},
        "last_optimizer_state": None,
    }
    with replacing(checkpoint) as file:
        torch.save(state, file)


def _container(config: type) -> dict:
    """A configuration's defaults as plain values."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=False, enum_to_str=True)
