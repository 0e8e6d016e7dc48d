"""Which training pairs are dropped, how that is counted, and that what is left is whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhhn_fairseq.data.common.sources import MemorySource
from rhhn_fairseq.data.parallel.corpora import Corpus, TextPairs
from rhhn_fairseq.data.parallel.texts import REASONS, CleaningConfig, clean, mark_duplicates, write_texts
from rhhn_fairseq.errors import UsageError

LIMITS = CleaningConfig(max_words=5, max_chars=40, max_ratio=2.0)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("a b", "c d", ("a b", "c d")),
        (" a \t b\xa0\u2028c ", "d\x0ce\r", ("a b c", "d e")),
        ("\u200b \ufeff", "a", "empty"),
        ("a", "\u200e\u200f \u2581", "empty"),
        ("\u200ba", "a", ("\u200ba", "a")),
        (b"caf\xe9", "a", "encoding"),
        ("a", "l\x92homme", "encoding"),
        (None, "a", "length"),
        ("a b c d e f", "a b c", "length"),
        ("x", "y" * 12, ("x", "y" * 12)),
        ("x", "y" * 13, "ratio"),
        # Encoding is looked for first, then emptiness, then length.
        ("", "x" * 100, "empty"),
        ("x", "y" * 100, "length"),
    ],
)
def test_what_is_cleaned_and_what_is_dropped(source, target, expected):
    pair = tuple(text.encode() if isinstance(text, str) else text for text in (source, target))
    assert clean(pair, LIMITS) == expected


@given(st.lists(st.integers(0, 40)))
def test_duplicates_are_all_but_the_first(numbers):
    keys = np.array(numbers, dtype=np.uint64) * np.uint64(2**64 // 41)
    expected = [number in numbers[:position] for position, number in enumerate(numbers)]
    assert mark_duplicates(keys).tolist() == expected


def text_pairs(name: str, pairs) -> TextPairs:
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    data = (b"".join(line.encode() + b"\n" for line in side) for side in sides)
    return TextPairs(
        name, tuple(MemorySource(f"{name}.{side}", text) for side, text in zip("st", data, strict=True))
    )


def corpus(*corpora, valid=(("v", "w"),), test=(("t", "u"),)) -> Corpus:
    train = tuple(text_pairs(f"part{number}", pairs) for number, pairs in enumerate(corpora))
    return Corpus("files", "en", "fr", train, (text_pairs("valid", valid),), (text_pairs("test", test),))


FIRST = [("a", "1"), ("", "1"), ("a", "1"), ("b", "2"), ("x" * 50, "3")]
SECOND = [("b", "2"), ("c", "3"), ("c", "y" * 20), ("c", "4"), ("a\x07", "5")]


def test_every_pair_is_counted_once_and_the_kept_ones_stay_in_order(tmp_path):
    result = write_texts(corpus(FIRST, SECOND), LIMITS, tmp_path)
    assert result["cleaning"] == [
        dict(name="part0", read=5, kept=2, encoding=0, empty=1, length=1, ratio=0, duplicate=1),
        dict(name="part1", read=5, kept=2, encoding=1, empty=0, length=0, ratio=1, duplicate=1),
    ]
    for counts in result["cleaning"]:
        assert counts["read"] == counts["kept"] + sum(counts[reason] for reason in REASONS)
    assert (tmp_path / "train.en").read_bytes() == b"a\nb\nc\nc\n"
    assert (tmp_path / "train.fr").read_bytes() == b"1\n2\n3\n4\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "train.en", "train.fr"]


def test_validation_and_test_text_is_taken_as_it_is(tmp_path):
    awkward = [
        ("", "x" * 100),
        ("  two  spaces ", ""),
        ("same", "same"),
        ("same", "same"),
        ("\u3000\u2028", "\t"),
    ]
    result = write_texts(corpus(FIRST, valid=awkward), LIMITS, tmp_path)
    assert result["evaluation"]["valid"] == {"name": "valid", "sentences": 5, "empty": {"en": 2, "fr": 2}}
    for side, language in enumerate(("en", "fr")):
        expected = "".join(pair[side] + "\n" for pair in awkward)
        assert (tmp_path / "raw" / f"valid.{language}").read_bytes() == expected.encode()


def test_nothing_left_to_train_on_is_an_error_with_the_counts(tmp_path):
    with pytest.raises(UsageError, match=r"no training pair of 3 is fit to train on \(empty 1, ratio 2\)"):
        write_texts(corpus([("", "a"), ("x", "y" * 30)], [("y" * 30, "x")]), LIMITS, tmp_path)
    (tmp_path / "again").mkdir()
    with pytest.raises(UsageError, match="the files are empty"):
        write_texts(corpus([]), LIMITS, tmp_path / "again")
