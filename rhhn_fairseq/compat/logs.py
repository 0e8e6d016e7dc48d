"""What fairseq's programs log: no details on the screen, and one line that sums a training up."""

import functools
import logging
import math
import os
import re
import sys
import time
import warnings

from rhhn_fairseq.ops import backends

logger = logging.getLogger("rhhn_fairseq.training")

HANDLERS_BEFORE = set(logging.getLogger().handlers)
"""The root logger's before fairseq is imported, unless the user has imported it."""

SCHEDULE_TOLERANCE = 0.02
"""Share of the updates by which a schedule may end too early or too late without a warning."""

# Loggers of which all messages are details, and those of which the messages that begin so are. Objects that
# are logged directly, the configuration and the model, are details too.
ALL_DETAILS = ("fairseq_cli.hydra_train", "rhhn_fairseq.ops.memory", "rhhn_fairseq.ops.backends")
ALL_DETAILS += ("rhhn_fairseq.ops.matmul.gemm", "rhhn_fairseq.ops.backends.graphs")
SOME_DETAILS = tuple(
    f"fairseq_cli.{name}" for name in ("train", "eval_lm", "generate", "validate", "interactive")
)
SOME_DETAILS += ("fairseq.trainer", "fairseq.data.iterators", "fairseq.tasks.fairseq_task")
SOME_DETAILS += ("fairseq.checkpoint_utils",)
DETAILS = re.compile(
    r"task: |model: |criterion: |num\. |training on \d|max tokens per device|begin dry-run|Start iterating|"
    r"begin (validation|training)|end of epoch|loading (model|train data)|Preparing to |Saving checkpoint|"
    r"No existing checkpoint|Finished saving|State of |grouped total|can_reuse_epoch_itr|reuse_dataloader|"
    r"rebuild_batches|creating new batches"
)

# (category, beginning of the message, module that warns). All of them are caused by the code of fairseq, of
# Hydra as it uses it, or of this package, appear in every run, and call for no action by the user.
KNOWN_WARNINGS = (
    (Warning, "", r"(fairseq|fairseq_cli|hydra)\..*"),
    (FutureWarning, r"`broadcast_buffers` is deprecated", r"rhhn_fairseq\..*"),
    # ops/backends/torch_nn.py passes the cell's separate tensors to cuDNN's LSTM and GRU.
    (UserWarning, r"RNN module weights are not part of single contiguous chunk", r"rhhn_fairseq\..*"),
    # A damaged checkpoint; the error that follows says more.
    (UserWarning, r"Detected pickle protocol", r"torch\._weights_only_unpickler"),
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator", r"torch\.utils\.data\..*"),
    # ``python -m fairseq_cli.hydra_train`` warns as __main__.
    (UserWarning, r"\s*The version_base parameter is not specified", "__main__"),
    (UserWarning, r"\s*'[^']+' is validated against ConfigStore schema with the same name", ""),
)


def repair_logs() -> None:
    """fairseq prints 6 kB of configuration, a dozen more lines and fifteen warnings before its first figure.

    In its programs, details go only to the log file (--log-file), and with LOGLEVEL=DEBUG also to the
    screen. Warnings and errors always appear, except KNOWN_WARNINGS. fairseq-eval-lm passes a value but no
    placeholder for it, so each sample with an infinite score would print a traceback.
    """
    for category, message, module in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    logging.getLogger("fairseq_cli.eval_lm").addFilter(_append_stray_arguments)
    if "fairseq_cli" in sys.modules:
        for names, pattern in ((ALL_DETAILS, re.compile("")), (SOME_DETAILS, DETAILS)):
            for name in names:
                logging.getLogger(name).addFilter(functools.partial(_pass, pattern))


def restore_root_logger() -> None:
    """A model that fairseq imports (wav2vec2_classification) configures the root logger at level DEBUG.

    The first configuration wins, so fairseq-eval-lm and fairseq-generate, which set up logging after that
    import, print the debug lines of every library, without the time. Here they get the level and the format
    that they ask for. In a notebook or another program the logger is as it was.
    """
    root, program = logging.getLogger(), "fairseq_cli" in sys.modules
    for handler in root.handlers if program else set(root.handlers) - HANDLERS_BEFORE:
        if getattr(handler.formatter, "_fmt", None) != logging.BASIC_FORMAT or root.level != logging.DEBUG:
            continue
        root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper() if program else logging.WARNING)
        text = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
        handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
        if not program:
            root.removeHandler(handler)


def _append_stray_arguments(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, str) and "%" not in record.msg and isinstance(record.args, tuple):
        record.msg = " ".join([record.msg, *(" ".join(str(arg).split()) for arg in record.args)])
        record.args = ()
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


def sum_up_the_start(trainer, figures: dict) -> None:
    """Logs in one line what is trained: its size, the device, the backend, and the updates per epoch.

    The line follows the first update, when it is known which backend runs, and has that update's loss and
    time. fairseq's own first figures follow after ``--log-interval`` updates, which may take minutes.
    """
    started, trainer.started = getattr(trainer, "started", None), None
    if started is None:
        return
    logger.info("%s", summary(trainer, figures, time.perf_counter() - started))
    warning = describe_schedule(trainer)
    if warning is not None:
        logger.warning("%s", warning)


def describe_schedule(trainer) -> str | None:
    """Returns a line about a learning rate whose warm-up or end does not fit the training's length, or None.

    The number of updates in an architecture's recipe is that of one corpus, batch size and number of workers.
    """
    schedule, last = trainer.cfg.lr_scheduler, trainer.last_update
    end, warmup = getattr(schedule, "total_num_update", None), getattr(schedule, "warmup_updates", None) or 0
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


def log_time_left(trainer) -> None:
    """Logs `minutes_left`, the time to the last update at the mean speed since the first one of this run."""
    from fairseq.logging import metrics

    done, now = trainer.get_num_updates(), time.perf_counter()
    first, began = vars(trainer).setdefault("first_update", (done, now))
    last = trainer.last_update
    if done > first and last < math.inf:
        minutes = max(last - done, 0) * (now - began) / (done - first) / 60
        metrics.log_scalar("minutes_left", minutes, weight=0, priority=780, round=1)


def last_update(trainer, epochs) -> float:
    """Returns the number of the update after which training ends; infinite without a limit.

    epochs: fairseq's iterator, where training starts or resumes.
    """
    limits, first = trainer.cfg.optimization, epochs.next_epoch_idx
    last = math.inf if limits.max_update <= 0 else limits.max_update
    if limits.max_epoch > 0:
        frequencies, updates = list(limits.update_freq), trainer.get_num_updates()
        counts = [-(-len(epochs) // frequency) for frequency in frequencies]
        if first <= limits.max_epoch:
            left = len(epochs) - epochs.iterations_in_epoch
            updates -= -left // frequencies[min(first, len(frequencies)) - 1]
        updates += sum(counts[first : limits.max_epoch])
        updates += counts[-1] * max(limits.max_epoch - max(first, len(counts)), 0)
        last = min(last, updates)
    return last


def summary(trainer, figures: dict, seconds: float) -> str:
    """Returns the line about a training run after its first update, of which the figures are."""
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
        f"{trainer.updates_of_an_epoch:,} updates an epoch, the first in {seconds:.1f} s",
        f"loss {figures['loss']:g}",
    ]
    if trainer.data_parallel_world_size > 1:
        facts.append(f"{trainer.data_parallel_world_size} workers")
    return "; ".join(facts)
