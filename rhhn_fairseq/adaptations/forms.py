"""Checks the structure of a checkpoint when any program loads it, before anything is built from it."""

import argparse
import math
import zipfile
from collections.abc import Mapping
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from rhhn_fairseq.adaptations.names import require_known
from rhhn_fairseq.errors import UsageError

NONE = type(None)

# The keys of a checkpoint and their types; all but the first may be missing.
FORM = {
    "model": (dict,),
    "cfg": (dict, NONE),
    "cfg.model": (dict, argparse.Namespace, NONE),
    "cfg.task": (dict, argparse.Namespace, NONE),
    "args": (argparse.Namespace, NONE),
    "criterion": (dict, NONE),
    "optimizer_history": (list,),
    "optimizer_history.criterion_name": (str, NONE),
    "optimizer_history.optimizer_name": (str, NONE),
    "optimizer_history.num_updates": (int,),
    "optimizer_history.lr_scheduler_state": (dict,),
    "task_state": (dict,),
    "extra_state": (dict,),
    "extra_state.best": (int, float, torch.Tensor),
    "extra_state.metrics": (dict,),
    "extra_state.previous_training_time": (int, float, torch.Tensor),
    "extra_state.train_iterator": (dict,),
    "extra_state.train_iterator.epoch": (int,),
    "extra_state.train_iterator.iterations_in_epoch": (int,),
    "last_optimizer_state": (dict, NONE),
    "last_optimizer_state.state": (dict, NONE),
    "last_optimizer_state.param_groups": (list, NONE),
}
# The deepest nesting that is accepted; fairseq's own checkpoints have about ten levels.
DEEPEST = 60
# PyTorch stores weights uncompressed; a file that unpacks to more was made to fill the memory.
LARGEST_GROWTH = 4


def check_file(name: str, file) -> None:
    """Refuses a zip file that unpacks to much more than its size; leaves the file at its beginning.

    Raises:
        UsageError: it does.
    """
    size = file.seek(0, 2)
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        # The older format, or a damaged file, for which PyTorch reports the error.
        unpacked = 0
    file.seek(0)
    if unpacked > LARGEST_GROWTH * size + (1 << 20):
        raise UsageError(
            f"checkpoint {name} has {size:,} bytes and unpacks to {unpacked:,}; PyTorch writes no such files"
        )


class NotACheckpoint(UsageError):
    """A file that torch can load, and that no training of fairseq wrote."""


def check_state(name: str, state) -> None:
    """Checks everything that was loaded from a checkpoint.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: it is no checkpoint, or a part of it does not have the type that fairseq gives it.
    """
    from fairseq import models

    if not (isinstance(state, dict) and "model" in state):
        raise NotACheckpoint(f"{name} is not a fairseq checkpoint: it holds no 'model'")
    _check_depth(name, state)
    for key, kinds in FORM.items():
        for value in _values(state, key.split(".")):
            if not isinstance(value, kinds) or isinstance(value, bool):
                expected = " or ".join(kind.__name__ for kind in kinds if kind is not NONE)
                raise UsageError(
                    f"checkpoint {name}: {key} is of type {type(value).__name__}, and has to be {expected}"
                )
            if kinds == (int,) and value < 0:
                raise UsageError(f"checkpoint {name}: {key} is {value}, and has to be 0 or more")
    cfg = state.get("cfg")
    if cfg is not None and not (cfg.get("model") and cfg.get("task")):
        raise UsageError(f"checkpoint {name}: its cfg lacks the model or the task")
    args = state.get("args")
    if args is not None and not (isinstance(getattr(args, "arch", None), str) and hasattr(args, "task")):
        raise UsageError(f"checkpoint {name}: its args lack the architecture or the task")
    if args is not None:
        require_known("model", args.arch, {*models.MODEL_REGISTRY, *models.ARCH_MODEL_REGISTRY})
    for key, weight in state["model"].items():
        problem = weight_problem(key, weight)
        if problem:
            raise UsageError(f"checkpoint {name}: {key} {problem}")


def _values(state, keys: list[str]) -> list:
    """Returns the values at a path of keys: for a list, those of all its members; none for missing keys."""
    if not keys:
        return [state]
    if isinstance(state, list):
        return [
            value
            for member in state
            for value in (_values(member, keys) if isinstance(member, dict) else [member])
        ]
    present = isinstance(state, dict) and keys[0] in state
    return _values(state[keys[0]], keys[1:]) if present else []


def _check_depth(name: str, state) -> None:
    """Raises UsageError for containers that contain themselves or are nested too deeply."""
    level = [state]
    for _ in range(DEEPEST):
        inner = {}
        for value in level:
            members = value.values() if isinstance(value, Mapping) else value
            inner |= {id(member): member for member in members if isinstance(member, dict | list | tuple)}
        level = list(inner.values())
        if not level:
            return
    raise UsageError(f"checkpoint {name} is nested more than {DEEPEST} levels deep, no checkpoint is")


def weight_problem(key, weight) -> str | None:
    """Returns what is wrong with a weight and its name, or None."""
    if not isinstance(key, str) or not isinstance(weight, torch.Tensor):
        return f"is of type {type(weight).__name__}, not a named tensor"
    if weight.layout != torch.strided or weight.is_complex() or weight.device.type == "meta":
        return f"is a tensor of {weight.layout} and {weight.dtype} on {weight.device}, no model has such"
    # Strides may repeat a few stored numbers to any size.
    if weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
        return f"claims {weight.numel():,} numbers, which are not stored"
    if weight.is_floating_point() and not bool(weight.isfinite().all()):
        return "holds NaN or infinite numbers: the run diverged"
    return None


class _Allowance(TorchFunctionMode):
    """Refuses to create tensors with more numbers in total than are allowed.

    Args:
        numbers: how many. refusal: the message.
    """

    MAKERS = frozenset(
        {
            torch.empty,
            torch.zeros,
            torch.ones,
            torch.full,
            torch.randn,
            torch.rand,
            torch.Tensor,
            torch.arange,
        }
    )

    def __init__(self, numbers: int, refusal: str):
        super().__init__()
        self.left, self.refusal = numbers, refusal

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.MAKERS:
            sizes = args[0] if args and isinstance(args[0], list | tuple) else args
            sizes = (kwargs or {}).get("size", sizes)
            self.left -= math.prod(size for size in sizes if isinstance(size, int))
            if self.left < 0:
                raise UsageError(self.refusal)
        return function(*args, **(kwargs or {}))


@contextmanager
def allowance(numbers: int, refusal: str):
    """Limits how many numbers are created within the context; UsageError before memory is allocated."""
    with _Allowance(numbers, refusal):
        yield
