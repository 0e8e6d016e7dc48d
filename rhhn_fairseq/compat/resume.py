"""Training that is killed and restarted loses neither its last checkpoint nor any sentences.

It goes on as if it had not stopped: batches, learning rate, averages, 16-bit weights, counts and the clock.
"""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from weakref import WeakSet

import torch
from omegaconf import OmegaConf

from rhhn_fairseq.compat import in_place_of, training_loops
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
    "task.max_points",
    "common.seed",
)

# What the best figure of a checkpoint is, and whether the largest is the best.
METRIC = ("checkpoint.best_checkpoint_metric", "checkpoint.maximize_best_checkpoint_metric")

# What torch's ReduceLROnPlateau counts.
PLATEAU_COUNTS = ("num_bad_epochs", "cooldown_counter")

# Key of the float32 weights in the optimizer's state.
MASTER = "master_weights"


@in_place_of("fairseq.tasks:FairseqTask.get_batch_iterator")
def get_batch_iterator(inner, self, dataset, *args, epoch=1, **options):
    """A run that is restarted in mid-epoch must continue with the batches that it has not seen.

    fairseq groups sentences into batches once per start, with random numbers of the epoch in which it
    starts, and keeps these batches for the following epochs. A restart in another epoch grouped them
    differently: in that epoch some sentences were seen twice and others never. Here batches that are kept
    are always those of epoch 1. Their order is still drawn anew for every epoch.

    A training split that is also validated has two iterators here: fairseq reads it to its end with the
    training's own, which then leaves out every second epoch. And after ``--curriculum`` epochs the batches
    are shuffled; fairseq keeps their order, and resumes in another.
    """
    kept = not (options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr"))
    if not kept or not self.can_reuse_epoch_itr(dataset):
        return inner(self, dataset, *args, epoch=epoch, **options)
    iterators = self.dataset_to_epoch_iter
    # Of all callers, only the trainer gives this option, and only for the batches of training.
    key = (dataset, "grouped_shuffling" in options)
    if key not in iterators:
        iterators[key] = made = inner(self, dataset, *args, epoch=1, **options)
        made.epoch, build = epoch, made._get_iterator_for_epoch

        def begin(epoch, shuffle, *args, **options):
            if made.dataloader is not None:
                made.epoch_batch_sampler.shuffle = shuffle
            return build(epoch, shuffle, *args, **options)

        made._get_iterator_for_epoch = begin
        del iterators[dataset]
        dataset.set_epoch(iterators.get((dataset, True), iterators[key]).epoch)
    return iterators[key]


@in_place_of("fairseq.trainer:Trainer.load_checkpoint")
def load_checkpoint(
    load, self, filename, reset_optimizer=False, reset_lr_scheduler=False, *args, reset_meters=False, **kwargs
):
    """fairseq restores less than a training has; the steps below restore the rest."""
    AVERAGING[:] = [self] if self.cfg.ema.store_ema else []
    state = load(
        self, filename, reset_optimizer, reset_lr_scheduler, *args, reset_meters=reset_meters, **kwargs
    )
    AVERAGING.clear()
    if state is not None:
        forget_other_metric(self, filename, state)
    continue_patience({} if state is None or reset_optimizer or reset_meters else state)
    if state is None:
        return None
    # A character model is fine-tuned in its reading direction only. fairseq shows a task its state only
    # where the epoch goes on, not with --finetune-from-model or --reset-dataloader.
    if hasattr(self.task, "check_direction"):
        self.task.check_direction(state.get(type(self.task).__name__) or {})
    count_batches_of_all_workers(self, filename, state)
    continue_clock(self, reset_meters)
    if not reset_optimizer:
        continue_without_optimizer(self, filename, reset_lr_scheduler)
        flatten_moments(self)
    # After continue_without_optimizer, which loads the schedule's state.
    continue_plateau(self, state, reset_lr_scheduler)
    return state


def count_batches_of_all_workers(trainer, filename: str, state: dict) -> None:
    """A run that resumes in mid-epoch with another number of workers must resume at the same batch.

    fairseq saves how many batches each worker has read and uses that number for each worker of the new run,
    however many there are. Two workers that have read 20 batches each are at batch 40; a single worker would
    resume at batch 20. Here the number is converted. The checkpoint's configuration says how many workers
    saved it (``remember_batches``), so older checkpoints work too. It also says how its batches were made:
    among other batches, the number would skip sentences and repeat others, which is refused.
    """
    position, cfg = state.get("train_iterator", {}), trainer.cfg
    before, now = position.get("workers"), trainer.data_parallel_world_size
    begins = cfg.checkpoint.reset_dataloader or filename == cfg.checkpoint.finetune_from_model
    if before is None or begins or not position.get("iterations_in_epoch"):
        return
    for key, old in position["batching"].items():
        new, option = OmegaConf.select(cfg, key), f"--{key.partition('.')[2].replace('_', '-')}"
        if old != new:
            raise UsageError(
                f"checkpoint {filename} was saved in mid-epoch with {option} {old}, this run has {new}: "
                "sentences would be skipped and others repeated; resume with the same, or give "
                "--reset-dataloader to begin again at epoch 1"
            )
    if before != now and cfg.dataset.grouped_shuffling:
        raise UsageError(
            f"checkpoint {filename} was saved in mid-epoch by {before} worker(s), this run has {now}: "
            "--grouped-shuffling orders batches by the number of workers; resume with as many, or give "
            "--reset-dataloader to begin again at epoch 1"
        )
    frequencies = cfg.optimization.update_freq
    frequency = frequencies[min(position["epoch"], len(frequencies)) - 1]
    # Each update takes as many batches from each worker, and workers resume between updates.
    updates, again = divmod(position["iterations_in_epoch"] * before, now * frequency)
    position["iterations_in_epoch"] = updates * frequency
    if again:
        what = "%s was saved within an update of this run: its last %d batches are trained on again"
        logger.warning(what, filename, again)


def remember_batches(state: dict) -> None:
    """Writes into a checkpoint what resuming needs of its options: workers, batches, metric.

    Only rank 0 reads the file; the other ranks receive what it sends.
    """
    cfg = state.get("cfg")
    if OmegaConf.is_config(cfg) and "train_iterator" in state.get("extra_state", {}):
        position = state["extra_state"]["train_iterator"]
        position["workers"] = OmegaConf.select(cfg, "distributed_training.distributed_world_size")
        position["batching"] = {key: OmegaConf.select(cfg, key) for key in BATCHING}
        state["extra_state"]["metric"] = [OmegaConf.select(cfg, key) for key in METRIC]


def forget_other_metric(trainer, filename: str, state: dict) -> None:
    """A best figure of another --best-checkpoint-metric must not be compared with this run's figures.

    A loss of 4.4 would be the best perplexity for ever, and checkpoint_best.pt that of the loss.
    """
    now = [OmegaConf.select(trainer.cfg, key) for key in METRIC]
    if state.get("metric", now) != now:
        logger.warning("the best %s in %s is not compared with %s", state["metric"][0], filename, now[0])
        for name in ("best", "early_stop", "val_loss"):
            state.pop(name, None)
        if hasattr(plateau := getattr(trainer.lr_scheduler, "lr_scheduler", None), "mode_worse"):
            plateau.best = plateau.mode_worse


def continue_patience(state: dict) -> None:
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
        vars(early_stop).update(state.get("early_stop", {}))


def count_of_patience() -> dict:
    """Returns what a checkpoint holds of the count of ``--patience``; {} before the first validation."""
    counts = vars(early_stop) if (early_stop := _early_stop()) else {}
    if not {"best", "num_runs"} <= counts.keys():
        return {}
    return {"early_stop": {"best": float(counts["best"]), "num_runs": counts["num_runs"]}}


def _early_stop() -> Callable | None:
    """Returns the function of the running program that counts validations; None in other programs."""
    return next((names["should_stop_early"] for names in training_loops()), None)


def continue_clock(trainer, reset_meters: bool) -> None:
    """The elapsed time of a training that is restarted goes on, in the log and for ``--stop-time-hours``.

    fairseq logs ``wall`` as 0 after a restart, since the stopwatch that it loads does not run. With
    ``--finetune-from-model`` it counts the hours of the other training for ``--stop-time-hours``. Here both
    go on from the checkpoint's time, and begin at 0 where the meters do.
    """
    from fairseq.logging import metrics
    from fairseq.logging.meters import StopwatchMeter

    if reset_meters:
        trainer._previous_training_time = 0
    elif isinstance(meter := metrics.get_meter("default", "wall"), StopwatchMeter):
        # Of several workers, the time is a tensor.
        meter.start_time = time.perf_counter() - float(trainer._previous_training_time)


def continue_without_optimizer(trainer, filename: str, reset_lr_scheduler: bool) -> None:
    """A checkpoint without the optimizer's state must not set the number of updates to 0.

    ``--no-save-optimizer-state`` leaves that state out. From such a checkpoint fairseq counts updates from 0,
    so a training that is restarted often never ends. Here the number and the schedule go on, and a warning
    says that the optimizer begins anew.
    """
    last = trainer._optim_history[-1] if trainer._optim_history else {}
    if trainer.get_num_updates() == 0 < last.get("num_updates", 0):
        if not reset_lr_scheduler:
            trainer.lr_scheduler.load_state_dict(last["lr_scheduler_state"])
        trainer.set_num_updates(last["num_updates"])
        logger.warning("%s has no state of the optimizer, which begins anew", filename)


def flatten_moments(trainer) -> None:
    """The optimizer's state in older checkpoints has the shapes that vectors had, see ``saving.RENAMED``."""
    # fairseq's composite optimizer has none of its own.
    for weight, state in getattr(trainer.optimizer.optimizer, "state", {}).items():
        for name, value in state.items():
            if weight.dim() == 1 < getattr(value, "ndim", 0):
                state[name] = value.flatten()


def continue_plateau(trainer, state: dict, begins: bool) -> None:
    """``reduce_lr_on_plateau`` has not seen the figure of an epoch at whose end it was saved.

    begins: with ``--reset-lr-scheduler``. Other schedules set the rate; this one would keep the stored one.
    """
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule as Schedule

    if not isinstance(trainer.lr_scheduler, Schedule):
        return
    if begins:
        trainer.optimizer.set_lr(trainer.cfg.optimization.lr[0])
        trainer.lr_step_update()
    else:
        position, loss = state["train_iterator"], state.get("val_loss")
        if loss is not None and not position.get("iterations_in_epoch"):
            trainer.lr_scheduler.step(position["epoch"] - 1, loss)


@in_place_of("fairseq.optim.lr_scheduler.reduce_lr_on_plateau:ReduceLROnPlateauLRSchedule.state_dict")
def save_plateau(state_dict, self):
    """``reduce_lr_on_plateau`` must lower the rate of a training that is restarted when it would any other's.

    fairseq saves the best figure in its checkpoints, but not how many validations have not reached it. It
    saves the checkpoint of an epoch before the schedule sees the epoch's figure (``continue_plateau``). The
    rate belongs to the optimizer's state, which ``--no-save-optimizer-state`` leaves out.
    """
    counts = {name: getattr(self.lr_scheduler, name) for name in PLATEAU_COUNTS}
    return state_dict(self) | counts | {"lr": self.optimizer.get_lr()}


@in_place_of("fairseq.optim.lr_scheduler.reduce_lr_on_plateau:ReduceLROnPlateauLRSchedule.load_state_dict")
def load_plateau(load_state_dict, self, state):
    """The counterpart of ``save_plateau``."""
    load_state_dict(self, state)
    if self.lr_scheduler.best is None:
        self.lr_scheduler.best = self.lr_scheduler.mode_worse
    for name in PLATEAU_COUNTS:
        setattr(self.lr_scheduler, name, state.get(name, 0))
    if "lr" in state:
        self.optimizer.set_lr(state["lr"])


COMPLETE = WeakSet()
"""The trainers that have no update to make, whose epochs only end the loop (``stopping.listen``)."""


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


@in_place_of("fairseq.models.ema.ema:EMA.__init__")
def init_average(init, self, model, config, device=None, skip_keys=None):
    """fairseq averages integer buffers too, which fails with "Float can't be cast to Long".

    The symbols of a character model and the fingerprint of a translation model's pieces are such buffers.
    Here they are copied instead; fairseq has a set of names for that. Weights in 16 bits are averaged in
    float32, as with ``--ema-fp32``: a step of the average is too small to change their last digit.
    """
    integers = {key for key, value in model.state_dict().items() if not value.is_floating_point()}
    config.ema_fp32 |= any(parameter.element_size() < 4 for parameter in model.parameters())
    init(self, model, config, device, integers | set(skip_keys or ()))
    for name, first in _first_names(self.model.state_dict()).items():
        if name in self.fp32_params:
            self.fp32_params[name] = self.fp32_params[first]


def _first_names(state: dict) -> dict[str, str]:
    """Returns for every name in a state_dict the first name of the same tensor."""
    first: dict = {}
    places = {name: (each.data_ptr(), each.shape, each.stride()) for name, each in state.items()}
    return {name: first.setdefault(place if place[0] else name, name) for name, place in places.items()}


@in_place_of("fairseq.models.ema.ema:EMA.step")
def step_average(inner, self, new_model, updates=None):
    """``--ema-update-freq N`` averages after every N-th update of a training, however often it is restarted.

    fairseq counts the updates since the last start. It also averages a shared table, which has several names
    in a model, again for each of them: with --share-embeddings all, three times at each update.
    """
    if updates is not None and self.config.ema_update_freq > 1:
        self.update_freq_counter = (updates - 1) % self.config.ema_update_freq
    state = new_model.state_dict()
    once = {name: state[name] for name in _first_names(state).values()}
    return inner(self, SimpleNamespace(state_dict=lambda: once), updates)


AVERAGING: list = []
"""The trainer that loads a checkpoint and keeps an average."""


def add_average(path: str, state: dict) -> None:
    """``--store-ema`` with a checkpoint that holds no average ends in "KeyError: 'model'".

    fairseq then means to begin the average with the checkpoint's weights, but has deleted them by that time.
    This happens when ``--store-ema`` is added to a run that resumes, and with ``--finetune-from-model``.
    Here the weights of a checkpoint that was read stand in for the missing average, and for the average of
    a training that is only the start of this one.
    """
    if not AVERAGING or "model" not in state:
        return
    extra = state.setdefault("extra_state", {})
    if path == AVERAGING[0].cfg.checkpoint.finetune_from_model:
        for name in ("ema", "ema_fp32_params"):
            extra.pop(name, None)
    if "ema" not in extra:
        logger.warning("the average of the weights begins with those of %s", path)
        extra["ema"] = state["model"]


@in_place_of("fairseq.optim.fairseq_optimizer:FairseqOptimizer.load_state_dict")
def load_moments(load, self, state_dict, optimizer_overrides=None):
    """Options given now, such as --weight-decay, must act in a training that is resumed.

    fairseq loads the stored ones in their place. The rate is left to the schedule, and ``lr_old``, the rate
    of the update before, is a state of fairseq's nag.
    """
    names = self.optimizer.defaults.keys() - {"lr", "lr_old"}
    given = [{name: group[name] for name in names & group.keys()} for group in self.param_groups]
    load(self, state_dict)
    for group, options in zip(self.param_groups, given, strict=True):
        group.update(options | (optimizer_overrides or {}))


@in_place_of("fairseq.optim.amp_optimizer:AMPOptimizer.__init__")
def init_amp(init, self, cfg, *args, **kwargs):
    """fairseq unscales gradients through one optimizer object, to clip them, and steps another that wraps it.

    The scaler tracks objects, so it takes the gradients for still scaled and divides them again. Adam cancels
    most of that, except in its eps, and in the running squares when the scale changes. And fairseq takes the
    scale from ``--fp16-init-scale``, and its window from ``--amp-init-scale``.
    """
    init(self, cfg, *args, **kwargs)
    window = {} if cfg.common.amp_scale_window is None else {"growth_interval": cfg.common.amp_scale_window}
    self._grad_scaler = type(self.scaler)(init_scale=cfg.common.amp_init_scale, **window)
    unscale = self.scaler.unscale_
    self.scaler.unscale_ = lambda optimizer: unscale(self.fp32_optimizer)


@in_place_of("fairseq.optim.fp16_optimizer:FP16Optimizer.state_dict")
def save_master_weights(save, self):
    """Under --bf16 and --fp16 the optimizer has float32 copies of the weights, which fairseq does not save.

    A resumed run would start from the rounded weights and lose all that is below their precision.
    """
    return save(self) | {MASTER: [weights.data for weights in _flat_or_not(self.fp32_params)]}


@in_place_of("fairseq.optim.fp16_optimizer:FP16Optimizer.load_state_dict")
def load_master_weights(load, self, state_dict, optimizer_overrides=None):
    """The counterpart of ``save_master_weights``; older checkpoints, which lack them, load as before."""
    saved = state_dict.get(MASTER)
    load(self, {key: value for key, value in state_dict.items() if key != MASTER}, optimizer_overrides)
    masters = _flat_or_not(self.fp32_params)
    if saved is None or [weights.shape for weights in saved] != [weights.shape for weights in masters]:
        why = "no float32 weights" if saved is None else "float32 weights of other sizes"
        logger.warning("the checkpoint has %s: training goes on from the rounded ones", why)
        return
    for weights, exact in zip(masters, saved, strict=True):
        exact = exact.to(weights.device)
        # The model's weights in the file may have been changed, as by averaging; then they are used.
        same = exact.to(self.fp16_params[0].dtype).float() == weights.data
        weights.data.copy_(torch.where(same, exact, weights.data))


def _flat_or_not(fp32_params) -> list:
    """Returns the float32 weights as a list: one per parameter, or one per device if they are flattened."""
    return list(fp32_params.values()) if isinstance(fp32_params, dict) else list(fp32_params)
