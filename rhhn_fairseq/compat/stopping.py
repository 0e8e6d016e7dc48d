"""A training saves a checkpoint when a signal such as SIGTERM or Ctrl-C ends it, and after its last epoch."""

import functools
import logging
import os
import signal
import threading
import traceback
from pathlib import Path

import torch.distributed as dist

from rhhn_fairseq.compat import training_loops
from rhhn_fairseq.compat.data import lost_a_worker
from rhhn_fairseq.compat.distribute import decided_by_rank_0
from rhhn_fairseq.compat.resume import COMPLETE

logger = logging.getLogger("rhhn_fairseq.compat")

# SLURM announces a job's end by the signal in --signal=USR1@60; a lost terminal sends SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# torchrun kills its workers 30 seconds after it has told them to end. A worker whose peer is dead waits for
# it in a collective operation and does not handle the signal; it exits by itself after this time.
SECONDS_TO_AGREE = 20.0

# Key in the job's store under which one worker writes and the others read.
_KEY = "rhhn_fairseq/stop"


def listen(trainer) -> None:
    """A signal kills fairseq at once, and all progress since the last checkpoint is lost.

    Here a signal is noted, and training continues to the end of an update or of a validation batch. There
    all workers save together, as at any other time, and exit with the status that a shell reports for a
    program killed by that signal. A second Ctrl-C ends the program at once.
    """
    loops = list(training_loops())
    # A loop of another program would not act on it.
    if loops:
        REQUEST.listen(several=trainer.data_parallel_world_size > 1)
    for names in loops:
        if not isinstance(names["train"], functools.partial):
            names["train"] = functools.partial(_train, names["train"])
            names["validate_and_save"] = functools.partial(_validate_and_save, names["validate_and_save"])


def end_if_agreed(trainer) -> None:
    """Saves and ends a training that has made an update, where its workers have agreed to stop."""
    if REQUEST.epoch_itr is not None and REQUEST.agreed(trainer):
        save_and_end(trainer)


def _validate_and_save(inner, cfg, trainer, task, epoch_itr, *args, **kwargs):
    """fairseq's function for the end of an update, after a check whether to stop.

    fairseq saves nothing after the last epoch if ``--save-interval`` does not divide ``--max-epoch``.
    """
    from fairseq import checkpoint_utils

    REQUEST.epoch_itr = epoch_itr
    end_if_agreed(trainer)
    valid_losses, should_stop = inner(cfg, trainer, task, epoch_itr, *args, **kwargs)
    is_last = epoch_itr.epoch == cfg.optimization.max_epoch and epoch_itr.end_of_epoch()
    if is_last and epoch_itr.epoch % cfg.checkpoint.save_interval and not should_stop:
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, valid_losses[0])
    return valid_losses, should_stop


def _train(inner, cfg, trainer, task, epoch_itr):
    """fairseq's function for an epoch, which makes no update of a training that is complete.

    A signal that has also ended a data worker saves as any other. Nothing is saved if the worker's end
    interrupted an update, which is then incomplete.
    """
    if trainer in COMPLETE:
        return [None], True
    try:
        return inner(cfg, trainer, task, epoch_itr)
    except RuntimeError as error:
        steps = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        alone = trainer.data_parallel_world_size == 1
        if not (REQUEST.signum and alone and lost_a_worker(error)) or "train_step" in steps:
            raise
    REQUEST.epoch_itr = epoch_itr
    save_and_end(trainer)


class StopRequest:
    """A signal received by this process or, in a job of several workers, by another one.

    Attributes:
        signum: the signal, 0 until it arrives. epoch_itr: position of training, None before the first update.
        settled: set when all workers know after which step they stop.
    """

    def __init__(self):
        self.signum, self.epoch_itr, self._steps = 0, None, 0
        self.settled = threading.Event()
        self._before: dict[int, object] = {}

    def listen(self, several: bool) -> None:
        """Starts to note signals, except ignored ones, such as SIGINT in a background job.

        several: whether there are other workers, one of which may be dead when the signal arrives.
        """
        self.signum, self.epoch_itr, self._steps = 0, None, 0
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        if several:
            _end_even_if_stuck(self.settled)

    def listen_no_more(self) -> None:
        """Restores the previous signal handlers."""
        if self._before:
            signal.set_wakeup_fd(-1)
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, signum, frame):
        if self.signum == signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum

    def agreed(self, trainer) -> bool:
        """Returns whether to stop now. Every worker asks after each step, and all get the same answer.

        The first worker with a signal writes to the store that the next step is the last. No other worker has
        finished that step yet, because workers synchronise in each step, so all of them read it in time.
        """
        self._steps += 1
        if trainer.data_parallel_world_size == 1:
            return bool(self.signum)
        store = dist.distributed_c10d._get_default_store()
        if not store.check([_KEY]):
            if self.signum:
                store.compare_set(_KEY, "", f"{self._steps + 1} {int(self.signum)}")
            return False
        self.settled.set()
        step, self.signum = map(int, store.get(_KEY).split())
        return self._steps >= step


REQUEST = StopRequest()


def _end_even_if_stuck(settled: threading.Event) -> None:
    """Ends the process some time after a signal unless ``settled``, even if the main thread is stuck."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python writes the signal's number there at once, whatever the main thread is doing.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Forked processes, such as data loaders, do not report their signals here.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch():
        while (signum := os.read(reader, 1)[0]) not in SIGNALS:
            pass
        if not settled.wait(SECONDS_TO_AGREE):
            os.write(2, b"error: the workers do not answer each other; nothing was saved after the signal\n")
            os._exit(128 + signum)

    threading.Thread(target=watch, daemon=True).start()


def save_and_end(trainer) -> None:
    """Saves a checkpoint on all workers together, and raises SystemExit."""
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    cfg = trainer.cfg.checkpoint

    def save():
        return checkpoint_utils.save_checkpoint(cfg, trainer, REQUEST.epoch_itr, None)

    if trainer.data_parallel_rank > 0:
        save()
    # torchrun ends a job when its first worker exits, so none exits before the file is written.
    saved = decided_by_rank_0(trainer, save)
    if cfg.write_checkpoints_asynchronously:
        PathManager.async_close()
    if trainer.data_parallel_rank == 0:
        name, update = signal.Signals(REQUEST.signum).name, trainer.get_num_updates()
        logger.warning("%s: stopped after update %d; %s", name, update, _how_to_go_on(cfg, saved))
    raise SystemExit(128 + REQUEST.signum)


def _how_to_go_on(cfg, saved: str | None) -> str:
    if saved is None:
        return f"nothing was saved ({'--no-save' if cfg.no_save else '--no-last-checkpoints'})"
    if cfg.no_last_checkpoints:
        return f"--restore-file {saved} goes on from there"
    # With these options, the same command would start over.
    given = ["--restore-file"] if cfg.restore_file != "checkpoint_last.pt" else []
    resets = ("optimizer", "lr-scheduler", "meters", "dataloader")
    given += [f"--reset-{name}" for name in resets if cfg[f"reset_{name.replace('-', '_')}"]]
    without = f"without {', '.join(given)}, " if given else ""
    return f"{without}the same command goes on from {Path(saved).with_name('checkpoint_last.pt')}"
