"""Checkpoints: only data is loaded from them, and a bad file ends in a one-line error."""

import argparse
import atexit
import os
import re
import types
from contextlib import nullcontext

import torch
from omegaconf import OmegaConf

from rhhn_fairseq.compat import averages, in_place_of, restarts, saving
from rhhn_fairseq.compat.forms import allowance, check_file, check_state
from rhhn_fairseq.compat.names import check_combination, require_known
from rhhn_fairseq.compat.ranges import check
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless


def allow_namespace() -> bool:
    """PyTorch 2.6 and newer read only tensors and plain containers from a file.

    Checkpoints whose model, task, criterion and optimizer are configured by dataclasses hold
    nothing else. Those of fairseq's older models hold an `argparse.Namespace`, which runs no code
    when it is loaded; it is the only other class that is allowed.
    """
    if argparse.Namespace in torch.serialization.get_safe_globals():
        return False
    torch.serialization.add_safe_globals([argparse.Namespace])
    return True


class WeightsOnlyTorch(types.ModuleType):
    """`torch` as `fairseq.checkpoint_utils` sees it: the same module, but `load` is always safe."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def load(file, *args, **kwargs):
        """Calls `torch.load` with `weights_only=True`, whatever the caller and the environment request.

        Raises UsageError, with the file's name, if the file holds other classes, cannot be read, or
        does not have the structure of a fairseq checkpoint.
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
            raise UsageError(why_unreadable(name, error)) from error
        check_state(name, state)
        return state


def why_unreadable(name: str, error: Exception) -> str:
    """Returns in one line why ``torch.load`` refused a file."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"checkpoint {name} is refused: it would load {refused[1]}, and only tensors, plain "
            "containers and argparse.Namespace may come out of a checkpoint"
        )
    return (
        f"checkpoint {name} cannot be read: it is damaged, cut short or no checkpoint "
        f"({type(error).__name__})"
    )


def load_weights_only() -> bool:
    """fairseq relies on the default of `torch.load`, which can be overridden.

    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 does so, older versions of PyTorch have the other default, and
    some versions of fairseq pass `weights_only=False`. Checkpoints are untrusted files, so this does not
    depend on the environment: inside `fairseq.checkpoint_utils` the name `torch` refers to a module
    whose `load` reads weights only. `torch.load` is unchanged for other code.
    """
    from fairseq import checkpoint_utils

    checkpoint_utils.torch = WeightsOnlyTorch("torch")
    return True


def read() -> bool:
    """Checkpoints are read where they can be, and know what resuming needs.

    A named pipe is refused: without a writer, fairseq would wait for it forever.
    """
    from fairseq import checkpoint_utils

    @in_place_of(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(load_to_cpu, path, *args, **kwargs):
        refuse_endless(path)
        try:
            state = load_to_cpu(path, *args, **kwargs)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"checkpoint {path} cannot be read: {reason}") from error
        restarts.remember_batches(state)
        averages.add_average(path, state)
        return state

    return True


def save() -> bool:
    """Checkpoints are saved completely: the state of all workers, every interval, and in a whole file.

    fairseq asks a task for its state (`get_checkpoint_dict`) on rank 0 only, after the other ranks have
    returned. Here every worker first calls the task's `gather_checkpoint_state`, if it has one.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager
    from fairseq.trainer import Trainer

    @in_place_of(checkpoint_utils, "save_checkpoint")
    def save_checkpoint(inner, cfg, trainer, epoch_itr, val_loss):
        gather = getattr(trainer.task, "gather_checkpoint_state", None)
        if gather is not None and not cfg.no_save:
            gather()
        return inner(cfg, trainer, saving.within_the_epoch(cfg, trainer, epoch_itr), val_loss)

    @in_place_of(Trainer, "save_checkpoint")
    def save_training(inner, self, filename, extra_state):
        if saving.is_dump_of_a_mistake(filename):
            return None
        return inner(self, filename, extra_state | restarts.count_of_patience())

    @in_place_of(checkpoint_utils, "torch_persistent_save")
    def torch_persistent_save(inner, obj, filename, async_write=False):
        obj = saving.plain(obj)
        if async_write or not PathManager.supports_rename(filename):
            return inner(obj, filename, async_write=async_write)
        return saving.save_in_one_attempt(obj, filename)

    return True


def leave_no_empty_directory() -> bool:
    """fairseq creates --save-dir before it checks anything else.

    A run that fails at once, for example because of a mistyped option, would leave an empty directory
    behind. Here it is removed at the end of the program if this run created it and it is empty. If it
    cannot be created or written to, the run ends in a one-line error that names the option.
    """
    from fairseq import checkpoint_utils

    @in_place_of(checkpoint_utils, "verify_checkpoint_directory")
    def verify_checkpoint_directory(verify, save_dir):
        made = [path for path in _upwards(save_dir) if not os.path.exists(path)]
        if made:
            # Registered first, because parents may be created before the last directory fails.
            atexit.register(_remove_empty, made)
        try:
            verify(save_dir)
        except OSError as error:
            loop = os.path.islink(save_dir) and not os.path.exists(save_dir)
            reason = "a link that leads nowhere" if loop else error.strerror
            raise UsageError(f"--save-dir {save_dir}: no checkpoint can be saved there ({reason})") from error

    return True


def keep_the_best_of_negative_figures() -> bool:
    """``--keep-best-checkpoints`` keeps as many as it says where the figure is negative, too.

    fairseq looks for their files by a pattern without a minus sign. The loss of handwriting is negative.
    """
    from fairseq import checkpoint_utils

    unsigned = r"(\d+\.?\d*)"

    @in_place_of(checkpoint_utils, "checkpoint_paths")
    def checkpoint_paths(inner, path, pattern=r"checkpoint(\d+)\.pt", keep_match=False):
        if pattern.startswith(r"checkpoint\.best_"):
            pattern = pattern.replace(unsigned, unsigned.replace("(", "(-?"))
        return inner(path, pattern, keep_match)

    return True


def _upwards(path: str):
    """Yields the path and all its parent directories except the root."""
    path = os.path.abspath(path)
    while path != os.path.dirname(path):
        yield path
        path = os.path.dirname(path)


def _remove_empty(directories: list[str]) -> None:
    for directory in filter(os.path.isdir, directories):
        try:
            os.rmdir(directory)
        except OSError:
            return


def bound_the_model() -> bool:
    """A configuration of a billion units would fill the memory before any error is reported.

    A model that is built to load a checkpoint may not be much larger than the checkpoint: the limit is four
    numbers per byte of the file, which leaves room for temporary tensors of the initialisation. A model to
    train may not be larger than this machine's memory. Other errors in a checkpoint's configuration end in
    one line as well.
    """
    from fairseq import checkpoint_utils, models, tasks

    @in_place_of(checkpoint_utils, "load_model_ensemble_and_task")
    def load_model_ensemble_and_task(
        load, filenames, arg_overrides=None, task=None, strict=True, suffix="", num_shards=1, state=None
    ):
        if not isinstance(arg_overrides or {}, dict) or not all(
            isinstance(key, str) for key in arg_overrides or ()
        ):
            raise UsageError(
                f"--model-overrides {arg_overrides} is no dictionary such as \"{{'dropout': 0.1}}\""
            )
        files = [
            checkpoint_utils.get_maybe_sharded_checkpoint_filename(name, suffix, shard, num_shards)
            for name in filenames
            for shard in range(num_shards)
        ]
        sizes = [os.path.getsize(file) for file in files if os.path.isfile(file)]
        names = ":".join(map(str, filenames))
        refusal = f"checkpoint {names}: its configuration asks for a model far larger than its weights"
        with allowance(4 * sum(sizes) + (1 << 24), refusal):
            try:
                return load(filenames, arg_overrides, task, strict, suffix, num_shards, state)
            except RuntimeError as error:
                text = str(error)
                if text.startswith("Error(s) in loading state_dict"):
                    detail = text.splitlines()[1].strip()
                    raise UsageError(f"checkpoint {names} does not fit its model: {detail[:200]}") from error
                if text.startswith("Neither args nor cfg"):
                    raise UsageError(f"checkpoint {names} holds no configuration of its model") from error
                raise

    @in_place_of(models, "build_model")
    def build_model(build, cfg, task, from_checkpoint=False):
        names = [name for name, kind in tasks.TASK_REGISTRY.items() if kind is type(task)]
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        require_known("model", name, {*models.MODEL_REGISTRY, *models.ARCH_MODEL_REGISTRY})
        check_combination(names[0] if names else None, name)
        check({f"model.{option}": value for option, value in _items(cfg)})
        if from_checkpoint:
            return build(cfg, task, from_checkpoint)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        refusal = f"the model takes more than the {memory >> 30} GB of memory that this machine has"
        with allowance(memory // 4, refusal):
            return build(cfg, task, from_checkpoint)

    @in_place_of(models.BaseFairseqModel, "load_state_dict")
    def load_state_dict(fill, self, state_dict, *args, **kwargs):
        for name, weight in self.state_dict().items():
            given = state_dict.get(name, weight)
            # PyTorch would convert them silently.
            if given.is_floating_point() != weight.is_floating_point():
                raise UsageError(
                    f"the checkpoint's {name} is of {given.dtype}, the model's of {weight.dtype}"
                )
        return fill(self, state_dict, *args, **kwargs)

    return True


def _items(cfg) -> dict:
    """Returns the options of a model, which fairseq stores in OmegaConf containers or in a namespace."""
    values = OmegaConf.to_container(cfg, resolve=False) if OmegaConf.is_config(cfg) else vars(cfg)
    return values.items()
