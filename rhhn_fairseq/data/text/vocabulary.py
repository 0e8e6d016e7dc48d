r"""The symbols of a character corpus: their escaped form in dict.txt, encoding and decoding.

Dictionary indices are fairseq's: bos 0, pad 1, eos 2, unk 3, then the symbols of dict.txt in order.
The newline is fairseq's end-of-sentence symbol and never stands in dict.txt.

fairseq splits each line of dict.txt at white space, so symbols are stored escaped: a printable
character as itself, the backslash as ``\\``, everything else as ``\x20``, ``\u2028`` or
``\U000e0001``. In bytes mode a symbol is a byte: printable ASCII as itself, else ``\xNN``.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.manifest import SPLITS, ManifestForm
from rhhn_fairseq.data.common.sources import text_codes
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_regular

DICTIONARY_NAME = "dict.txt"
MODES = ("text", "bytes")
CHARACTERS = ManifestForm(
    "a character corpus",
    kind=None,
    format=1,
    files=rf"dict\.txt|({'|'.join(SPLITS)})\.(bin|idx)",
    identity=("split", "sha256"),
)

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
PAD = 1
"""fairseq's index for positions that hold no symbol, and for targets that are not scored."""
EOS = 2
UNK = 3
FIRST_SYMBOL = len(SPECIAL_SYMBOLS)
NEWLINE = ord("\n")
LARGEST_DICTIONARY = 1 << 28

# The decoded form of an index without a symbol (<unk>, <s>, <pad>).
REPLACEMENT = {"text": 0xFFFD, "bytes": ord("?")}
_LARGEST_CODE = {"text": 0x10FFFF, "bytes": 0xFF}

_ESCAPED = re.compile(r"\\(?:\\|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def escape(symbol: str) -> str:
    r"""Returns one character as it stands in dict.txt: ``"a"`` as ``a``, a space as ``\x20``.

    It never contains white space or a character that Python's line or white space splitting acts on,
    because those are not printable.
    """
    if symbol == "\\":
        return "\\\\"
    if symbol != " " and symbol.isprintable():
        return symbol
    return _escape_code(ord(symbol))


def _utf8(text: str) -> bytes:
    # Bytes of the command line that are not UTF-8 arrive as surrogates, and are bytes again.
    return text.encode("utf-8", "surrogateescape")


def escape_byte(value: int) -> str:
    r"""Returns one byte as it stands in dict.txt: printable ASCII as itself, else ``\xNN``."""
    return escape(chr(value)) if value < 0x80 else _escape_code(value)


def _escape_code(code: int) -> str:
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def unescape(text: str) -> str:
    """Returns the character that ``escape`` (or ``escape_byte``, as U+0000 to U+00FF) wrote as ``text``.

    A single character stands for itself even if this Python's Unicode tables call it unprintable:
    the file may come from one with newer tables. Raises UsageError for anything else.
    """
    if len(text) == 1 and text != "\\":
        return text
    if _ESCAPED.fullmatch(text):
        if text == "\\\\":
            return "\\"
        code = int(text[2:], 16)
        if code <= 0x10FFFF:
            return chr(code)
    raise UsageError(f"{text!r} is not an escaped character")


class Vocabulary:
    """What the vocabularies of characters and of words have in common.

    Attributes:
        symbols: those of dict.txt, in its order. newline_occurs: whether the end of a line is a symbol too.
        reverse: whether the model reads texts from right to left; ``encode`` and ``decode`` ignore it.
    """

    symbols: tuple[str, ...]
    newline_occurs: bool
    reverse: bool

    def __len__(self) -> int:
        """The size of fairseq's dictionary: four special symbols and those of dict.txt."""
        return FIRST_SYMBOL + len(self.symbols)

    def model_indices(self) -> np.ndarray:
        """Returns the dictionary indices that occur, in model order, int64 [V]: eos first if it occurs."""
        first = [EOS] if self.newline_occurs else []
        return np.array([*first, *range(FIRST_SYMBOL, len(self))], dtype=np.int64)

    def incremental_decoder(self) -> "IncrementalDecoder":
        """Returns a decoder for indices that arrive as the model reads them, such as a sample being drawn."""
        return IncrementalDecoder(self)


class CharVocabulary(Vocabulary):
    """The symbols of a prepared corpus, with encoding and decoding by table.

    symbols: the escaped symbols in the order of dict.txt, without fairseq's four special ones.
    mode: "text" (a symbol is a Unicode character) or "bytes" (a symbol is a byte).
    newline_occurs: whether the training text has a newline, so that eos is a symbol of the model.
    corpus: the sentence that names the corpus, or None if unknown.
    reverse: see ``Vocabulary``.

    Raises UsageError if a symbol is not an escaped character, occurs twice, is the newline, or is
    not a byte in bytes mode.
    """

    unit = "character"

    def __init__(
        self,
        symbols: Iterable[str],
        mode: str = "text",
        newline_occurs: bool = True,
        corpus: str | None = None,
        reverse: bool = False,
    ):
        if mode not in MODES:
            raise UsageError(f"mode {mode!r} is unknown; choose from {', '.join(MODES)}")
        self.mode = mode
        self.newline_occurs = newline_occurs
        self.corpus = corpus
        self.reverse = reverse
        self.symbols = tuple(unescape(symbol) for symbol in symbols)
        seen = set()
        for symbol in self.symbols:
            if symbol == "\n":
                raise UsageError(r"the newline '\x0a' is fairseq's eos and cannot be a symbol too")
            if ord(symbol) > _LARGEST_CODE[mode]:
                raise UsageError(f"{symbol!r} is not a byte, but the mode is bytes")
            if symbol in seen:
                raise UsageError(f"symbol {escape(symbol)!r} occurs twice")
            seen.add(symbol)
        self._symbol_codes = np.array([ord(symbol) for symbol in self.symbols], dtype=np.int64)
        # Codes that do not occur, such as the last one, are <unk>. A newline that only valid or test have is
        # as unknown to the model as any other symbol.
        self._index_of_code = np.full(max(int(self._symbol_codes.max(initial=0)), NEWLINE) + 2, UNK)
        self._index_of_code[self._symbol_codes] = np.arange(FIRST_SYMBOL, len(self))
        self._index_of_code[NEWLINE] = EOS if newline_occurs else UNK
        self._code_of_index = np.full(len(self), REPLACEMENT[mode])
        self._code_of_index[EOS] = NEWLINE
        self._code_of_index[FIRST_SYMBOL:] = self._symbol_codes

    @classmethod
    def load(cls, data_dir: str | Path) -> "CharVocabulary":
        """Loads the vocabulary of a directory made by ``prepare_chars``.

        Without manifest.json, the mode is "text" and the newline is assumed to occur. Raises UsageError,
        naming file and line, if a file is missing or malformed, or if the files do not fit together.
        """
        data_dir = Path(data_dir)
        path = data_dir / DICTIONARY_NAME
        symbols = read_dictionary(path)
        manifest = CHARACTERS.read(data_dir)
        try:
            if manifest is None:
                return cls(symbols)
            vocabulary = cls(symbols, manifest["mode"], manifest["newline_occurs"], manifest["variant"])
        except UsageError as error:
            raise UsageError(f"{path}: {error}; prepare the corpus again with --force") from error
        actual, expected = len(vocabulary.model_indices()), manifest["symbols"]
        if actual != expected:
            raise UsageError(
                f"{path}: has {actual} symbols, but manifest.json says {expected}; "
                "prepare the corpus again with --force"
            )
        return vocabulary

    @classmethod
    def from_codes(
        cls, codes: Sequence[int], mode: str, corpus: str | None = None, reverse: bool = False
    ) -> "CharVocabulary":
        """Returns the vocabulary with these ``codes``, which a model keeps with its weights."""
        written = escape_byte if mode == "bytes" else lambda code: escape(chr(code))
        symbols = [written(code) for code in codes if code != NEWLINE]
        return cls(symbols, mode, NEWLINE in codes, corpus, reverse)

    def codes(self) -> np.ndarray:
        """Returns code points (bytes mode: byte values) in the order of ``model_indices``, int64 [V]."""
        first = [NEWLINE] if self.newline_occurs else []
        return np.concatenate([np.array(first, dtype=np.int64), self._symbol_codes])

    def split(self, text: str) -> str | bytes:
        """Returns the symbols of a text in order: its characters or its UTF-8 bytes."""
        return _utf8(text) if self.mode == "bytes" else text

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns dictionary indices of a text, int64 [T]; symbols not in the training text become <unk>.

        In bytes mode a str stands for its UTF-8 bytes. Raises TypeError for bytes in text mode.
        """
        if self.mode == "bytes":
            data = _utf8(text) if isinstance(text, str) else text
            return self.encode_codes(np.frombuffer(data, dtype=np.uint8))
        if not isinstance(text, str):
            raise TypeError("a vocabulary in text mode encodes str, not bytes")
        return self.encode_codes(text_codes(text))

    def encode_codes(self, codes: np.ndarray) -> np.ndarray:
        """Returns dictionary indices of code points or byte values [T], int64 [T]."""
        # The table's last entry is <unk>, and clipping sends every larger code there.
        return self._index_of_code.take(codes, mode="clip")

    def decode(self, indices: Sequence[int] | np.ndarray) -> str | bytes:
        """Returns the text of dictionary indices [T]: str, or bytes in bytes mode.

        One character for each index: eos is the newline; <unk>, <s> and <pad> become U+FFFD (in
        bytes mode ``?``). Raises ValueError for an index outside the dictionary.
        """
        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise ValueError(
                f"indices from {indices.min()} to {indices.max()} do not all lie in a dictionary "
                f"of {len(self)} symbols"
            )
        codes = self._code_of_index[indices]
        if self.mode == "bytes":
            return codes.astype(np.uint8).tobytes()
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


class IncrementalDecoder:
    """Decodes a stream of dictionary indices to str without ever returning part of a character.

    In bytes mode the bytes are read as UTF-8: an unfinished character waits for its next byte, and invalid
    bytes become U+FFFD. Of a vocabulary with ``reverse`` the text is known only at the end of the input.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[int] = []

    def feed(self, indices: Sequence[int] | np.ndarray) -> str:
        """Returns the text that these indices complete."""
        if self._vocabulary.reverse:
            self._held += np.asarray(indices, dtype=np.int64).tolist()
            return ""
        return self._text(indices)

    def finish(self) -> str:
        """Returns the rest at the end of the input, with U+FFFD for an incomplete character."""
        return self._text(self._held[::-1]) + self._utf8.decode(b"", final=True)

    def _text(self, indices: Sequence[int] | np.ndarray) -> str:
        decoded = self._vocabulary.decode(indices)
        return decoded if isinstance(decoded, str) else self._utf8.decode(decoded)


def read_dictionary(path: Path) -> list[str]:
    """Returns the symbols of a dict.txt by the rules of fairseq's Dictionary. Raises UsageError."""
    symbols = []
    lines = read_regular(path, LARGEST_DICTIONARY).decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        symbol, separator, count = line.rstrip().rpartition(" ")
        if not (separator and count.isdecimal()):
            raise UsageError(f"{path}: line {number} is {line!r}, not 'SYMBOL COUNT'")
        symbols.append(symbol)
    return symbols
