"""Starts training alone in its directory, and from the newest checkpoint that can be read."""

import atexit
import copy
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from rhhn_fairseq.compat import trains_ours
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock

logger = logging.getLogger("rhhn_fairseq.compat")

LOCK = ".training.lock"
# fairseq's default for --restore-file: the newest checkpoint of --save-dir, if there is one.
LATEST = "checkpoint_last.pt"


HELD = ExitStack()
"""The lock of a training, until the program ends."""
# Under Hydra `call_main`, which releases it, is already running when it is replaced.
atexit.register(HELD.close)


def train_alone(cfg) -> None:
    """Two runs with one --save-dir overwrite each other's checkpoints, and fairseq does not check for that.

    Rank 0 holds a lock on the directory from before it reads the first checkpoint until the program ends.
    Training with --no-save takes no lock, nor do programs that only read checkpoints.
    """
    directory = Path(cfg.save_dir)
    refusal = f"--save-dir {directory}: is in use by another training; wait for it, or choose another one"
    if not cfg.no_save and HELD.enter_context(lock(directory / LOCK, refusal)):
        # These are left over from a run that was killed while it saved.
        for left in directory.glob(".checkpoint*.pt.*.tmp"):
            left.unlink(missing_ok=True)


def make_event_directory(path: str | None) -> None:
    """Makes the directory of TensorBoard's files, which fairseq would only need at the first validation.

    Raises:
        UsageError: it cannot be made or written to.
    """
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--tensorboard-logdir {path}: cannot be made ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"--tensorboard-logdir {path}: cannot be written to")


def require_named_checkpoint(cfg, trainer) -> None:
    """With a mistyped --restore-file fairseq trains from scratch: it only logs that nothing was found.

    That is right for the default, the newest checkpoint of --save-dir, but wrong for a file that the
    user named. A model of this package needs the file; fairseq's own are trained as fairseq does.
    """
    from fairseq.file_io import PathManager

    suffix = f"{trainer.checkpoint_suffix}.pt"
    named = {}
    if cfg.restore_file != LATEST:
        named["--restore-file"] = cfg.restore_file.replace(".pt", suffix)
    elif not os.path.exists(os.path.join(cfg.save_dir, LATEST.replace(".pt", suffix))):
        # These two apply only if there is no newest checkpoint; the first takes precedence.
        if getattr(cfg, "continue_once", None) is not None:
            named["--continue-once"] = cfg.continue_once
        elif cfg.finetune_from_model is not None:
            named["--finetune-from-model"] = cfg.finetune_from_model
    for option, path in named.items() if trains_ours(trainer) else ():
        if not PathManager.isfile(path):
            raise UsageError(f"{option} {path}: there is no such checkpoint file")


def with_a_good_checkpoint(cfg, trainer):
    """Returns the options with the checkpoint to start from.

    With a damaged checkpoint_last.pt every restart fails; without one fairseq trains from scratch. If the
    directory has other checkpoints, a damaged last one is replaced by the newest good one, with a
    warning. If the last one is missing, the run ends in a one-line error that says which --restore-file to
    give: the file may have been removed in order to train anew, for which another --save-dir serves. For
    models of this package only.
    """
    suffix = trainer.checkpoint_suffix
    sharded = suffix != (trainer.cfg.checkpoint.checkpoint_suffix or "")
    if cfg.restore_file == LATEST and not sharded and trains_ours(trainer):
        decision = decided_by_rank_0(trainer, lambda: replacement(cfg, suffix))
        if decision is not None:
            cfg = copy.copy(cfg)
            cfg.restore_file, cfg.finetune_from_model = decision, None
    return cfg


def decided_by_rank_0(trainer, decide: Callable):
    """Returns on every worker what ``decide`` returns on rank 0, and raises its UsageError on all of them."""
    from fairseq.distributed import utils

    outcome = None
    if trainer.data_parallel_rank == 0:
        try:
            outcome = decide(), None
        except UsageError as error:
            outcome = None, str(error)
    if trainer.data_parallel_world_size > 1:
        group = trainer.data_parallel_process_group
        outcome = utils.broadcast_object(outcome, src_rank=0, group=group, dist_device=trainer.device)
    value, refusal = outcome
    if refusal is not None:
        raise UsageError(refusal)
    return value


def replacement(cfg, suffix: str) -> str | None:
    """Returns the --restore-file to use in place of the last checkpoint; None to start as fairseq does.

    Args:
        cfg: fairseq's checkpoint options. suffix: of the checkpoints' names, before ".pt".

    Raises:
        UsageError: the last checkpoint is a directory, or missing beside others.
    """
    last = Path(cfg.save_dir) / f"checkpoint_last{suffix}.pt"
    if last.is_dir():
        raise UsageError(
            f"{last}: is a directory, in whose place no checkpoint can be saved; remove it or choose another "
            f"--save-dir{_hint(last.parent, suffix)}"
        )
    if not os.path.lexists(last):
        asked = cfg.finetune_from_model or getattr(cfg, "continue_once", None)
        hint = "" if asked else _hint(last.parent, suffix)
        if hint:
            raise UsageError(f"{last}: is missing beside other checkpoints; choose another --save-dir{hint}")
        return None
    reason = damage(last)
    newest = newest_good(last.parent, suffix) if reason else None
    if newest is None:
        return None
    logger.warning("%s %s: going on from %s, the newest good checkpoint beside it", last, reason, newest)
    # fairseq adds the suffix itself.
    return str(newest.with_name(f"{newest.name.removesuffix(f'{suffix}.pt')}.pt"))


def _hint(directory: Path, suffix: str) -> str:
    newest = newest_good(directory, suffix)
    return "" if newest is None else f", or go on from the newest good one with --restore-file {newest}"


def newest_good(directory: Path, suffix: str) -> Path | None:
    """Returns the intact checkpoint with the most updates among fairseq's file names, or None."""
    pattern = re.compile(rf"checkpoint(\d+|_\d+_\d+|_best|\.best_.+){re.escape(suffix)}\.pt")
    present = (path for path in directory.glob("checkpoint*.pt") if pattern.fullmatch(path.name))
    updates = {path: _updates(path) for path in present}
    known = [path for path, number in updates.items() if number is not None]
    for path in sorted(known, key=lambda path: (updates[path], path.stat().st_mtime), reverse=True):
        if damage(path) is None:
            return path
    return None


def _updates(path: Path) -> int | None:
    """Returns after how many updates a checkpoint was saved, without loading its tensors; None if damaged."""
    try:
        state = _open(path)
        return int(state["optimizer_history"][-1]["num_updates"])
    # The unpickler fails on damaged bytes with any exception.
    except Exception:
        return None


def damage(path: Path) -> str | None:
    """Reads all of a checkpoint and returns what is damaged; None if nothing is, or if it is not readable.

    A file without permission, or one with classes that may not be loaded, is refused when it is loaded.
    """
    try:
        if path.stat().st_size == 0:
            return "is empty"
        if spoilt := _wrong_checksum(path):
            return f"is damaged (the checksum of {spoilt} is wrong)"
        state = _open(path)
    except OSError:
        return None
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            return None
        return f"is damaged or cut short ({type(error).__name__})"
    return None if isinstance(state, dict) and "model" in state else "holds no model"


def _open(path: Path):
    """Loads a checkpoint; its tensors stay on disk unless PyTorch older than 1.6 wrote it."""
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def _wrong_checksum(path: Path) -> str | None:
    """Returns the first record with a wrong checksum, or None; `torch.load` does not verify checksums."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        # PyTorch does not compress; a file compressed by other means may unpack to any size.
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        return archive.testzip() if stored else None
