"""Saves a checkpoint completely or not at all, and with plain data only."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import BinaryIO

import numpy as np
import torch

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import replace_file

# Parts of torch.save's messages for a file that cannot be written, if it does not raise the OSError itself.
WRITER = ("inline_container", "PytorchStreamWriter", "basic_ios::clear", "iostream error")


def save_in_one_attempt(obj, filename: str) -> None:
    """A disk that fills up while a checkpoint is saved leaves a partial file and three tracebacks.

    fairseq tries three times and continues in the file where it stopped, so even an attempt that succeeds
    does not give a valid file. Here there is one attempt, into a temporary file beside the checkpoint. If it
    fails, that file is removed and the run ends in a one-line error.
    """
    with replaced_checkpoint(filename) as file:
        torch.save(obj, file)


def is_dump_of_a_mistake(filename: str) -> bool:
    """A setting that only the first batch shows to be wrong leaves no ``crash.pt``.

    fairseq saves the weights there on any error within an update. Nothing has been trained by then, and the
    message already says what to change.
    """
    return isinstance(sys.exc_info()[1], UsageError) and os.path.basename(filename) == "crash.pt"


def within_the_epoch(cfg, trainer, epoch_itr):
    """``--save-interval-updates N`` saves every N updates, also where the Nth is the last of an epoch.

    fairseq relies on the checkpoint of the epoch there, even if ``--no-epoch-checkpoints`` or
    ``--save-interval`` leaves it out. If N is the number of updates of an epoch, it never saves one. Here the
    position is returned as one within the epoch.
    """
    interval, updates = cfg.save_interval_updates, trainer.get_num_updates()
    without = cfg.no_epoch_checkpoints or epoch_itr.epoch % cfg.save_interval
    if not without or interval <= 0 or updates % interval:
        return epoch_itr
    # Only its name and position are read.
    position = epoch_itr.state_dict()
    return SimpleNamespace(epoch=epoch_itr.epoch, end_of_epoch=lambda: False, state_dict=lambda: position)


@contextmanager
def replaced_checkpoint(path: str) -> Iterator[BinaryIO]:
    """Opens a file as ``replace_file`` does. Raises UsageError if the file system refuses."""
    try:
        with replace_file(path, follow=False) as file:
            yield file
    except Exception as error:
        reason = refusal_of_the_system(error)
        if reason is None:
            raise
        last = os.path.join(os.path.dirname(path), "checkpoint_last.pt")
        rest = f"; {last} is as it was" if os.path.isfile(last) else ""
        raise UsageError(f"{path}: cannot be written ({reason}){rest}") from error


def refusal_of_the_system(error: BaseException | None) -> str | None:
    """Returns why a file could not be written, if an exception of torch.save means that; else None."""
    text = str(error)
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return "the file system refuses" if any(mark in text for mark in WRITER) else None


def plain(value):
    """Returns the containers with Python numbers in place of NumPy's and tensors in place of numeric arrays.

    fairseq's validation BLEU (--eval-bleu) is a NumPy number, and its n-gram counts are arrays. The safe
    loader refuses both. A container with neither is returned itself, not copied.
    """
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if isinstance(value, dict):
        changed = {key: plain(item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        # ``copy`` keeps the class, such as OrderedDict.
        copied = value.copy()
        copied.update(changed)
        return copied
    if type(value) in (list, tuple):
        changed = [plain(item) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(changed)
    return value
