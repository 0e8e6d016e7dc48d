"""Saving a checkpoint leaves a whole file or none, and nothing in it but plain data."""

import functools
import os
from contextlib import contextmanager, suppress

import numpy as np
import torch

from rhhn_fairseq.adaptations import mentions
from rhhn_fairseq.errors import UsageError

# How torch.save says that its file could not be written, where it does not raise the OSError itself.
WRITER = ("inline_container", "PytorchStreamWriter", "basic_ios::clear", "iostream error")


def leave_no_cut_checkpoint() -> bool:
    """A disk that is full in the middle of saving leaves a piece of a checkpoint, and three tracebacks.

    fairseq tries three times and goes on in the file where it stopped, so that even an attempt that works is
    no good file. Here there is one attempt, beside the place of the checkpoint. If it fails, its file is
    removed, and the run ends in one line.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    inner = checkpoint_utils.torch_persistent_save
    if mentions(inner, "unlink"):
        return False

    @functools.wraps(inner)
    def torch_persistent_save(obj, filename, async_write=False):
        if async_write or not PathManager.supports_rename(filename):
            inner(obj, filename, async_write=async_write)
            return
        with staged_file(filename) as stage, PathManager.open(stage, "wb") as file:
            torch.save(obj, file)

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    return True


@contextmanager
def staged_file(path: str):
    """The name of a file that takes the place of ``path`` when the context ends well, and is removed if not.

    Raises:
        UsageError: the file system refuses.
    """
    stage = f"{path}.tmp"
    try:
        yield stage
        os.rename(stage, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(stage)
        reason = refusal_of_the_system(error) if isinstance(error, Exception) else None
        if reason is None:
            raise
        last = os.path.join(os.path.dirname(path), "checkpoint_last.pt")
        rest = f"; {last} is as it was" if os.path.isfile(last) else ""
        raise UsageError(f"{path}: cannot be written ({reason}){rest}") from error


def refusal_of_the_system(error: BaseException | None) -> str | None:
    """Why a file could not be written, if that is what an exception of torch.save means; else None."""
    text = str(error)
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return "the file system refuses" if any(mark in text for mark in WRITER) else None


def save_python_numbers() -> bool:
    """fairseq's BLEU of a validation (--eval-bleu) is a NumPy number, and its n-gram counts are arrays.

    The safe loader refuses both, so that the run could not be resumed.
    """
    from fairseq import checkpoint_utils

    inner = checkpoint_utils.torch_persistent_save
    if mentions(inner, "plain"):
        return False

    @functools.wraps(inner)
    def torch_persistent_save(obj, filename, *args, **kwargs):
        return inner(plain(obj), filename, *args, **kwargs)

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    return True


def plain(value):
    """The same containers, with Python's numbers in place of NumPy's and tensors in place of numeric arrays.

    What holds neither is the same object, not a copy.
    """
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if isinstance(value, dict):
        changed = {key: plain(item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        # Of the same class, as an OrderedDict.
        copied = value.copy()
        copied.update(changed)
        return copied
    if type(value) in (list, tuple):
        changed = [plain(item) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(changed)
    return value
