"""Loading trained models for use outside of fairseq's own programs."""

import os
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.tasks import TASK_REGISTRY

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.char_lm import CharLM
from rhhn_fairseq.saving import read_weights


def load_char_lm(path: str, data: str | None = None):
    """Returns a trained character language model and its task, on the CPU in evaluation mode.

    Args:
        path: the checkpoint. data: the data directory; None takes the symbols that the checkpoint holds, or
            for older ones the directory it was trained with.

    Raises:
        UsageError: no such file, not a checkpoint of a character language model, or other symbols.
    """
    overrides = {} if data is None else {"data": data}
    state = checkpoint_utils.load_checkpoint_to_cpu(path, overrides) if os.path.isfile(path) else None
    own = TASK_REGISTRY["char_lm"].of_checkpoint(state) if state is not None and data is None else None
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], overrides, own, state=state)
    if not isinstance(model, CharLM):
        raise UsageError(f"{path} holds a {type(model).__name__}, not a character language model")
    return model.eval(), task


def load_weights(path: str) -> dict[str, torch.Tensor]:
    """Returns by name the weights of any checkpoint, or of a directory that ``rhhn convert`` wrote.

    Raises:
        UsageError: no such file, or not a checkpoint.
    """
    if os.path.isdir(path):
        return read_weights(Path(path))
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    if not isinstance(state.get("model"), dict):
        raise UsageError(f"{path}: is not a checkpoint of a model: it contains no weights")
    return state["model"]


def initial_char_lm(path: str, data: str | None = None, seed: int = 1) -> CharLM:
    """Returns a checkpoint's model as it is before training with this seed, in evaluation mode.

    Raises:
        UsageError: as ``load_char_lm``.
    """
    _, task = load_char_lm(path, data)
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.build_model(state["cfg"]["model"]).eval()


def updates_of(path: str) -> int:
    """Returns the number of updates after which a checkpoint was saved.

    Raises:
        UsageError: no such file, or it does not say.
    """
    history = checkpoint_utils.load_checkpoint_to_cpu(path).get("optimizer_history") or [{}]
    updates = history[-1].get("num_updates")
    if not isinstance(updates, int):
        raise UsageError(f"{path}: does not say after how many updates it was saved")
    return updates


def beginning_of(task, split: str, symbols: int) -> list[int]:
    """Returns the dictionary indices of a model's first input and of the first symbols of a split.

    Args:
        task: a ``CharLMTask``.

    Raises:
        UsageError: the data has no such split.
    """
    stream = task.open_split(split)
    return [task.first_input, *stream[:symbols].tolist()]


def lines_of(task, split: str, lines: int, symbols: int) -> torch.Tensor:
    """Returns lines [symbols, lines] of a split as dictionary indices, evenly spaced over all of it.

    Raises:
        UsageError: the data has no such split, or it is too short.
    """
    stream = task.open_split(split)
    if len(stream) < lines * symbols:
        raise UsageError(
            f"the split {split} of {task.cfg.data} has {len(stream):,} symbols, too few for {lines} lines of "
            f"{symbols}: give fewer --lines or --steps, or another --data"
        )
    starts = [number * (len(stream) // lines) for number in range(lines)]
    columns = [torch.tensor(stream[start : start + symbols].tolist()) for start in starts]
    return torch.stack(columns, dim=1)
