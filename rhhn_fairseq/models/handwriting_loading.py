"""Loading trained handwriting models for use outside of fairseq's own programs; they need no data."""

import dataclasses
import os

from fairseq import checkpoint_utils
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf

from rhhn_fairseq.compat.checkpoints import Allowance
from rhhn_fairseq.compat.ranges import check
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.handwriting import Handwriting


def load_handwriting(path: str) -> tuple[Handwriting, str | None]:
    """Returns a trained handwriting model, on the CPU in evaluation mode, and its training data directory.

    Raises:
        UsageError: no such file, or not a checkpoint of a handwriting model.
    """
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    cfg = state.get("cfg")
    # Resolving would need values from other parts of the configuration.
    values = {} if cfg is None else OmegaConf.to_container(OmegaConf.create(cfg), resolve=False)
    model = values.get("model") or {}
    name = model.get("_name")
    kind = MODEL_REGISTRY.get(name)
    if kind is None or not issubclass(kind, Handwriting):
        raise UsageError(f"{path} holds a model {name!r}, not a handwriting model")
    config_type = MODEL_DATACLASS_REGISTRY[name]
    known = {spec.name for spec in dataclasses.fields(config_type)}
    config = config_type(**{key: value for key, value in model.items() if key in known})
    weights = state["model"]
    if "statistics" not in weights or "symbol_codes" not in weights:
        raise UsageError(f"{path} is not a checkpoint of a handwriting model: no statistics in it")
    symbols = "".join(map(chr, weights["symbol_codes"].tolist()))
    check({f"model.{key}": value for key, value in model.items()})
    refusal = f"checkpoint {path}: its configuration asks for a model far larger than its weights"
    with Allowance(4 * os.path.getsize(path) + (1 << 24), refusal):
        built = kind(config, Normalisation.from_bits(weights["statistics"].numpy()), symbols, 0.0)
    built.load_state_dict(weights)
    return built.float().eval(), (values.get("task") or {}).get("data")
