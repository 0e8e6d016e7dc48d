"""Checks what a checkpoint holds when any program loads it, before anything is built from it."""

import argparse
import math
import re
import zipfile
from collections.abc import Mapping
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from rhhn_fairseq.compat.names import require_known
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.saving import weight_problem

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

# Options that reach a file's name, a program or the choice of a reader, and what a stored configuration may
# set them to. None is always possible.
STORED = {
    "dataset_impl": re.compile("raw|lazy|cached|mmap"),
    "source_lang": re.compile("[A-Za-z0-9_.-]+"),
    "target_lang": re.compile("[A-Za-z0-9_.-]+"),
    "lang_pairs": re.compile("[A-Za-z0-9_.,-]+"),
    "post_save_script": re.compile("(?!)"),
    "use_plasma_view": re.compile("False"),
}

# The most values that are read, those that are shared counted each time. fairseq's configuration has about
# 500, a training state a few for every weight.
MOST_SETTINGS, MOST_VALUES = 20_000, 2_000_000
# The deepest nesting; fairseq's own checkpoints have about ten levels.
DEEPEST = 60


def check_file(name: str, file) -> None:
    """Refuses a compressed checkpoint; leaves the file at its beginning.

    PyTorch writes none. They may unpack to any size, and weights that are mapped into memory would be read as
    they are in the file.

    Raises:
        UsageError: it is compressed.
    """
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        # The older format, or a damaged file, for which PyTorch reports the error.
        compressed = False
    file.seek(0)
    if compressed:
        raise UsageError(f"checkpoint {name}: is compressed, and torch.save writes uncompressed files")


def check_state(name: str, state) -> None:
    """Checks everything that was loaded from a checkpoint.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: it is no checkpoint, or a part of it does not have the type that fairseq gives it.
    """
    from fairseq import models

    if not (isinstance(state, dict) and "model" in state):
        raise UsageError(f"{name} is not a fairseq checkpoint: it holds no 'model'")
    for key, value in state.items():
        if key != "model":
            most = MOST_SETTINGS if key in ("cfg", "args") else MOST_VALUES
            _check_values(f"checkpoint {name}: {key}", value, most)
    for key in ("cfg", "args"):
        _check_settings(f"checkpoint {name}: {key}", state.get(key), state.get(key))
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
    # Some of fairseq's own models have weights that they never set nor use.
    finite = not _is_fairseqs(state)
    for key, weight in state["model"].items():
        if problem := weight_problem(key, weight, finite):
            raise UsageError(f"checkpoint {name}: {key} {problem}")


def _is_fairseqs(state: dict) -> bool:
    """Returns whether a checkpoint is of a model that fairseq itself defines."""
    from fairseq import models

    args, cfg = state.get("args"), state.get("cfg") or {}
    stored = cfg.get("model") if args is None else args
    options = stored if isinstance(stored, dict) else vars(stored or argparse.Namespace())
    name = options.get("_name") or options.get("arch")
    kind = models.MODEL_REGISTRY.get(name) or models.ARCH_MODEL_REGISTRY.get(name)
    return kind is not None and kind.__module__.startswith("fairseq.")


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


def _members(value) -> list[tuple[object, object]]:
    """Returns the names and values in a container; none for anything else."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _check_values(where: str, value, most: int) -> None:
    """Raises UsageError for containers with more than ``most`` values, or nested more than DEEPEST levels.

    A container that stands in several places is counted in each, because whatever walks through them visits
    it as often.
    """
    left, level = most, [value]
    for _ in range(DEEPEST):
        inner = []
        for container in level:
            members = _members(container)
            left -= len(members)
            inner += [member for _, member in members if _members(member)]
            if left < 0 or len(inner) > most:
                raise UsageError(f"{where} holds more than {most:,} values")
        level = inner
        if not level:
            return
    raise UsageError(f"{where} is nested more than {DEEPEST} levels deep, no checkpoint is")


def _check_settings(where: str, settings, root) -> None:
    """Raises UsageError for a setting that STORED does not allow, and for one that refers to others.

    A default of fairseq's, such as ``${common.fp16}``, may stand for a value of ``root``, or a short list.
    """
    for name, value in _members(settings):
        if isinstance(value, str) and "${" in value and not _is_one_value(value, root):
            raise UsageError(f"{where}.{name} is {value!r}: a checkpoint holds values, not references")
        allowed = STORED.get(name)
        if allowed is not None and value is not None and not allowed.fullmatch(str(value)):
            raise UsageError(f"{where}.{name} is {value!r}, which a checkpoint may not set")
        _check_settings(f"{where}.{name}", value, root)


def _is_one_value(reference: str, root) -> bool:
    """Returns whether a text refers to a value or a short list, which refers to nothing else."""
    target = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", reference)
    section = dict(_members(root)).get(target[1]) if target else None
    value = dict(_members(section)).get(target[2], {}) if target else {}
    flat = not isinstance(value, Mapping) and len(_members(value)) < 100
    return flat and not any(_members(member) for _, member in _members(value)) and "${" not in str(value)


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
