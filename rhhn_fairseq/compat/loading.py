"""Fixes for reading data: NumPy's removed names, a lost batch, threads and processes that end badly."""

import atexit
import fileinput
import functools
import importlib
import os
import queue
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker

from rhhn_fairseq.compat import in_place_of
from rhhn_fairseq.errors import UsageError

# fairseq modules for reading text that use a name which NumPy 1.24 or 2.0 removed.
USE_OLD_NUMPY = (
    "fairseq.data.data_utils",
    "fairseq.data.language_pair_dataset",
    "fairseq.data.token_block_dataset",
)


class NumpyWithOldNames(types.ModuleType):
    """`numpy` as a fairseq module sees it: the same module plus the removed names."""

    int = int
    compat = types.SimpleNamespace(long=int)

    @staticmethod
    def percentile(values, shares, interpolation="linear", **options):
        """Calls NumPy's function, whose ``interpolation`` is now called ``method``."""
        return np.percentile(values, shares, **{"method": interpolation, **options})

    def __getattr__(self, name):
        return getattr(np, name)


def restore_numpy_names() -> bool:
    """Without `np.compat.long` and `np.int`, --sample-break-mode eos and bucketing fail.

    So does --num-batch-buckets without the argument `interpolation` of `np.percentile`.

    The names are restored in the three fairseq modules that use them, not in NumPy itself, where
    other libraries look for them to detect its version.
    """
    if hasattr(np, "compat") and hasattr(np, "int"):
        return False
    for name in USE_OLD_NUMPY:
        importlib.import_module(name).np = NumpyWithOldNames("numpy")
    return True


def keep_the_last_batch() -> bool:
    """`batch_by_size` drops the last batch unless --required-batch-size-multiple (8) divides its size.

    So a test set loses its longest sentences: fairseq-generate writes and scores fewer translations
    than there are sentences, and training never sees them. Here that batch is kept.
    """
    from fairseq.data import data_utils

    @in_place_of(data_utils, "batch_by_size")
    def batch_all_by_size(batch_by_size, indices, *args, **kwargs):
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = list(batch_by_size(indices, *args, **kwargs))
        left = indices[sum(map(len, batches)) :]
        return [*batches, left] if len(left) else batches

    return True


def load_masked_dictionaries() -> bool:
    """``Dictionary.load`` passes an argument that the legacy dictionary of masked models does not know."""
    from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary

    def load(cls, f):
        dictionary = cls()
        dictionary.add_from_file(f)
        return dictionary

    MaskedLMDictionary.load = classmethod(load)
    return True


def keep_lines_whole() -> bool:
    """fairseq takes a carriage return within a line for its end, where the other language's text has none.

    Here lines of its programs end at ``\\n`` only, as in all of this package's (``rhhn_fairseq/lines.py``).
    """
    from fairseq import file_chunker_utils
    from fairseq.data import indexed_dataset

    if "fairseq_cli" not in sys.modules:
        return False

    def open_text(file, mode="r", **options):
        return open(file, mode, **({} if "b" in mode else {"newline": "\n"}), **options)

    for module in (file_chunker_utils, indexed_dataset):
        module.open = open_text
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(newline="\n")

    fileinput.hook_encoded = lambda encoding, errors=None: functools.partial(
        open_text, encoding=encoding, errors=errors
    )
    return True


def stop_reading_at_the_end() -> bool:
    """A run that stops in mid-epoch (--max-update) leaves threads behind that still fetch batches.

    These are daemon threads. If the interpreter shuts down while one of them is in PyTorch's C++ code,
    the process can abort ("terminate called without an active exception") with a non-zero status after
    all work is done, and torchrun reports a failed job. So they are stopped and joined when the
    program's main function returns or, under Hydra, at exit.
    """
    from fairseq.data import iterators

    class StoppableConsumer(iterators.BackgroundConsumer):
        def start(self):
            _running.add(self)
            super().start()

    iterators.BackgroundConsumer = StoppableConsumer
    atexit.register(stop_reading)
    return True


_running = weakref.WeakSet()


def stop_reading() -> None:
    """Stops all threads that fetch batches."""
    for consumer in list(_running):
        stop(consumer)


def end_data_workers_with_training() -> bool:
    """A process that reads data must end when the training does, not before, and not without a word.

    SIGTERM and Ctrl-C may be sent to the whole process group. The training notes them and saves, but its data
    workers would end at once, and the training then fails before it has saved. Here only the training itself
    ends them. A worker that cannot hand on a batch, because /dev/shm is full, would print a traceback, and
    the training would wait for that batch for ever.
    """

    @in_place_of(worker, "_worker_loop")
    def work(loop, kind, dataset, index_queue, data_queue, *args, **kwargs):
        def hand_on_error(error, item):
            reason = str(error).partition("\n")[0]
            failure = UsageError(f"a data worker cannot hand on a batch ({reason}); {READ_HERE}")
            data_queue.put((item[0], ExceptionWrapper((UsageError, failure, None), "in a data worker")))

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_for_parent, daemon=True).start()
        data_queue._on_queue_feeder_error = hand_on_error
        return loop(kind, dataset, index_queue, data_queue, *args, **kwargs)

    return True


READ_HERE = "if memory or /dev/shm is full, --num-workers 0 needs less of both"


@contextmanager
def readers_ended() -> Iterator[None]:
    """No thread that fetches batches outlives the program, and a killed data worker ends it in one line."""
    try:
        yield
    except RuntimeError as error:
        if not lost_a_worker(error):
            raise
        raise UsageError(f"{str(error).partition('. ')[0]}; {READ_HERE}") from error
    finally:
        stop_reading()


def lost_a_worker(error: Exception) -> bool:
    """Returns whether a process that reads data has ended, by the words of PyTorch's DataLoader."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def _end_for_parent() -> None:
    """Waits until the parent process asks this one to end, and ends it; ignores SIGTERM of others."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)


def stop(consumer, seconds: float = 10.0) -> None:
    """Stops a consumer thread after the batch it is fetching; waits at most `seconds`."""
    consumer._max_len = 0
    for _ in range(int(seconds / 0.05)):
        # The thread may be waiting for room in its queue.
        while not consumer._queue.empty():
            try:
                consumer._queue.get_nowait()
            except queue.Empty:
                break
        consumer.join(0.05)
        if not consumer.is_alive():
            return
