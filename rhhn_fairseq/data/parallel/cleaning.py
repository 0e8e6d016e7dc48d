"""Selects the sentence pairs to train on, with a reason for every pair that is dropped."""

import re
from dataclasses import dataclass, field

from rhhn_fairseq.data.parallel.corpora import RawPair
from rhhn_fairseq.errors import UsageError

REASONS = ("encoding", "empty", "length", "ratio", "duplicate")
"""Why a pair is dropped, in the order of the checks; the first reason that applies is counted."""

RATIO_MARGIN = 10
"""Characters added to both lengths before they are compared, so that one or two words make no difference."""

# Control characters other than white space, U+FFFD, which decoders write for invalid bytes, and U+0080 to
# U+009F, which in running text are the remains of one-byte encodings.
_DAMAGE = re.compile("[\\x00-\\x08\\x0e-\\x1f\\x7f-\\x9f\\ufffd]")

# A space, and what sentencepiece's normalisation turns into one.
_BLANK = " \u200b\u200e\u200f\u2581\ufeff"


@dataclass(frozen=True)
class CleaningConfig:
    """Limits of a training pair, for each of its sides; ``UsageError`` names a value that cannot work."""

    max_words: int = field(default=200, metadata={"help": "drop pairs with more words on a side"})
    max_chars: int = field(default=1500, metadata={"help": "drop pairs with more characters on a side"})
    max_ratio: float = field(
        default=2.5,
        metadata={"help": f"drop pairs whose lengths in characters, plus {RATIO_MARGIN}, differ by more"},
    )
    keep_duplicates: bool = field(default=False, metadata={"help": "keep duplicate pairs"})

    def __post_init__(self):
        for name in ("max_words", "max_chars", "max_ratio"):
            if not getattr(self, name) >= 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")


def clean(pair: RawPair, config: CleaningConfig) -> tuple[str, str] | str:
    """Returns the two sentences with single spaces between words, or the reason to drop the pair.

    Duplicates are not detected here.
    """
    if None in pair:
        return "length"
    try:
        texts = [line.decode("utf-8") for line in pair]
    except UnicodeDecodeError:
        return "encoding"
    if any(_DAMAGE.search(text) for text in texts):
        return "encoding"
    words = [text.split() for text in texts]
    source, target = (" ".join(side) for side in words)
    if not source.strip(_BLANK) or not target.strip(_BLANK):
        return "empty"
    lengths = sorted((len(source), len(target)))
    if lengths[1] > config.max_chars or max(map(len, words)) > config.max_words:
        return "length"
    if lengths[1] + RATIO_MARGIN > config.max_ratio * (lengths[0] + RATIO_MARGIN):
        return "ratio"
    return source, target
