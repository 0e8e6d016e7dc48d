"""The words of a corpus that fairseq-preprocess made, with the interface of ``CharVocabulary``; and prompts.

``fairseq-preprocess --only-source`` writes dict.txt and one item for each line of text: its words and
fairseq's end-of-sentence symbol. It also leaves preprocess.log, which identifies such a directory.
"""

import os
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.manifest import MANIFEST_NAME
from rhhn_fairseq.data.text.vocabulary import (
    DICTIONARY_NAME,
    EOS,
    FIRST_SYMBOL,
    SPECIAL_SYMBOLS,
    UNK,
    CharVocabulary,
    Vocabulary,
    read_dictionary,
)
from rhhn_fairseq.errors import UsageError

LOG_NAME = "preprocess.log"

# Codes of words begin above all code points, so that they are never taken for characters.
FIRST_CODE = 0x110000


class WordVocabulary(Vocabulary):
    """The words of dict.txt and the end of a line.

    Args:
        words: in the order of dict.txt, without fairseq's four special symbols.
        corpus: what the corpus is called.
        reverse: whether the model reads texts from right to left.

    Raises:
        UsageError: a word occurs twice.
    """

    mode = "words"
    unit = "word"
    newline_occurs = True

    def __init__(self, words: Iterable[str], corpus: str | None = None, reverse: bool = False):
        self.symbols = tuple(words)
        self.reverse = reverse
        self.corpus = corpus
        self._names = (*SPECIAL_SYMBOLS, *self.symbols)
        self._index_of_word = {word: FIRST_SYMBOL + index for index, word in enumerate(self.symbols)}
        if len(self._index_of_word) != len(self.symbols):
            twice = Counter(self.symbols).most_common(1)[0][0]
            raise UsageError(f"the word {twice} occurs twice in the dictionary")

    @classmethod
    def load(cls, data_dir: str | Path) -> "WordVocabulary":
        """Loads the vocabulary of a directory that fairseq-preprocess made. Raises UsageError."""
        path = Path(data_dir) / DICTIONARY_NAME
        words = read_dictionary(path)
        if reserved := set(words).intersection(SPECIAL_SYMBOLS):
            raise UsageError(f"{path}: {min(reserved)} is reserved by fairseq")
        vocabulary = cls(words)
        vocabulary.corpus = f"{Path(data_dir).name} as words, {len(vocabulary.model_indices()):,} symbols"
        return vocabulary

    def codes(self) -> np.ndarray:
        """Returns a code for every word in the order of ``model_indices``, int64 [V], the same everywhere."""
        codes = [FIRST_CODE + zlib.crc32(word.encode("utf-8")) for word in ("\n", *self.symbols)]
        return np.array(codes, dtype=np.int64)

    def split(self, text: str) -> list[str]:
        """Returns the symbols of a text: its words, and the ends of its lines."""
        lines = text.split("\n")
        return [symbol for line in lines for symbol in (*line.split(), "\n")][:-1]

    def encode(self, text: str) -> np.ndarray:
        """Returns dictionary indices of a text, int64 [T]; words not in the dictionary become <unk>."""
        indices = [
            EOS if symbol == "\n" else self._index_of_word.get(symbol, UNK) for symbol in self.split(text)
        ]
        return np.array(indices, dtype=np.int64)

    def decode(self, indices: Sequence[int] | np.ndarray) -> str:
        """Returns the text of dictionary indices [T]: every word is followed by a space."""
        indices = np.asarray(indices).tolist()
        return "".join("\n" if index == EOS else f"{self._names[index]} " for index in indices)


def load_vocabulary(data_dir: str | Path) -> CharVocabulary | WordVocabulary:
    """Loads the vocabulary of a directory that ``rhhn prepare`` or fairseq-preprocess made.

    Raises:
        UsageError: see the ``load`` of the two.
    """
    data_dir = Path(data_dir)
    if os.path.isfile(data_dir):
        raise UsageError(f"{data_dir} is a file: prepare its text with rhhn prepare text --input {data_dir}")
    # For a path without access rights os.path returns False, where Path raises; reading it then says why.
    if not os.path.exists(data_dir / MANIFEST_NAME) and os.path.exists(data_dir / LOG_NAME):
        return WordVocabulary.load(data_dir)
    return CharVocabulary.load(data_dir)


def first_input(vocabulary: CharVocabulary | WordVocabulary) -> int:
    """Returns the index read before a text, from either side: the newline's, or <unk> if none occurs."""
    return EOS if vocabulary.newline_occurs else UNK


def prompt_indices(
    vocabulary: CharVocabulary | WordVocabulary, text: str, name: str = "--prompt"
) -> list[int]:
    """Returns dictionary indices of a text to continue, in the model's reading order, after ``first_input``.

    If the vocabulary has ``reverse``, the text is the end of a longer one, and its last symbol comes first.

    Args:
        name: what the message calls the text.

    Raises:
        UsageError: a symbol of it is not in the vocabulary.
    """
    symbols, entries = vocabulary.split(text), vocabulary.encode(text).tolist()
    unknown = sorted({symbol for symbol, entry in zip(symbols, entries, strict=True) if entry == UNK})
    if unknown:
        raise UsageError(f"{name} has symbols the model does not know: {unknown[:8]}")
    return [first_input(vocabulary), *(reversed(entries) if vocabulary.reverse else entries)]
