"""Checkpoints: only data of a bounded size is loaded, and they are saved completely or not at all."""

import argparse
import ast
import math
import os
import re
import shutil
import sys
import types
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._pytree import tree_map

from rhhn_fairseq.compat import in_place_of, resume
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless, replace_file
from rhhn_fairseq.saving import Allowance, rename_old, weight_problem

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


# What an expression of a configuration consists of, and the most characters that it is when written out.
EXPRESSION = (ast.Expression, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Load)
EXPRESSION += (ast.UnaryOp, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub)
LARGEST = 10_000_000


AVERAGES = ("ema", "ema_fp32_params")
"""Where ``--store-ema`` keeps averaged weights, those of a model in 16 bits before they are rounded."""


class WeightsOnlyTorch(types.ModuleType):
    """`torch` as `fairseq.checkpoint_utils` sees it: the same module, but `load` is always safe."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def load(file, *args, **kwargs):
        """Calls `torch.load` with `weights_only=True`, whatever the caller and the environment request.

        Raises UsageError, with the file's name, if the file holds other classes, cannot be read, or is no
        checkpoint of fairseq.
        """
        name = getattr(file, "name", file)
        with nullcontext(file) if hasattr(file, "seek") else open(file, "rb") as opened:
            check_file(name, opened)
        try:
            state = torch.load(file, *args, **{**kwargs, "weights_only": True})
        except OSError:
            raise
        # The unpickler fails on damaged bytes with any exception: KeyError, EOFError, RuntimeError, ...
        except Exception as error:
            # torch's own words advise to run its code.
            if refused := re.search(r"GLOBAL (\S+)", str(error)):
                reason = f"is refused: it would load {refused[1]}, and checkpoints hold data only"
            else:
                reason = f"cannot be read: it is damaged, cut short or no checkpoint ({type(error).__name__})"
            raise UsageError(f"checkpoint {name} {reason}") from error
        check_state(name, state)
        if not _is_fairseqs(state):
            extra = state.get("extra_state") or {}
            for weights in (state["model"], *(extra.get(average) or {} for average in AVERAGES)):
                rename_old(weights)
        return state


def load_weights_only() -> None:
    """fairseq relies on the default of `torch.load`, which can be overridden.

    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 does so, older versions of PyTorch have the other default, and
    some versions of fairseq pass `weights_only=False`. Checkpoints are untrusted files, so this does not
    depend on the environment: inside `fairseq.checkpoint_utils` the name `torch` refers to a module
    whose `load` reads weights only. `torch.load` is unchanged for other code.

    Checkpoints whose model, task, criterion and optimizer are configured by dataclasses hold nothing but
    tensors and plain containers. Those of fairseq's older models hold an `argparse.Namespace`, which runs no
    code when it is loaded; it is the only other class that is allowed.
    """
    from fairseq import checkpoint_utils

    checkpoint_utils.torch = WeightsOnlyTorch("torch")


# The options of fairseq's older models.
torch.serialization.add_safe_globals([argparse.Namespace])


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
        UsageError: it is no checkpoint, or holds what no training writes.
    """
    if not (isinstance(state, dict) and isinstance(state.get("model"), dict)):
        raise UsageError(f"{name} is not a fairseq checkpoint: it holds no 'model'")
    for key, value in state.items():
        if key != "model":
            most = MOST_SETTINGS if key in ("cfg", "args") else MOST_VALUES
            _check_values(f"checkpoint {name}: {key}", value, most)
    for key in ("cfg", "args"):
        _check_settings(f"checkpoint {name}: {key}", state.get(key), state.get(key))
    cfg, args = state.get("cfg"), state.get("args")
    if not isinstance(cfg, dict | None) or not isinstance(args, argparse.Namespace | None):
        raise UsageError(f"checkpoint {name}: its configuration is of type {type(cfg or args).__name__}")
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
    options = dict(_members(stored))
    name = options.get("_name") or options.get("arch")
    kind = models.MODEL_REGISTRY.get(name) or models.ARCH_MODEL_REGISTRY.get(name)
    return kind is not None and kind.__module__.startswith("fairseq.")


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
        # Multilingual tasks of fairseq's keep a list of their languages.
        parts = value if isinstance(value, list | tuple) else [value]
        if allowed is not None and not all(p is None or allowed.fullmatch(str(p)) for p in parts):
            raise UsageError(f"{where}.{name} is {value!r}, which a checkpoint may not set")
        _check_settings(f"{where}.{name}", value, root)


def _is_one_value(reference: str, root) -> bool:
    """Returns whether a text refers to a value or a short list, which refers to nothing else."""
    target = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", reference)
    section = dict(_members(root)).get(target[1]) if target else None
    value = dict(_members(section)).get(target[2], {}) if target else {}
    flat = not isinstance(value, Mapping) and len(_members(value)) < 100
    return flat and not any(_members(member) for _, member in _members(value)) and "${" not in str(value)


@in_place_of("fairseq.checkpoint_utils:load_model_ensemble_and_task")
def load_model_ensemble_and_task(
    load, filenames, arg_overrides=None, task=None, strict=True, suffix="", num_shards=1, state=None
):
    """A configuration of a billion units would fill the memory before any error is reported.

    A model that is built to load a checkpoint may not be much larger than the checkpoint: the limit is four
    numbers per byte of the file, which leaves room for temporary tensors of the initialisation.

    fairseq-eval-lm gives the names of an ensemble as one, with a task. So does fairseq-validate, without a
    task; it would use the first model alone, so its name is left as it is.
    """
    from fairseq.checkpoint_utils import get_maybe_sharded_checkpoint_filename as filename
    from fairseq.utils import split_paths

    if task is not None:
        filenames = [name for given in filenames for name in split_paths(given)]
    files = [filename(name, suffix, shard, num_shards) for name in filenames for shard in range(num_shards)]
    size = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    names = ":".join(filenames)
    refusal = f"checkpoint {names}: its configuration asks for a model far larger than its weights"
    with Allowance(4 * size + (1 << 24), refusal):
        return load(filenames, arg_overrides, task, strict, suffix, num_shards, state)


@in_place_of("fairseq.checkpoint_utils:load_checkpoint_to_cpu")
def load_checkpoint_to_cpu(load, path, *args, **kwargs):
    """fairseq waits for ever for a named pipe without a writer, and forgets what resuming needs."""
    refuse_endless(path)
    state = load(path, *args, **kwargs)
    resume.remember_batches(state)
    resume.add_average(path, state)
    for entry in state.get("optimizer_history", ()):
        # Only the schedule "fixed" saves no best figure, for which every other one looks; a composite one has
        # the states of others.
        state_of_rate = entry.get("lr_scheduler_state") or {}
        if not any(isinstance(value, dict) for value in state_of_rate.values()):
            state_of_rate.setdefault("best", None)
    return state


TO_KEEP: list = []
"""Options and suffix of a checkpoint being saved, until ``checkpoint_paths`` is asked for the best so far."""


@in_place_of("fairseq.checkpoint_utils:save_checkpoint")
def save_checkpoint(inner, cfg, trainer, epoch_itr, val_loss):
    """fairseq asks a task for its state on rank 0 only, after the other ranks have returned.

    Here every worker first calls the task's `gather_checkpoint_state`, if it has one.
    """
    kept = cfg.keep_best_checkpoints > 0 and val_loss is not None
    TO_KEEP[:] = [(cfg, trainer.checkpoint_suffix)] if kept else []
    gather = getattr(trainer.task, "gather_checkpoint_state", None)
    if gather is not None and not cfg.no_save:
        gather()
    return inner(cfg, trainer, within_the_epoch(cfg, trainer, epoch_itr), val_loss)


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


@in_place_of("fairseq.trainer:Trainer.save_checkpoint")
def save_training(inner, self, filename, extra_state):
    """fairseq saves no count of ``--patience``, so a training that is restarted often never ends."""
    return inner(self, filename, extra_state | resume.count_of_patience())


@in_place_of("fairseq.checkpoint_utils:torch_persistent_save")
def torch_persistent_save(inner, obj, filename, async_write=False):
    """A disk that fills up while a checkpoint is saved leaves a partial file and three tracebacks.

    fairseq tries three times and continues in the file where it stopped, so even an attempt that succeeds
    does not give a valid file. Here there is one attempt, into a temporary file beside the checkpoint.
    """
    from fairseq.file_io import PathManager

    # The state of a model has an attribute, its versions, which a copy would lose.
    obj = {key: part if key == "model" else tree_map(plain, part) for key, part in obj.items()}
    if async_write or not PathManager.supports_rename(filename):
        return inner(obj, filename, async_write=async_write)
    return write(obj, filename, follow=False)


def write(state: dict, path, follow: bool = True) -> None:
    """Saves a checkpoint as ``replace_file`` writes files. Raises UsageError if the file system refuses."""
    with replace_file(path, follow) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # PyTorch's writer replaces the file's error with its own.
            raise OSError(None, "the file system refuses, is it full?") from error


@in_place_of("fairseq.file_io:PathManager.copy")
def copy_completely(inner, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """A worker that is killed while it saves must not leave a damaged checkpoint_last.pt.

    fairseq writes a checkpoint to a temporary file and renames it, but only under one of its names, such as
    checkpoint_1_500.pt. It then copies that file to the other names, and checkpoint_last.pt, from which
    every restart resumes, is always the last of these. If that copy is cut short, all restarts fail. Here
    a copy that replaces a file is also written to a temporary file and renamed.
    """
    from fairseq.file_io import PathManager

    if not (overwrite and PathManager.supports_rename(dst_path)):
        return inner(src_path, dst_path, overwrite)
    with open(src_path, "rb") as source, replace_file(dst_path, follow=False) as file:
        shutil.copyfileobj(source, file)
    return True


@in_place_of("fairseq.checkpoint_utils:checkpoint_paths")
def checkpoint_paths(inner, path, pattern=r"checkpoint(\d+)\.pt", keep_match=False):
    """fairseq keeps all of ``--keep-best-checkpoints`` where the figure is negative, as that of handwriting.

    It looks for their files by a pattern without a minus sign. While there are fewer than it may keep, it
    keeps only those that are better than the worst of them: here it finds one of infinite loss then.
    """
    if not pattern.startswith(r"checkpoint\.best_"):
        return inner(path, pattern, keep_match)
    found = inner(path, pattern.replace(r"(\d+\.?\d*)", r"(-?\d+\.?\d*)"), keep_match)
    for cfg, suffix in TO_KEEP:
        if len(found) < cfg.keep_best_checkpoints:
            found = [f"_{'-' * cfg.maximize_best_checkpoint_metric}inf{suffix}.pt"]
    TO_KEEP.clear()
    return found


def plain(value):
    """Returns a Python number in place of NumPy's, a tensor in place of a numeric array, others as they are.

    fairseq's validation BLEU (--eval-bleu) is a NumPy number, and its n-gram counts are arrays. The safe
    loader refuses both.
    """
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value


def evaluate(text: str):
    """Returns the value of an expression of literals and + - * /, such as "[(512, 3)] * 15".

    Raises UsageError for everything else: names, calls, attributes, comprehensions. Like the builtin,
    it raises TypeError for arguments that are no strings; some callers rely on that.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression must be a string, not {type(text).__name__}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        products = [node for node in ast.walk(tree) if isinstance(getattr(node, "op", None), ast.Mult)]
        # A factor that is written out bounds the length of what it repeats.
        sides = [[side for side in (node.left, node.right) if hasattr(side, "value")] for node in products]
        factors = [side.value for both in sides for side in both if isinstance(side.value, int)]
        small = all(sides) and len(text) * math.prod(filter(None, factors)) <= LARGEST
        if small and all(isinstance(node, EXPRESSION) for node in ast.walk(tree)):
            return eval(compile(tree, "<configuration>", "eval"), {"__builtins__": {}})
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text!r} in the configuration: {error}") from error
    raise UsageError(
        f"{text!r} in the configuration is not made of numbers, strings, lists, tuples, "
        "dictionaries and + - * / only"
    )


def configuration_is_data() -> None:
    """A checkpoint holds its model's configuration, and several of fairseq's models `eval` parts of it.

    So a file could run code although its pickle holds none (`decoder_layers` of `fconv_lm`,
    `adaptive_softmax_cutoff` of many models through `fairseq.utils.eval_str_list`). A module's own
    name shadows the builtin, so each fairseq module gets an `eval` that supports only literals and
    arithmetic, which is all that fairseq's defaults and documentation use. The command-line programs
    (`fairseq_cli`) evaluate what the user typed and are left unchanged.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq.") and "eval" not in vars(module):
            module.eval = evaluate
