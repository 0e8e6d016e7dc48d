"""A readable start of training: details only on request, and one line that summarises the run."""

import functools
import logging
import math
import os
import re
import sys

from rhhn_fairseq.ops import backends

logger = logging.getLogger("rhhn_fairseq.training")

SCHEDULE_TOLERANCE = 0.02
"""Share of the updates by which a schedule may end too early or too late without a warning."""

# By logger, patterns for the beginnings of messages that are details; None for all messages. Objects that
# are logged directly, the configuration and the model, are details too.
DETAILS = {
    "fairseq_cli.train": (
        r"task: |model: |criterion: |num\. |training on \d|max tokens per device|begin dry-run|"
        r"Start iterating|begin validation|end of epoch"
    ),
    "fairseq_cli.hydra_train": None,
    "fairseq_cli.eval_lm": r"num\. model params|loading model",
    "fairseq_cli.generate": r"loading model",
    "fairseq_cli.validate": r"loading model",
    "fairseq_cli.interactive": r"loading model",
    "fairseq.trainer": (
        r"Preparing to load|No existing checkpoint|loading train data|begin training|Saving checkpoint|"
        r"Finished saving"
    ),
    "fairseq.data.iterators": r"grouped total",
    "fairseq.tasks.fairseq_task": (
        r"can_reuse_epoch_itr|reuse_dataloader|rebuild_batches|creating new batches"
    ),
    "fairseq.checkpoint_utils": r"Preparing to save|State of ",
    "rhhn_fairseq.ops.memory": None,
    "rhhn_fairseq.ops.backends": None,
    "rhhn_fairseq.ops.matmul.gemm": None,
    "rhhn_fairseq.ops.backends.graphs": None,
}


def keep_details_off_the_screen() -> bool:
    """fairseq prints 6 kB of configuration and a dozen more lines before its first figure.

    In its programs these records go only to the log file (--log-file), and with LOGLEVEL=DEBUG also to the
    screen. Warnings and errors always appear.
    """
    if "fairseq_cli" not in sys.modules:
        return False
    for name, pattern in DETAILS.items():
        logging.getLogger(name).addFilter(functools.partial(_pass, re.compile(pattern or "")))
    return True


def _pass(pattern: re.Pattern, record: logging.LogRecord) -> bool:
    """Returns whether a record goes to every handler; passes a detail to the file handlers only."""
    if record.levelno > logging.INFO or os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        return True
    if isinstance(record.msg, str) and not pattern.match(record.msg):
        return True
    # A set, because record.name may be one of the others, and a file gets each record once.
    for name in {record.name, "fairseq_cli.train", None}:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(record)
    return False


def sum_up_the_start(trainer, output: dict | None, seconds: float) -> None:
    """Logs in one line what is trained: its size, the device, the backend, and the updates per epoch.

    The line follows the first update, when it is known which backend runs, and has that update's loss and
    time. fairseq's own first figures follow after ``--log-interval`` updates, which may take minutes.
    """
    if getattr(trainer, "is_summed_up", False):
        return
    trainer.is_summed_up = True
    logger.info("%s", summary(trainer, output, seconds))
    warning = describe_schedule(trainer)
    if warning is not None:
        logger.warning("%s", warning)


def describe_schedule(trainer) -> str | None:
    """Returns a line about a learning rate whose warm-up or end does not fit the training's length, or None.

    The number of updates in an architecture's recipe is that of one corpus, batch size and number of workers.
    """
    limits, schedule = trainer.cfg.optimization, trainer.cfg.lr_scheduler
    end, warmup = getattr(schedule, "total_num_update", None), getattr(schedule, "warmup_updates", None) or 0
    last = math.inf if limits.max_update <= 0 else limits.max_update
    if limits.max_epoch > 0:
        last = min(last, limits.max_epoch * updates_of_an_epoch(trainer))
    if last < warmup:
        return (
            f"training ends after {last:,} updates, before the warm-up does: lower --warmup-updates {warmup}"
        )
    if getattr(schedule, "_name", None) != "polynomial_decay" or not end:
        return None
    if math.isinf(last) or abs(end - last) <= SCHEDULE_TOLERANCE * last:
        return None
    rate = schedule.end_learning_rate
    if last < end:
        what = f"training ends after {last:,} updates, before the learning rate has fallen to {rate:g}"
    else:
        what = f"the learning rate is {rate:g} from update {end:,.0f} on, and training ends after {last:,}"
    return f"{what}: give --total-num-update {last}"


def updates_of_an_epoch(trainer) -> int:
    """Returns the number of updates in an epoch, by the first entry of ``--update-freq``."""
    return -(-trainer.batches_of_an_epoch // trainer.cfg.optimization.update_freq[0])


def summary(trainer, figures: dict | None, seconds: float) -> str:
    """Returns the line about a training run after its first update.

    Args:
        figures: of that update; None if its gradient overflowed. seconds: its duration.
    """
    model = trainer.get_model()
    name = getattr(trainer.cfg.model, "_name", None) or getattr(trainer.cfg.model, "arch", None)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    modules = {type(module).__name__ for module in model.modules()}
    running = [f"{cell} on {backend}" for cell, backend in backends.RUNNING.items() if cell in modules]
    facts = [
        f"{name or type(model).__name__}: {sum(weight.numel() for weight in weights):,} parameters",
        f"{trainer.device.type}, {dtype}",
        *running,
        f"{updates_of_an_epoch(trainer):,} updates an epoch, the first in {seconds:.1f} s",
    ]
    if figures is not None:
        facts.append(f"loss {figures['loss']:g}")
    if trainer.data_parallel_world_size > 1:
        facts.append(f"{trainer.data_parallel_world_size} workers")
    return "; ".join(facts)
