"""Synthetic sentences about numbers, measures, dates, times and money in English and French.

The words come from num2words, dates, times and amounts in figures from Babel's locale data (en_US, fr_FR).
Every English sentence has one French translation and contains all of its information: times of twelve
hours have AM or PM, weekdays and four-digit years occur in both languages or in neither, and every noun
that a French number agrees with is masculine.

A kind of sentence is a template with slots. Its sentences are numbered; a permutation drawn from the seed
puts them in order, and the kinds take turns, each until its sentences are used up. So no sentence occurs
twice, and subsets that are different stretches of the sequence are disjoint, whatever their size.
"""

import datetime
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from importlib import metadata
from itertools import count, islice

from rhhn_fairseq.data.parallel.corpora import Corpus
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for

with needed_for("the corpus synthetic needs"):
    from babel.dates import format_date, format_time, get_day_names
    from babel.numbers import format_currency, format_decimal
    from num2words import num2words

EVALUATION_PAIRS = 500

# English and French; all of these things are masculine.
_THINGS = (
    ("books", "livres"),
    ("trees", "arbres"),
    ("dogs", "chiens"),
    ("pencils", "crayons"),
    ("tickets", "billets"),
    ("hats", "chapeaux"),
    ("boats", "bateaux"),
    ("trains", "trains"),
    ("children", "enfants"),
    ("soldiers", "soldats"),
    ("cakes", "gâteaux"),
    ("benches", "bancs"),
)
_PLACES = (
    ("the museum", "le musée"),
    ("the city", "la ville"),
    ("the school", "l'école"),
    ("the castle", "le château"),
    ("the garden", "le jardin"),
    ("the village", "le village"),
    ("the harbour", "le port"),
    ("the station", "la gare"),
    ("the hotel", "l'hôtel"),
    ("the shop", "le magasin"),
    ("the theatre", "le théâtre"),
    ("the island", "l'île"),
)
_CITIES = (
    ("Paris", "Paris"),
    ("London", "Londres"),
    ("Geneva", "Genève"),
    ("Brussels", "Bruxelles"),
    ("Vienna", "Vienne"),
    ("Lisbon", "Lisbonne"),
    ("Moscow", "Moscou"),
    ("Venice", "Venise"),
    ("Warsaw", "Varsovie"),
    ("Athens", "Athènes"),
    ("Berlin", "Berlin"),
    ("Montreal", "Montréal"),
)
_EVENTS = (
    ("The concert", "Le concert"),
    ("The meeting", "La réunion"),
    ("The exhibition", "L'exposition"),
    ("The wedding", "Le mariage"),
    ("The match", "Le match"),
    ("The conference", "La conférence"),
    ("The election", "L'élection"),
    ("The festival", "Le festival"),
    ("The race", "La course"),
    ("The auction", "La vente aux enchères"),
    ("The exam", "L'examen"),
    ("The party", "La fête"),
)
_VEHICLES = (("train", "Le train"), ("bus", "Le bus"), ("ship", "Le navire"), ("plane", "L'avion"))
_GOODS = (
    ("book", "le livre"),
    ("lamp", "la lampe"),
    ("watch", "la montre"),
    ("bicycle", "le vélo"),
    ("table", "la table"),
    ("piano", "le piano"),
    ("painting", "le tableau"),
    ("camera", "l'appareil photo"),
    ("car", "la voiture"),
    ("coat", "le manteau"),
    ("ring", "la bague"),
    ("clock", "l'horloge"),
)
_PEOPLE = "Anna Paul Marie Louis Emma Victor Alice Hugo Clara Martin Sophie Thomas".split()
_CURRENCIES = ("EUR", "USD", "GBP", "CAD")
# In words; num2words treats the French pound as masculine.
_SPOKEN_CURRENCIES = ("EUR", "USD")
_STYLES = ("full", "long")
_FIRST_DAY = datetime.date(1900, 1, 1)
_DAYS = (datetime.date(2100, 1, 1) - _FIRST_DAY).days
_MINUTES = 24 * 60

Sentences = tuple[str, str]


def count_in_words(number: int, thing: int, place: int) -> Sentences:
    """Returns a sentence with a whole number from 2 on in words."""
    english, french = (_spoken(number + 2, language) for language in ("en", "fr"))
    things, places = _THINGS[thing], _PLACES[place]
    return (
        f"There are {english} {things[0]} in {places[0]}.",
        f"Il y a {french} {things[1]} dans {places[1]}.",
    )


def distance(tenths: int, origin: int, step: int) -> Sentences:
    """Returns a sentence with a number of one decimal in figures."""
    kilometres = Decimal(tenths + 20) / 10
    english, french = (
        _plain(format_decimal(kilometres, format="#,##0.0", locale=locale)) for locale in ("en_US", "fr_FR")
    )
    start, end = _CITIES[origin], _CITIES[(origin + step + 1) % len(_CITIES)]
    return (
        f"Between {start[0]} and {end[0]} there are {english} kilometres.",
        f"Entre {start[1]} et {end[1]}, il y a {french} kilomètres.",
    )


def date(day: int, style: int, event: int, city: int) -> Sentences:
    """Returns a sentence with a date, with or without its weekday."""
    when = _FIRST_DAY + datetime.timedelta(days=day)
    english, french = (_plain(format_date(when, _STYLES[style], locale)) for locale in ("en_US", "fr_FR"))
    events, cities = _EVENTS[event], _CITIES[city]
    return (
        f"{events[0]} in {cities[0]} is on {english}.",
        f"{events[1]} à {cities[1]} a lieu le {french}.",
    )


def departure(minute: int, weekday: int, vehicle: int, city: int) -> Sentences:
    """Returns a sentence with a weekday and a time: twelve hours with AM or PM, and twenty-four hours."""
    time = datetime.time(*divmod(minute, 60))
    english, french = (
        (get_day_names("wide", locale=locale)[weekday], _plain(format_time(time, "short", locale=locale)))
        for locale in ("en_US", "fr_FR")
    )
    vehicles, cities = _VEHICLES[vehicle], _CITIES[city]
    return (
        f"The {vehicles[0]} to {cities[0]} leaves on {english[0]} at {english[1]}.",
        f"{vehicles[1]} pour {cities[1]} part le {french[0]} à {french[1]}.",
    )


def price(cents: int, currency: int, good: int) -> Sentences:
    """Returns a sentence with an amount of money in figures."""
    amount = Decimal(cents + 100) / 100
    english, french = (
        _plain(format_currency(amount, _CURRENCIES[currency], locale=locale)) for locale in ("en_US", "fr_FR")
    )
    goods = _GOODS[good]
    return f"The {goods[0]} costs {english}.", f"{goods[1].capitalize()} coûte {french}."


def payment(cents: int, currency: int, person: int, good: int) -> Sentences:
    """Returns a sentence with an amount of money in words."""
    amount = Decimal(cents + 200) / 100
    english, french = (
        num2words(amount, lang=language, to="currency", currency=_SPOKEN_CURRENCIES[currency])
        for language in ("en", "fr")
    )
    goods, name = _GOODS[good], _PEOPLE[person]
    return (
        f"{name} paid {english} for the {goods[0]}.",
        f"{name} a payé {french} pour {goods[1]}.",
    )


@lru_cache(1 << 16)
def _spoken(number: int, language: str) -> str:
    return num2words(number, lang=language)


def _plain(text: str) -> str:
    """Returns the text with ordinary spaces in place of the locales' narrow and non-breaking ones."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Kind:
    """A kind of sentence: the function that writes one, and how many values each of its slots has."""

    write: Callable[..., Sentences]
    slots: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of sentences of this kind."""
        return math.prod(self.slots)

    def sentences(self, number: int) -> Sentences:
        """Returns sentence ``number`` in English and French."""
        values = []
        for slot in self.slots:
            number, value = divmod(number, slot)
            values.append(value)
        return self.write(*values)


KINDS = (
    Kind(count_in_words, (9_998, len(_THINGS), len(_PLACES))),
    Kind(distance, (99_980, len(_CITIES), len(_CITIES) - 1)),
    Kind(date, (_DAYS, len(_STYLES), len(_EVENTS), len(_CITIES))),
    Kind(departure, (_MINUTES, 7, len(_VEHICLES), len(_CITIES))),
    Kind(price, (99_900, len(_CURRENCIES), len(_GOODS))),
    Kind(payment, (9_800, len(_SPOKEN_CURRENCIES), len(_PEOPLE), len(_GOODS))),
)

CAPACITY = sum(kind.size for kind in KINDS)
"""The number of sentences."""


@dataclass(frozen=True)
class SyntheticPairs:
    """The stretch [start, stop) of a seed's sequence of sentences."""

    name: str
    seed: int
    start: int
    stop: int
    texts: tuple = ()

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the sentences of the stretch as UTF-8."""
        orders = {kind: _permutation(kind, self.seed) for kind in KINDS}
        for kind, rank in islice(_turns(), self.start, self.stop):
            english, french = kind.sentences(orders[kind](rank))
            yield english.encode("utf-8"), french.encode("utf-8")


def _turns() -> Iterator[tuple[Kind, int]]:
    """Yields the kinds in turn, each with 0, 1, 2, ... until its sentences are used up."""
    for rank in count():
        kinds = [kind for kind in KINDS if rank < kind.size]
        if not kinds:
            return
        for kind in kinds:
            yield kind, rank


def _permutation(kind: Kind, seed: int) -> Callable[[int], int]:
    """Returns a permutation of the numbers below the kind's size, drawn from the seed.

    Flipping bits, multiplying by an odd number and mixing upper bits into lower ones each permute the
    numbers of this many bits; a result beyond the size is permuted again.
    """
    draw = random.Random(f"{kind.write.__name__} {seed}")
    bits = kind.size.bit_length()
    rounds = [(draw.randrange(1 << bits), 2 * draw.randrange(1 << bits) + 1) for _ in range(3)]

    def order(rank: int) -> int:
        while True:
            for flips, factor in rounds:
                rank = (rank ^ flips) * factor % (1 << bits)
                rank ^= rank >> (bits // 2 + 1)
            if rank < kind.size:
                return rank

    return order


def synthetic(pairs: int, seed: int) -> Corpus:
    """Returns ``pairs`` sentences to train on, and ``EVALUATION_PAIRS`` each to validate and to test.

    Raises:
        UsageError: ``pairs`` is below 1, or more than remain of all sentences.
    """
    most = CAPACITY - 2 * EVALUATION_PAIRS
    if not 1 <= pairs <= most:
        raise UsageError(
            f"--pairs {pairs}: expected a number from 1 to {most:,}, the number of distinct pairs"
        )
    test, valid, train = (
        SyntheticPairs(f"synthetic {name}", seed, start, start + length)
        for name, start, length in (
            ("test", 0, EVALUATION_PAIRS),
            ("valid", EVALUATION_PAIRS, EVALUATION_PAIRS),
            ("train", 2 * EVALUATION_PAIRS, pairs),
        )
    )
    options = {"pairs": pairs, "seed": seed}
    # Other versions may write numbers and dates differently.
    options |= {package: metadata.version(package) for package in ("num2words", "Babel")}
    return Corpus("synthetic", "en", "fr", (train,), (valid,), (test,), options)
