"""The third stage: cuts every sentence into pieces and writes the files that fairseq-preprocess writes.

A sentence is its pieces' entries in the dictionary and one end of sentence. Characters outside the model's
vocabulary become ``<unk>``. An empty line is an end of sentence alone.
"""

from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.parallel.pieces import load_pieces
from rhhn_fairseq.data.text.stream import StreamWriter
from rhhn_fairseq.data.text.vocabulary import EOS, UNK

_BLOCK_BYTES = 1 << 20
# <unk>, <s> and </s> come first in sentencepiece's list; in fairseq's they are known without being listed.
_SPECIAL = 3
# fairseq's sizes of sentences have 32 bits.
_LONGEST_SENTENCE = (1 << 31) - 1


def encode_texts(texts: dict[str, dict[str, Path]], pieces: Path, folder: Path, workers: int) -> dict:
    """Encodes all subsets into SUBSET.SOURCE-TARGET.LANG.bin and .idx in ``folder``; writes dict.LANG.txt.

    texts: for each subset and language the file with its sentences. pieces: the model's folder.
    workers: threads that encode at the same time; the result does not depend on it.

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
    for subset, languages in texts.items():
        result[subset] = {}
        for language, path in languages.items():
            prefix = folder / f"{subset}.{'-'.join(languages)}.{language}"
            counts = _encode_file(processor, path, prefix, entries, workers)
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


def _encode_file(processor, path: Path, prefix: Path, entries: np.ndarray, workers: int) -> np.ndarray:
    """Writes a text's binary files; returns how often each piece and the end of a sentence occur, [V]."""
    counts = np.zeros(entries.size, dtype=np.int64)
    size = path.stat().st_size
    progress = tqdm(desc=f"encoding {path.name}", total=size, unit="B", unit_scale=True, disable=None)
    with (
        progress,
        path.open("rb") as file,
        StreamWriter(prefix, entries.size + 1, _LONGEST_SENTENCE) as writer,
    ):
        while block := file.readlines(_BLOCK_BYTES * workers):
            sentences = [line.decode("utf-8").removesuffix("\n") for line in block]
            encoded = processor.encode(sentences, num_threads=workers, add_eos=True)
            pieces = np.fromiter(chain.from_iterable(encoded), dtype=np.int32)
            indices = entries[pieces]
            writer.write(indices, indices == EOS)
            counts += np.bincount(pieces, minlength=counts.size)
            progress.update(sum(map(len, block)))
    return counts
