"""Data that fairseq reads and writes: repairs for today's NumPy, checks before a file is mapped, and readers.

fairseq maps an index into memory without checking it. A damaged index leads to a NumPy exception in the
middle of an epoch, to sentences that are silently left out, or to entries that are in no dictionary. Reading
a pipe or a device in place of a file never ends.
"""

import atexit
import fileinput
import functools
import gc
import importlib
import os
import queue
import shlex
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from rhhn_fairseq.compat import in_place_of
from rhhn_fairseq.data.text.stream import OTHER_FORMATS, check_stream
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless

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


def restore_names() -> None:
    """Without `np.compat.long` and `np.int`, --sample-break-mode eos and bucketing fail.

    So does --num-batch-buckets without the argument `interpolation` of `np.percentile`. NumPy's names are
    restored in the three fairseq modules that use them, not in NumPy itself, where other libraries look for
    them to detect its version. ``Dictionary.load`` passes an argument that the legacy dictionary of masked
    models does not know.
    """
    from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary

    for name in USE_OLD_NUMPY:
        importlib.import_module(name).np = NumpyWithOldNames("numpy")

    def load(cls, f):
        dictionary = cls()
        dictionary.add_from_file(f)
        return dictionary

    MaskedLMDictionary.load = classmethod(load)


def keep_lines_whole() -> None:
    """fairseq takes a carriage return within a line for its end, where the other language's text has none.

    Here lines of its programs end at ``\\n`` only, as in all of this package's (``rhhn_fairseq/files.py``).
    """
    from fairseq import file_chunker_utils
    from fairseq.data import indexed_dataset

    if "fairseq_cli" not in sys.modules:
        return

    def open_text(file, mode="r", **options):
        return open(file, mode, **({} if "b" in mode else {"newline": "\n"}), **options)

    for module in (file_chunker_utils, indexed_dataset):
        module.open = open_text
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(newline="\n")

    fileinput.hook_encoded = lambda encoding, errors=None: functools.partial(
        open_text, encoding=encoding, errors=errors
    )


@in_place_of("fairseq.data.data_utils:batch_by_size")
def batch_by_size(inner, indices, *args, **kwargs):
    """fairseq drops the last batch unless --required-batch-size-multiple (8) divides its size.

    So a test set loses its longest sentences: fairseq-generate writes and scores fewer translations
    than there are sentences, and training never sees them. Here that batch is kept.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []
    batches = list(inner(indices, *args, **kwargs))
    left = indices[sum(map(len, batches)) :]
    return [*batches, left] if len(left) else batches


@in_place_of("fairseq.data.data_utils:load_indexed_dataset")
def load_indexed_dataset(load, path, dictionary=None, dataset_impl=None, *args, **kwargs):
    """A damaged index of fairseq's newer binary format leaves out sentences, or reads what no file holds.

    The name of a file of sequences in FASTA goes to a shell, which would run a ``$(...)`` in a language's.
    """
    if shlex.quote(path) != path and os.path.lexists(f"{path}.fasta"):
        raise UsageError(f"{path}.fasta: fairseq gives this name to a shell; rename it")
    binary = any(os.path.lexists(f"{path}.{end}") for end in ("idx", "bin"))
    if binary and dataset_impl in (None, "mmap"):
        check_indexed(path, None if dictionary is None else len(dictionary))
    return load(path, dictionary, dataset_impl, *args, **kwargs)


@in_place_of("fairseq.data:Dictionary.add_from_file")
def add_from_file(read, self, f):
    """A dictionary that is a pipe is waited for, for ever."""
    if isinstance(f, str):
        refuse_endless(f)
    return read(self, f)


def check_indexed(prefix: str, entries: int | None) -> None:
    """Checks that PREFIX.idx and PREFIX.bin belong together and hold only entries of a dictionary.

    Args:
        entries: size of the dictionary; None if there is none.

    Raises:
        UsageError: they do not.
    """
    for end in ("idx", "bin"):
        refuse_endless(f"{prefix}.{end}")
    with open(f"{prefix}.idx", "rb") as file:
        if file.read(8).startswith(OTHER_FORMATS):
            return
    # Without a dictionary these are alignments, and a sentence may have none.
    _, sentences = check_stream(prefix, entries, shortest=0 if entries is None else 1)
    if sentences.items == 0 and entries is not None:
        raise UsageError(f"{prefix}.idx: holds no sentences")


_running = weakref.WeakSet()


@in_place_of("fairseq.data.iterators:BackgroundConsumer.start")
def start_reading(start, self) -> None:
    """A run that stops in mid-epoch (--max-update) leaves threads behind that still fetch batches.

    These are daemon threads. If the interpreter shuts down while one of them is in PyTorch's C++ code,
    the process can abort ("terminate called without an active exception") with a non-zero status after
    all work is done, and torchrun reports a failed job. So they are stopped and joined when the
    program's main function returns.
    """
    _running.add(self)
    start(self)


@atexit.register
def end_reading() -> None:
    """Ends all that still reads when a training or a program ends, data workers by the loader's own event.

    multiprocessing would send SIGTERM. They then leave directories behind in the temporary one, and a worker
    misses it if one of another process is pending, see ``work``; the program would wait for ever.
    """
    for consumer in list(_running):
        stop(consumer)
    for thing in gc.get_objects() if "fairseq_cli" in sys.modules else ():
        if type(thing) is _MultiProcessingDataLoaderIter:
            thing._shutdown_workers()


@in_place_of("torch.utils.data._utils.worker:_worker_loop")
def work(loop, kind, dataset, index_queue, data_queue, *args, **kwargs):
    """A process that reads data must end when the training does, not before, and not without a word.

    Signals may be sent to the whole process group. The training notes them and saves, but its data
    workers would end at once, and the training then fails before it has saved. Here only the training itself
    ends them. A worker that cannot hand on a batch, because /dev/shm is full, would print a traceback, and
    the training would wait for that batch for ever.
    """

    def hand_on_error(error, item):
        reason = str(error).partition("\n")[0]
        failure = UsageError(f"a data worker cannot hand on a batch ({reason}); {READ_HERE}")
        data_queue.put((item[0], ExceptionWrapper((UsageError, failure, None), "in a data worker")))

    for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_for_parent, daemon=True).start()
    data_queue._on_queue_feeder_error = hand_on_error
    return loop(kind, dataset, index_queue, data_queue, *args, **kwargs)


READ_HERE = "if memory or /dev/shm is full, --num-workers 0 needs less of both"


@contextmanager
def readers_ended() -> Iterator[None]:
    """Nothing that reads outlives a training, and a killed data worker ends it in one line.

    A sweep trains several in one process. Data workers of the one before would wait beside the next, and a
    loader that is collected as garbage takes five seconds to end its worker.
    """
    try:
        yield
    except RuntimeError as error:
        if not lost_a_worker(error):
            raise
        raise UsageError(f"{str(error).partition('. ')[0]}; {READ_HERE}") from error
    finally:
        end_reading()


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


@in_place_of("fairseq.sequence_scorer:SequenceScorer.generate")
def score(inner, self, models, sample, **kwargs):
    """``fairseq-eval-lm --output-word-probs`` and ``--output-word-stats`` need a score for every symbol.

    A character model gives the unknown symbol no probability. fairseq's program then drops the score and
    keeps the symbol. Here the scorer leaves out both.
    """
    results = inner(self, models, sample, **kwargs)
    if "tally" in sample:
        for hypothesis in (hypothesis for hypotheses in results for hypothesis in hypotheses):
            scored = hypothesis["positional_scores"].isfinite()
            for name in ("tokens", "positional_scores"):
                hypothesis[name] = hypothesis[name][scored]
    return results


@in_place_of("fairseq.utils:load_align_dict")
def load_align_dict(load, replace_unk):
    """--replace-unk without a file has the value "@@ ", which fairseq tries to open as a file."""
    return {} if replace_unk == "@@ " else load(replace_unk)


@in_place_of("fairseq.utils:post_process_prediction")
def post_process_prediction(
    inner, hypo_tokens, src_str, alignment, align_dict, tgt_dict, remove_bpe=None, **options
):
    """--replace-unk expects one source position per target word, as no generator returns since fairseq 0.10.

    Alignments are pairs (source, target), and empty without --print-alignment, so the first unknown word ends
    the program with an IndexError or TypeError. Joining pieces first would replace the wrong words.

    Raises:
        UsageError: pieces are to be joined, or there is an unknown word but no alignment.
    """
    if align_dict is None:
        return inner(hypo_tokens, src_str, alignment, None, tgt_dict, remove_bpe, **options)
    if remove_bpe is not None:
        raise UsageError(
            f"--replace-unk works on pieces, and --post-process {remove_bpe} joins them first; leave it "
            "out and join the pieces of the output afterwards"
        )
    text = tgt_dict.string(hypo_tokens, **options)
    text = replace_unk(text, src_str, alignment, align_dict, tgt_dict.unk_string())
    return tgt_dict.encode_line(text, add_if_not_exist=True), text, alignment


def replace_unk(text: str, source: str, alignment, align_dict: dict, unk: str) -> str:
    """Returns the translation with each unknown word replaced by the source word it is aligned with.

    Args:
        alignment: pairs (source position, target position), each target position at most once.
        align_dict: translations of source words; a word that is not in it is copied.
    """
    words, given = text.split(), source.split()
    if unk in words and len(alignment) == 0:
        raise UsageError("--replace-unk needs alignments: give --print-alignment as well")
    position = {target: where for where, target in alignment}
    for i, word in enumerate(words):
        if word == unk and position.get(i, len(given)) < len(given):
            words[i] = align_dict.get(given[position[i]], given[position[i]])
    return " ".join(words)
