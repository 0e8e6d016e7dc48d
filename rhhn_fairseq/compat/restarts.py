"""Training that is killed and restarted loses neither its last checkpoint nor any sentences."""

import functools
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from weakref import WeakSet

from omegaconf import OmegaConf

from rhhn_fairseq.compat import averages, in_place_of, mentions, training_loops
from rhhn_fairseq.compat.saving import replaced_checkpoint
from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.compat")

# The options that decide which sentences are in which batch of an epoch.
BATCHING = (
    "dataset.max_tokens",
    "dataset.batch_size",
    "dataset.required_batch_size_multiple",
    "task.tokens_per_sample",
    "task.sample_break_mode",
    "task.max_source_positions",
    "task.max_target_positions",
    "common.seed",
)

# What torch's ReduceLROnPlateau counts.
PLATEAU_COUNTS = ("num_bad_epochs", "cooldown_counter")


def copy_completely() -> bool:
    """A worker that is killed while it saves must not leave a damaged checkpoint_last.pt.

    fairseq writes a checkpoint to a temporary file and renames it, but only under one of its names, such as
    checkpoint_1_500.pt. It then copies that file to the other names, and checkpoint_last.pt, from which
    every restart resumes, is always the last of these. If that copy is cut short, all restarts fail. Here
    a copy that replaces a file is also written to a temporary file and renamed.
    """
    from fairseq.file_io import PathManager

    inner = PathManager.copy
    if mentions(inner, "replaced_checkpoint"):
        return False

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if not (overwrite and PathManager.supports_rename(dst_path)):
            return inner(src_path, dst_path, overwrite)
        with open(src_path, "rb") as source, replaced_checkpoint(dst_path) as file:
            shutil.copyfileobj(source, file)
        return True

    PathManager.copy = staticmethod(copy)
    return True


def batch_alike_in_every_start() -> bool:
    """A run that is restarted in mid-epoch must continue with the batches that it has not seen.

    fairseq groups sentences into batches once per start, with random numbers of the epoch in which it
    starts, and keeps these batches for the following epochs. A restart in another epoch grouped them
    differently: in that epoch some sentences were seen twice and others never. Here batches that are kept
    are always those of epoch 1. Their order is still drawn anew for every epoch.
    """
    from fairseq.tasks import FairseqTask

    @in_place_of(FairseqTask, "get_batch_iterator")
    def get_batch_iterator(inner, self, dataset, *args, epoch=1, **options):
        kept = not (options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr"))
        if not kept or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
            return inner(self, dataset, *args, epoch=epoch, **options)
        iterator = inner(self, dataset, *args, epoch=1, **options)
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator

    return True


@dataclass(frozen=True)
class Loaded:
    """What ``Trainer.load_checkpoint`` was asked for, and what it has read.

    Attributes:
        filename: of the checkpoint. state: its ``extra_state``, None if there is no such file.
        optimizer, schedule, meters: whether these are the checkpoint's; otherwise they begin anew.
    """

    filename: str
    state: dict | None
    optimizer: bool
    schedule: bool
    meters: bool


def resume() -> bool:
    """``Trainer.load_checkpoint`` restores less than a training has; the steps below restore the rest."""
    from fairseq.trainer import Trainer

    @in_place_of(Trainer, "load_checkpoint")
    def load_checkpoint(
        load,
        self,
        filename,
        reset_optimizer=False,
        reset_lr_scheduler=False,
        *args,
        reset_meters=False,
        **kwargs,
    ):
        with averages.begun_with_the_checkpoint(self):
            options = (reset_optimizer, reset_lr_scheduler, *args)
            state = load(self, filename, *options, reset_meters=reset_meters, **kwargs)
        loaded = Loaded(filename, state, not reset_optimizer, not reset_lr_scheduler, not reset_meters)
        if state is not None:
            check_direction(self, loaded)
            count_batches_of_all_workers(self, loaded)
        continue_patience(loaded)
        if state is not None:
            continue_clock(self, loaded)
            continue_without_optimizer(self, loaded)
            # After continue_without_optimizer, which loads the schedule's state.
            continue_plateau(self, loaded)
        return state

    return True


def check_direction(trainer, loaded: Loaded) -> None:
    """A character model is fine-tuned in its reading direction only.

    fairseq shows a task its state in a checkpoint only where the epoch goes on, not with
    ``--finetune-from-model`` or ``--reset-dataloader``. Here the task checks the direction of each.
    """
    if hasattr(trainer.task, "check_direction"):
        trainer.task.check_direction(loaded.state.get(type(trainer.task).__name__) or {})


def count_batches_of_all_workers(trainer, loaded: Loaded) -> None:
    """A run that resumes in mid-epoch with another number of workers must resume at the same batch.

    fairseq saves how many batches each worker has read and uses that number for each worker of the new run,
    however many there are. Two workers that have read 20 batches each are at batch 40; a single worker would
    resume at batch 20. Here the number is converted. The checkpoint's configuration says how many workers
    saved it (``remember_batches``), so older checkpoints work too. It also says how its batches were made:
    among other batches, the number would skip sentences and repeat others, which is refused.
    """
    position = loaded.state.get("train_iterator", {})
    before, now = position.get("workers"), trainer.data_parallel_world_size
    if before is None or not position.get("iterations_in_epoch"):
        return
    cfg = trainer.cfg
    if not cfg.checkpoint.reset_dataloader and loaded.filename != cfg.checkpoint.finetune_from_model:
        _require_same_batches(loaded.filename, position["batching"], cfg)
    if before != now and cfg.dataset.grouped_shuffling and not cfg.checkpoint.reset_dataloader:
        raise UsageError(
            f"checkpoint {loaded.filename} was saved in mid-epoch by {before} worker(s), this run has {now}: "
            "--grouped-shuffling orders batches by the number of workers; resume with as many, or give "
            "--reset-dataloader to begin again at epoch 1"
        )
    frequencies = cfg.optimization.update_freq
    frequency = frequencies[min(position["epoch"], len(frequencies)) - 1]
    seen = position["iterations_in_epoch"] * before
    position["iterations_in_epoch"], again = position_of_worker(seen, now, frequency)
    if again:
        logger.warning(
            "%s was saved after batch %d of an epoch, within an update of this run's %d worker(s) "
            "with --update-freq %d: the last %d batches are trained on again",
            loaded.filename,
            seen,
            now,
            frequency,
            again,
        )


def remember_batches(state: dict) -> None:
    """Writes beside a checkpoint's position how many workers it counts, and how its batches were made.

    Only rank 0 reads the file; the other ranks receive what it sends.
    """
    cfg = state.get("cfg")
    if OmegaConf.is_config(cfg) and "train_iterator" in state.get("extra_state", {}):
        position = state["extra_state"]["train_iterator"]
        position["workers"] = OmegaConf.select(cfg, "distributed_training.distributed_world_size")
        position["batching"] = {key: OmegaConf.select(cfg, key) for key in BATCHING}


def _require_same_batches(filename: str, batching: dict, cfg) -> None:
    """Raises UsageError if a checkpoint of the middle of an epoch was saved among other batches."""
    for key, before in batching.items():
        now = OmegaConf.select(cfg, key)
        if before != now:
            option = f"--{key.partition('.')[2].replace('_', '-')}"
            raise UsageError(
                f"checkpoint {filename} was saved in mid-epoch with {option} {before}, this run has {now}: "
                "sentences would be skipped and others repeated; resume with the same, or give "
                "--reset-dataloader to begin again at epoch 1"
            )


def continue_patience(loaded: Loaded) -> None:
    """A training that is restarted must end after as many validations without improvement as any other.

    fairseq counts them for ``--patience`` on a function of its program and does not save the count, so a
    training that is restarted often enough never ends. A second training of one process, as in a sweep of
    fairseq-hydra-train, begins with the count and the best score of the first. Here the count is saved in
    checkpoints (``count_of_patience``), and every training begins with what its checkpoint has.
    """
    from fairseq import checkpoint_utils

    # fairseq restores the best score of a checkpoint after this, under the same condition.
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    if early_stop := _early_stop():
        for name in ("best", "num_runs"):
            vars(early_stop).pop(name, None)
        if loaded.state is not None and loaded.optimizer and loaded.meters:
            vars(early_stop).update(loaded.state.get("early_stop", {}))


def count_of_patience() -> dict:
    """Returns what a checkpoint holds of the count of ``--patience``; {} before the first validation."""
    counts = vars(early_stop) if (early_stop := _early_stop()) else {}
    if not {"best", "num_runs"} <= counts.keys():
        return {}
    return {"early_stop": {"best": float(counts["best"]), "num_runs": counts["num_runs"]}}


def _early_stop() -> Callable | None:
    """Returns the function of the running program that counts validations; None in other programs."""
    return next((names["should_stop_early"] for names in training_loops()), None)


def continue_clock(trainer, loaded: Loaded) -> None:
    """The elapsed time of a training that is restarted goes on, in the log and for ``--stop-time-hours``.

    fairseq logs ``wall`` as 0 after a restart, since the stopwatch that it loads does not run. With
    ``--finetune-from-model`` it counts the hours of the other training for ``--stop-time-hours``. Here both
    go on from the checkpoint's time, and begin at 0 where the meters do.
    """
    from fairseq.logging import metrics
    from fairseq.logging.meters import StopwatchMeter

    if not loaded.meters:
        trainer._previous_training_time = 0
    elif isinstance(meter := metrics.get_meter("default", "wall"), StopwatchMeter):
        # Of several workers, the time is a tensor.
        meter.start_time = time.perf_counter() - float(trainer._previous_training_time)


def continue_without_optimizer(trainer, loaded: Loaded) -> None:
    """A checkpoint without the optimizer's state must not set the number of updates to 0.

    ``--no-save-optimizer-state`` leaves that state out. From such a checkpoint fairseq counts updates from 0,
    so a training that is restarted often never ends. Here the number and the schedule go on, and a warning
    says that the optimizer begins anew.
    """
    last = trainer._optim_history[-1] if trainer._optim_history else {}
    if loaded.optimizer and trainer.get_num_updates() == 0 < last.get("num_updates", 0):
        if loaded.schedule:
            trainer.lr_scheduler.load_state_dict(last["lr_scheduler_state"])
        trainer.set_num_updates(last["num_updates"])
        logger.warning("%s has no state of the optimizer, which begins anew", loaded.filename)


def continue_plateau(trainer, loaded: Loaded) -> None:
    """``reduce_lr_on_plateau`` has not seen the figure of an epoch at whose end it was saved."""
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule as Schedule

    if isinstance(trainer.lr_scheduler, Schedule) and loaded.state and loaded.schedule:
        position, loss = loaded.state["train_iterator"], loaded.state.get("val_loss")
        if loss is not None and not position.get("iterations_in_epoch"):
            trainer.lr_scheduler.step(position["epoch"] - 1, loss)


def save_plateaus() -> bool:
    """``reduce_lr_on_plateau`` must lower the rate of a training that is restarted when it would any other's.

    fairseq saves the best figure in its checkpoints, but not how many validations have not reached it. It
    saves the checkpoint of an epoch before the schedule sees the epoch's figure (``continue_plateau``). The
    rate belongs to the optimizer's state, which ``--no-save-optimizer-state`` leaves out.
    """
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule as Schedule

    @in_place_of(Schedule, "state_dict")
    def save_counts(state_dict, self):
        counts = {name: getattr(self.lr_scheduler, name) for name in PLATEAU_COUNTS}
        return state_dict(self) | counts | {"lr": self.optimizer.get_lr()}

    @in_place_of(Schedule, "load_state_dict")
    def load_counts(load_state_dict, self, state):
        if "best" not in state:
            raise UsageError(
                "--lr-scheduler reduce_lr_on_plateau: the checkpoint is of another schedule; "
                "give --reset-lr-scheduler to begin this one"
            )
        load_state_dict(self, state)
        for name in PLATEAU_COUNTS:
            setattr(self.lr_scheduler, name, state.get(name, 0))
        if "lr" in state:
            self.optimizer.set_lr(state["lr"])

    return True


COMPLETE = WeakSet()
"""The trainers that have no update to make."""


def end_where_complete(trainer, extra_state: dict | None, epochs) -> None:
    """A run without an update to make ends at once, with an error if it is new, a warning if it resumes.

    In fairseq a new run that cannot make one update ends with status 0. A run that resumes where
    ``--max-update``, ``--stop-time-hours`` or ``--patience`` ended it trains on, for one update or up to the
    next validation, and replaces the checkpoints. Here it ends.

    A validation that a signal interrupted is made up for. Without it, `checkpoint_best.pt`, ``--patience``
    and ``reduce_lr_on_plateau`` would miss its figure.
    """
    if (reason := _why_complete(trainer, epochs)) is not None:
        if trainer.get_num_updates() == 0:
            raise UsageError(f"there is nothing to train: {reason}")
        logger.warning("training is complete at update %d: %s", trainer.get_num_updates(), reason)
        COMPLETE.add(trainer)
    resumes = extra_state is not None and not trainer.cfg.checkpoint.reset_dataloader
    unvalidated = resumes and extra_state.get("val_loss") is None
    missing = unvalidated and _validation_due(trainer, epochs, ends=reason is not None)
    if missing and _make_up_for_validation(trainer, epochs, extra_state["train_iterator"]):
        COMPLETE.add(trainer)
    for names in training_loops():
        if not hasattr(names["train"], "ends"):
            names["train"] = _ending(names["train"])


def _ending(train):
    """Returns fairseq's function for an epoch; for a trainer that is complete it only ends the loop."""

    @functools.wraps(train)
    def end_or_train(cfg, trainer, task, epoch_itr):
        return ([None], True) if trainer in COMPLETE else train(cfg, trainer, task, epoch_itr)

    end_or_train.ends = True
    return end_or_train


def _why_complete(trainer, epochs) -> str | None:
    """Returns what leaves a training that starts or resumes no update to make; None if there is one."""
    limits, patience = trainer.cfg.optimization, trainer.cfg.checkpoint.patience
    # From the checkpoint, which all workers share; each has a clock of its own.
    hours = trainer._previous_training_time / 3600
    reasons = {
        f"--max-epoch {limits.max_epoch}": 0 < limits.max_epoch < epochs.next_epoch_idx,
        f"--max-update {limits.max_update}": 0 < limits.max_update <= trainer.get_num_updates(),
        f"--stop-time-hours {limits.stop_time_hours:g}": 0 < limits.stop_time_hours < hours,
        f"--patience {patience}": 0 < patience <= getattr(_early_stop(), "num_runs", 0),
        f"--stop-min-lr {limits.stop_min_lr:g} and --lr {trainer.get_lr():g}": (
            trainer.get_lr() <= limits.stop_min_lr
        ),
        "no batches in the training data": len(epochs) == 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _validation_due(trainer, epochs, ends: bool) -> bool:
    """Returns whether fairseq validates after the last update that a checkpoint has.

    ends: whether that update is the last of the training.
    """
    data, limits, updates = trainer.cfg.dataset, trainer.cfg.optimization, trainer.get_num_updates()
    if data.disable_validation or updates < max(data.validate_after_updates, 1):
        return False
    if 0 < data.validate_interval_updates and updates % data.validate_interval_updates == 0:
        return True
    if epochs.iterations_in_epoch:
        interval = trainer.cfg.checkpoint.save_interval_updates
        return ends or (0 < interval and updates % interval == 0)
    last_epoch = epochs.next_epoch_idx - 1
    if ends and not 0 < limits.max_epoch <= last_epoch:
        return True
    return 0 < last_epoch and last_epoch % data.validate_interval == 0


def _make_up_for_validation(trainer, epochs, position: dict) -> bool:
    """Validates, saves and adapts the learning rate as fairseq does after an update.

    Returns whether ``--patience`` ends the training here. position: that of the checkpoint's iterator.
    """
    from fairseq import checkpoint_utils

    cfg, loop = trainer.cfg, next(training_loops(), None)
    if loop is None:
        return False
    logger.info("the validation after update %d is missing; it runs now", trainer.get_num_updates())
    within = epochs.iterations_in_epoch > 0
    epoch = epochs.next_epoch_idx if within else epochs.next_epoch_idx - 1
    subsets = cfg.dataset.valid_subset.split(",")
    loss = loop["validate"](cfg, trainer, trainer.task, SimpleNamespace(epoch=epoch), subsets)[0]
    ends = loop["should_stop_early"](cfg, loss)
    # A checkpoint says where training is; an iterator that has not begun its epoch does not know.
    epochs.next_epoch_itr(
        fix_batches_to_gpus=cfg.distributed_training.fix_batches_to_gpus,
        shuffle=epochs.next_epoch_idx > cfg.dataset.curriculum,
    )
    checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epochs, loss)
    if within:
        # Otherwise training would begin the epoch again.
        epochs.load_state_dict(position)
    else:
        trainer.lr_step(epoch, loss)
    return ends


def position_of_worker(seen: int, workers: int, frequency: int) -> tuple[int, int]:
    """Returns where each worker resumes after ``seen`` batches of an epoch, and how many of these repeat.

    Each update takes ``frequency`` batches from each of ``workers``, and workers resume between updates.
    """
    updates, again = divmod(seen, workers * frequency)
    return updates * frequency, again
