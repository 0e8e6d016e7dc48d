"""The third stage: cuts every sentence into pieces, as fairseq-preprocess reads them; writes the dictionary.

In the encoded text a space separates the pieces; characters outside the
model's vocabulary become ``<unk>``, which is also fairseq's name for them. Empty lines stay empty.
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
from rhhn_fairseq.programs import safe_spawning

DICTIONARY_NAME = "dict.txt"

_BLOCK_BYTES = 1 << 20
# <unk>, <s> and </s> come first in sentencepiece's list; in fairseq's they are known without being listed.
_SPECIAL = 3


def encode_texts(texts: dict[str, dict[str, Path]], pieces: Path, folder: Path, workers: int) -> dict:
    """Encodes all subsets into SUBSET.LANG in ``folder``, and writes dict.txt.

    texts: for each subset and language the file with its sentences. pieces: the model's folder.
    workers: processes that encode at the same time; the result does not depend on it.

    Returns, for each subset and language, the number of lines, tokens (including one end of sentence per
    line) and unknown tokens.
    """
    processor = load_pieces(pieces)
    counts = np.zeros(processor.vocab_size(), dtype=np.int64)
    result = {}
    with safe_spawning(), _pool(pieces, workers) as encode_blocks:
        for subset, languages in texts.items():
            result[subset] = {}
            for language, path in languages.items():
                counted = _encode_file(encode_blocks, path, folder / f"{subset}.{language}", counts.size)
                if subset == "train":
                    counts += counted["counts"]
                result[subset][language] = {
                    "sentences": counted["lines"],
                    "tokens": int(counted["counts"].sum()) + counted["lines"],
                    "unknown": int(counted["counts"][processor.unk_id()]),
                }
    with (folder / DICTIONARY_NAME).open("w", encoding="utf-8", newline="\n") as file:
        for index in range(_SPECIAL, counts.size):
            file.write(f"{processor.id_to_piece(index)} {counts[index]}\n")
    return result


def _encode_file(encode_blocks, path: Path, encoded: Path, vocabulary: int) -> dict:
    counts = np.zeros(vocabulary, dtype=np.int64)
    lines = 0
    size = path.stat().st_size
    progress = tqdm(desc=f"encoding {path.name}", total=size, unit="B", unit_scale=True, disable=None)
    with progress, path.open("rb") as file, encoded.open("wb") as output:
        blocks = iter(lambda: file.readlines(_BLOCK_BYTES), [])
        for text, block_counts, block_lines, block_bytes in encode_blocks(blocks):
            output.write(text)
            counts += block_counts
            lines += block_lines
            progress.update(block_bytes)
    return {"counts": counts, "lines": lines}


class _Encoder:
    """The sentencepiece model of a process, and its pieces as bytes."""

    def __init__(self, pieces: Path):
        self.processor = load_pieces(pieces)
        self.pieces = [self.processor.id_to_piece(i).encode() for i in range(self.processor.vocab_size())]

    def encode(self, block: list[bytes]) -> tuple[bytes, np.ndarray, int, int]:
        """Returns the encoded lines, how often each piece occurs [V], and the block's lines and bytes."""
        sentences = [line.decode("utf-8").removesuffix("\n") for line in block]
        indices = self.processor.encode(sentences, num_threads=1)
        text = b"".join([b" ".join([self.pieces[i] for i in sentence]) + b"\n" for sentence in indices])
        symbols = np.fromiter(chain.from_iterable(indices), dtype=np.int64)
        counts = np.bincount(symbols, minlength=len(self.pieces))
        return text, counts, len(block), sum(map(len, block))


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
