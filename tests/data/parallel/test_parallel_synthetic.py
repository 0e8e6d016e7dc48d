"""The synthetic corpus: nothing lost between the languages, nothing twice, the same for the same seed."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhhn_fairseq.data.parallel import synthetic as module
from rhhn_fairseq.data.parallel.synthetic import CAPACITY, EVALUATION_PAIRS, KINDS, Kind, synthetic
from rhhn_fairseq.errors import UsageError

BY_NAME = {kind.name: kind for kind in KINDS}


def read(subset) -> list[tuple[str, str]]:
    return [tuple(line.decode() for line in pair) for pair in subset.read()]


def subsets(pairs, seed):
    corpus = synthetic(pairs, seed)
    return [read(subset) for subset in (*corpus.train, *corpus.valid, *corpus.tests)]


def test_subsets_are_disjoint_and_no_sentence_comes_twice():
    train, valid, test = subsets(3000, 1)
    assert [len(subset) for subset in (train, valid, test)] == [3000, EVALUATION_PAIRS, EVALUATION_PAIRS]
    for side in (0, 1):
        assert len({pair[side] for pair in train + valid + test}) == 4000


def test_a_seed_gives_the_same_pairs_and_another_gives_others():
    first, second, other = (subsets(200, seed) for seed in (7, 7, 8))
    assert first == second
    assert not set(first[0]) & set(other[0])
    longer = subsets(300, 7)
    assert longer[0][:200] == first[0] and longer[1:] == first[1:]


def test_a_seed_gives_the_pairs_of_earlier_versions():
    """Published figures were measured on them."""
    train, _, test = subsets(3, 1)
    assert [english for english, _ in test[:3]] == [
        "There are six thousand, three hundred and fifty-nine boats in the city.",
        "Between Paris and Montreal there are 9,025.3 kilometres.",
        "The concert in Athens is on November 8, 1976.",
    ]
    assert [english for english, _ in train] == [
        "The clock costs £773.25.",
        "Paul paid fifty dollars, eleven cents for the book.",
        "There are eight thousand, three hundred and twenty-seven boats in the garden.",
    ]


def test_a_kind_that_is_used_up_leaves_its_turns_to_the_others(monkeypatch):
    small = tuple(
        Kind(stem, ("{0}", ""), ((size, lambda number, stem=stem: (f"{stem}{number}", "-")),))
        for stem, size in (("a", 2), ("b", 5), ("c", 3))
    )
    monkeypatch.setattr(module, "KINDS", small)
    monkeypatch.setattr(Kind, "sentences", lambda kind, number: kind.slots[0][1](number))
    pairs = list(module.SyntheticPairs("all", 1, 0, 100).read())
    texts = [english.decode() for english, _ in pairs]
    assert "".join(text[0] for text in texts) == "abcabcbcbb"
    assert sorted(texts) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4", "c0", "c1", "c2"]


@pytest.mark.parametrize("pairs", [0, -5, CAPACITY - 2 * EVALUATION_PAIRS + 1])
def test_more_pairs_than_there_are_is_an_error(pairs):
    with pytest.raises(UsageError, match=rf"--pairs {pairs}: expected a number from 1 to 43,775,624"):
        synthetic(pairs, 1)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_a_kind_is_a_permutation(name, seed):
    order = module._permutation(Kind(name, ("", ""), ((7, str), (11, str), (30, str))), seed)
    assert sorted(map(order, range(7 * 11 * 30))) == list(range(7 * 11 * 30))


EXAMPLES = [
    ("count_in_words", (0, 0, 0), "There are two books in the museum.", "Il y a deux livres dans le musée."),
    (
        "count_in_words",
        (8_069, 1, 2),
        "There are eight thousand and seventy-one trees in the school.",
        "Il y a huit mille soixante et onze arbres dans l'école.",
    ),
    (
        "departure",
        (12 * 60 + 5, 6, 3, 5),
        "The plane to Lisbon leaves on Sunday at 12:05 PM.",
        "L'avion pour Lisbonne part le dimanche à 12:05.",
    ),
    ("price", (99_899 + 99_900 * 3, 7), "The camera costs CA$999.99.", "L'appareil photo coûte 999,99 $CA."),
]


@pytest.mark.parametrize(("name", "slots", "english", "french"), EXAMPLES)
def test_sentences(name, slots, english, french):
    number = 0
    for value, (size, _) in reversed(list(zip(slots, BY_NAME[name].slots, strict=True))):
        number = number * size + value
    assert BY_NAME[name].sentences(number) == (english, french)


def sentences_of(name):
    kind = BY_NAME[name]
    return st.integers(0, kind.size - 1).map(kind.sentences)


MONTHS = dict(
    zip(
        "January February March April May June July August September October November December".split(),
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre".split(),
        strict=True,
    )
)
DAYS = dict(
    zip(
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
        "lundi mardi mercredi jeudi vendredi samedi dimanche".split(),
        strict=True,
    )
)


def clock(hour: str, minute: str, half: str) -> str:
    return f"{int(hour) % 12 + 12 * (half == 'PM'):02}:{minute}"


@given(sentences_of("departure"))
def test_times_are_the_same_in_both_languages(pair):
    weekday, *time = re.search(r"on (\w+) at (\d+):(\d\d) ([AP]M)\.$", pair[0]).groups()
    assert pair[1].endswith(f" le {DAYS[weekday]} à {clock(*time)}.")


@given(sentences_of("date"))
def test_dates_are_the_same_in_both_languages(pair):
    weekday, month, day, year = re.search(r"is on (?:(\w+), )?(\w+) (\d+), (\d{4})\.$", pair[0]).groups()
    expected = f"{day} {MONTHS[month]} {year}"
    assert pair[1].endswith(f" a lieu le {f'{DAYS[weekday]} ' if weekday else ''}{expected}.")


@settings(deadline=None)
@given(st.one_of(*map(sentences_of, BY_NAME)))
def test_only_plain_spaces_and_one_line(pair):
    for text in pair:
        assert text == " ".join(text.split())
        assert text.isprintable()
