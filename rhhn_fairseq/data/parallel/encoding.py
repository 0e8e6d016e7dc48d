"""The third stage: cuts every sentence into pieces and writes the files that fairseq-preprocess writes.

A sentence is its pieces' entries in the dictionary and one end of sentence. Characters outside the model's
vocabulary become ``<unk>``. An empty line is an end of sentence alone.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGTERM, signal

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.parallel.pieces import load_pieces
from rhhn_fairseq.data.text.stream import StreamWriter
from rhhn_fairseq.data.text.vocabulary import EOS, UNK
from rhhn_fairseq.programs import safe_spawning

_BLOCK_BYTES = 1 << 20
# <unk>, <s> and </s> come first in sentencepiece's list; in fairseq's they are known without being listed.
_SPECIAL = 3
# fairseq's sizes of sentences have 32 bits.
_LONGEST_SENTENCE = (1 << 31) - 1


def encode_texts(texts: dict[str, dict[str, Path]], pieces: Path, folder: Path, workers: int) -> dict:
    """Encodes all subsets into SUBSET.SOURCE-TARGET.LANG.bin and .idx in ``folder``; writes dict.LANG.txt.

    texts: for each subset and language the file with its sentences. pieces: the model's folder.
    workers: processes that encode at the same time; the result does not depend on it.

    Returns, for each subset and language, the number of lines, tokens (including one end of sentence per
    line) and unknown tokens.
    """
    processor = load_pieces(pieces)
    size = processor.vocab_size()
    # fairseq has <pad> besides sentencepiece's special symbols, and another order of them.
    entries = np.arange(size) + 1
    entries[[processor.unk_id(), processor.eos_id()]] = UNK, EOS
    training = np.zeros(size, dtype=np.int64)
    result = {}
    with safe_spawning(), _pool(pieces, workers) as encode_blocks:
        for subset, languages in texts.items():
            result[subset] = {}
            for language, path in languages.items():
                prefix = folder / f"{subset}.{'-'.join(languages)}.{language}"
                counts = _encode_file(encode_blocks, path, prefix, entries)
                if subset == "train":
                    training += counts
                result[subset][language] = {
                    "sentences": int(counts[processor.eos_id()]),
                    "tokens": int(counts.sum()),
                    "unknown": int(counts[processor.unk_id()]),
                }
    listed = [f"{processor.id_to_piece(index)} {training[index]}\n" for index in range(_SPECIAL, size)]
    for language in texts["train"]:
        (folder / f"dict.{language}.txt").write_text("".join(listed), encoding="utf-8", newline="\n")
    return result


def _encode_file(encode_blocks, path: Path, prefix: Path, entries: np.ndarray) -> np.ndarray:
    """Writes a text's binary files; returns how often each piece and the end of a sentence occur, [V]."""
    counts = np.zeros(entries.size, dtype=np.int64)
    size = path.stat().st_size
    progress = tqdm(desc=f"encoding {path.name}", total=size, unit="B", unit_scale=True, disable=None)
    with (
        progress,
        path.open("rb") as file,
        StreamWriter(prefix, entries.size + 1, _LONGEST_SENTENCE) as writer,
    ):
        for pieces, block_bytes in encode_blocks(iter(lambda: file.readlines(_BLOCK_BYTES), [])):
            indices = entries[pieces]
            writer.write(indices, indices == EOS)
            counts += np.bincount(pieces, minlength=counts.size)
            progress.update(block_bytes)
    return counts


class _Encoder:
    """The sentencepiece model of a process."""

    def __init__(self, pieces: Path):
        self.processor = load_pieces(pieces)

    def encode(self, block: list[bytes]) -> tuple[np.ndarray, int]:
        """Returns the pieces of the lines and their ends [T], and the block's bytes."""
        sentences = [line.decode("utf-8").removesuffix("\n") for line in block]
        pieces = self.processor.encode(sentences, num_threads=1, add_eos=True)
        return np.fromiter(chain.from_iterable(pieces), dtype=np.int32), sum(map(len, block))


_encoder: _Encoder | None = None


def _start_worker(pieces: Path) -> None:
    global _encoder
    # Ctrl-C reaches every process of the terminal, and SIGTERM may be sent to all; the main one tells the
    # workers what to do.
    signal(SIGINT, SIG_IGN)
    signal(SIGTERM, SIG_IGN)
    # An executor's processes wait for work forever if the one that started them is killed.
    threading.Thread(target=_leave_with, args=(parent_process(),), daemon=True).start()
    _encoder = _Encoder(pieces)


def _leave_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode_in_worker(block: list[bytes]):
    return _encoder.encode(block)


@contextmanager
def _pool(pieces: Path, workers: int):
    """Yields a function from an iterator of blocks to an iterator of encoded blocks in the same order."""
    if workers == 1:
        encoder = _Encoder(pieces)
        yield lambda blocks: map(encoder.encode, blocks)
        return
    executor = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (pieces,))

    def encode_blocks(blocks) -> Iterator:
        # Each worker has a few blocks queued, so that no worker waits and memory stays bounded.
        pending = deque()
        for block in blocks:
            pending.append(executor.submit(_encode_in_worker, block))
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield encode_blocks
    finally:
        executor.shutdown(cancel_futures=True)
