"""How a program of fairseq runs, from its command line on; training starts alone, from a good checkpoint."""

import atexit
import copy
import logging
import os
import pickle
import re
import sys
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path

import torch

from rhhn_fairseq.compat import (
    command_line,
    data,
    distribute,
    errors,
    in_place_of,
    logs,
    ranges,
    recipes,
    resume,
    stopping,
    trains_ours,
)
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock
from rhhn_fairseq.ops.memory import keep_freed_memory, limit_product_caches

logger = logging.getLogger("rhhn_fairseq.compat")

PACKAGE = __name__.split(".")[0]
LOCK = ".training.lock"
# fairseq's default for --restore-file: the newest checkpoint of --save-dir, if there is one.
LATEST = "checkpoint_last.pt"

HELD = ExitStack()
"""The lock of a training, until the program ends."""
# Under Hydra `call_main`, which releases it, is already running when it is replaced.
atexit.register(HELD.close)


@in_place_of("fairseq.utils:import_user_module")
def import_user_module(inner, args):
    """fairseq compares user directories as strings: a link to this package is "not globally unique".

    So is the `site-packages/fairseq/../rhhn_fairseq` that it makes of `--user-dir rhhn_fairseq` if the
    package is installed. Here the resolved paths are compared. The plugin is already loaded, so there is
    nothing to import. Another copy of the package cannot be loaded beside the first.
    """
    user_dir = getattr(args, "user_dir", None)
    if user_dir is None:
        return
    fairseq = os.path.dirname(sys.modules["fairseq.utils"].__file__)
    places = [os.path.abspath(user_dir), *(os.path.join(fairseq, up, user_dir) for up in ("", ".."))]
    imported = os.path.realpath(sys.modules[PACKAGE].__path__[0])
    found = next(filter(os.path.isdir, places), imported if user_dir == PACKAGE else None)
    if found is None:
        raise UsageError(f"--user-dir {user_dir}: there is no directory {places[0]}")
    path = os.path.realpath(found)
    if os.path.basename(path) != PACKAGE:
        inner(args)
    elif path != imported:
        raise UsageError(
            f"--user-dir {path} is another copy of {PACKAGE} than the one already imported "
            f"from {imported}: name that one, or run Python where it does not find it first"
        )


def keep_memory_of_programs() -> None:
    """Training that frees hundreds of megabytes at every update can spend a third of its time on that.

    See ``rhhn_fairseq.ops.memory``. Notebooks and other programs are not affected.
    """
    if "fairseq_cli" in sys.modules:
        limit_product_caches()
        keep_freed_memory()


@in_place_of("fairseq.options:parse_args_and_arch")
def parse_args_and_arch(inner, parser, input_args=None, parse_known=False, **options):
    """fairseq's own defaults are tuned to no model, and it checks few options."""
    if options.get("suppress_defaults"):
        # fairseq calls this function again, with all defaults.
        return inner(parser, input_args, parse_known, **options)
    defaults = command_line.Defaults(parser, input_args, options.get("modify_parser"))
    parsed = inner(parser, input_args, parse_known, modify_parser=defaults)
    defaults.check(parsed[0] if parse_known else parsed)
    return parsed


@in_place_of("fairseq.dataclass.initialize:hydra_init")
def hydra_init(inner, cfg_name="config"):
    """fairseq falls back to its defaults for a --config-name that is mistyped, and trains without it."""
    recipes.check_config_name(cfg_name)
    inner(cfg_name)


@in_place_of("fairseq.dataclass.initialize:add_defaults")
def add_defaults(inner, cfg):
    """``fairseq-hydra-train model._name=NAME`` gets its defaults from the recipe of the architecture.

    fairseq completes a configuration here, after the user's modules are imported. ``fairseq_cli.train`` calls
    it too, after it has parsed a command line; then nothing is filled in.
    """
    keys = recipes.keys_of_the_user()
    if keys is None:
        return inner(cfg)
    recipes.fill_tree(cfg, keys)
    recipes.separate_jobs(cfg)
    inner(cfg)
    ranges.check_configuration(cfg)
    distribute.join_late(cfg)


@in_place_of("fairseq.distributed.utils:call_main")
def call_main(inner, cfg, main, **kwargs):
    """fairseq's workers train apart on the CPU, take a GPU with --cpu, and leave threads behind."""
    distribute.train_bf16_without_tpu(cfg)
    with data.readers_ended(), distribute.off_gpu(cfg), distribute.joined(cfg, main):
        try:
            return inner(cfg, main, **kwargs)
        finally:
            stopping.REQUEST.listen_no_more()
            HELD.close()


@in_place_of("fairseq.checkpoint_utils:load_checkpoint")
def load_checkpoint(load, cfg, trainer, **kwargs):
    """Trainings overwrite each other's checkpoints, a damaged one ends all restarts, signals lose work."""
    require_named_checkpoint(cfg, trainer)
    stopping.listen(trainer)
    distribute.decided_by_rank_0(trainer, lambda: train_alone(cfg))
    cfg = with_a_good_checkpoint(cfg, trainer)
    extra_state, epochs = load(cfg, trainer, **kwargs)
    trainer.last_update = logs.last_update(trainer, epochs)
    trainer.updates_of_an_epoch = -(-len(epochs) // trainer.cfg.optimization.update_freq[0])
    resume.end_where_complete(trainer, extra_state, epochs)
    trainer.started = time.perf_counter()
    return extra_state, epochs


@in_place_of("fairseq.trainer:NanDetector")
def detect_nan(inner, model):
    """fairseq's hooks on the backward pass, which fused cells refuse, hide a NaN behind another error."""
    return inner(model, backward=False)


@in_place_of("fairseq.trainer:Trainer.valid_step")
def valid_step(inner, self, sample, raise_oom=False):
    """A validation may take longer than what sends the signal waits, see ``stopping.listen``."""
    result = inner(self, sample, raise_oom)
    # Where memory runs out, fairseq calls it once more from within; the workers count one step.
    if not raise_oom:
        stopping.end_if_agreed(self)
    return result


@in_place_of("fairseq.trainer:Trainer._reduce_and_log_stats")
def reduce_and_log_stats(reduce, self, *args, **kwargs):
    """A training whose loss is absurd trains on; here it ends. The first update is summed up in a line."""
    figures = reduce(self, *args, **kwargs)
    errors.require_learning(self, figures)
    logs.sum_up_the_start(self, figures)
    logs.log_time_left(self)
    return figures


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


def require_named_checkpoint(cfg, trainer) -> None:
    """With a mistyped --restore-file fairseq trains from scratch: it only logs that nothing was found.

    That is right for the default, the newest checkpoint of --save-dir, but wrong for a file that the
    user named. A model of this package needs the file; fairseq's own are trained as fairseq does.
    """
    from fairseq.file_io import PathManager

    suffix = f"{trainer.checkpoint_suffix}.pt"
    option, path = "--restore-file", cfg.restore_file.replace(".pt", suffix)
    if cfg.restore_file == LATEST:
        # These two apply only if there is no newest checkpoint; the first takes precedence.
        option, path = "--finetune-from-model", cfg.finetune_from_model
        if getattr(cfg, "continue_once", None) is not None:
            option, path = "--continue-once", cfg.continue_once
        if os.path.exists(os.path.join(cfg.save_dir, LATEST.replace(".pt", suffix))):
            path = None
    if path is not None and trains_ours(trainer) and not PathManager.isfile(path):
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
        decision = distribute.decided_by_rank_0(trainer, lambda: replacement(cfg, suffix))
        if decision is not None:
            cfg = copy.copy(cfg)
            cfg.restore_file, cfg.finetune_from_model = decision, None
    return cfg


def replacement(cfg, suffix: str) -> str | None:
    """Returns the --restore-file to use in place of the last checkpoint; None to start as fairseq does.

    Args:
        cfg: fairseq's checkpoint options. suffix: of the checkpoints' names, before ".pt".

    Raises:
        UsageError: the last checkpoint is missing beside others.
    """
    last = Path(cfg.save_dir) / f"checkpoint_last{suffix}.pt"
    if not last.is_file():
        asked = cfg.finetune_from_model or getattr(cfg, "continue_once", None)
        newest = None if asked else newest_good(last.parent, suffix)
        if newest is not None:
            raise UsageError(
                f"{last}: is missing beside other checkpoints; choose another --save-dir, or go on from the "
                f"newest good one with --restore-file {newest}"
            )
        return None
    _, reason = examined(last)
    newest = newest_good(last.parent, suffix) if reason else None
    if newest is None:
        return None
    logger.warning("%s %s: going on from %s, the newest good checkpoint beside it", last, reason, newest)
    # fairseq adds the suffix itself.
    return str(newest.with_name(f"{newest.name.removesuffix(f'{suffix}.pt')}.pt"))


def newest_good(directory: Path, suffix: str) -> Path | None:
    """Returns the newest intact checkpoint among fairseq's file names, see ``examined``, or None."""
    pattern = re.compile(rf"checkpoint(\d+|_\d+_\d+|_best|\.best_.+){re.escape(suffix)}\.pt")
    found = {}
    for path in directory.glob("checkpoint*.pt"):
        age, reason = examined(path) if pattern.fullmatch(path.name) else (None, None)
        if age is not None and reason is None:
            found[age, path.stat().st_mtime] = path
    return found[max(found)] if found else None


def examined(path: Path) -> tuple[tuple[int, int] | None, str | None]:
    """Returns the age of a checkpoint, and what is damaged; reads all of it.

    The age is how often its training was started and then its updates, which --reset-optimizer begins anew.

    A file without permission, or one with classes that may not be loaded, is refused when it is loaded.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # PyTorch does not compress; a file compressed by other means may unpack to any size.
                # `torch.load` does not verify checksums.
                stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
                if stored and (spoilt := archive.testzip()):
                    return None, f"is damaged (the checksum of {spoilt} is wrong)"
        # Its tensors stay on disk unless PyTorch older than 1.6 wrote it.
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except OSError:
        return None, None
    # The unpickler fails on damaged bytes with any exception.
    except Exception as error:
        refused = isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error)
        return None, None if refused else f"is damaged or cut short ({type(error).__name__})"
    if not (isinstance(state, dict) and "model" in state):
        return None, "holds no model"
    history = state.get("optimizer_history") or [{}]
    updates = history[-1].get("num_updates")
    return None if updates is None else (len(history), updates), None
