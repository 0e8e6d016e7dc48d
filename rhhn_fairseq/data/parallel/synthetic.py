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

# Pairs of English and French. All of the things are masculine.
_TABLES = {
    name: [tuple(pair.strip().split(": ")) for pair in text.split(";")]
    for name, text in {
        "things": """books: livres; trees: arbres; dogs: chiens; pencils: crayons; tickets: billets;
            hats: chapeaux; boats: bateaux; trains: trains; children: enfants; soldiers: soldats;
            cakes: gâteaux; benches: bancs""",
        "places": """the museum: le musée; the city: la ville; the school: l'école; the castle: le château;
            the garden: le jardin; the village: le village; the harbour: le port; the station: la gare;
            the hotel: l'hôtel; the shop: le magasin; the theatre: le théâtre; the island: l'île""",
        "cities": """Paris: Paris; London: Londres; Geneva: Genève; Brussels: Bruxelles; Vienna: Vienne;
            Lisbon: Lisbonne; Moscow: Moscou; Venice: Venise; Warsaw: Varsovie; Athens: Athènes;
            Berlin: Berlin; Montreal: Montréal""",
        "events": """The concert: Le concert; The meeting: La réunion; The exhibition: L'exposition;
            The wedding: Le mariage; The match: Le match; The conference: La conférence;
            The election: L'élection; The festival: Le festival; The race: La course;
            The auction: La vente aux enchères; The exam: L'examen; The party: La fête""",
        "vehicles": "train: Le train; bus: Le bus; ship: Le navire; plane: L'avion",
        "goods": """book: le livre; lamp: la lampe; watch: la montre; bicycle: le vélo; table: la table;
            piano: le piano; painting: le tableau; camera: l'appareil photo; car: la voiture;
            coat: le manteau; ring: la bague; clock: l'horloge""",
    }.items()
}
_NAMES = "Anna Paul Marie Louis Emma Victor Alice Hugo Clara Martin Sophie Thomas".split()
_CURRENCIES = ("EUR", "USD", "GBP", "CAD")
# In words; num2words treats the French pound as masculine.
_SPOKEN_CURRENCIES = _CURRENCIES[:2]
_STYLES = ("full", "long")
_FIRST_DAY = datetime.date(1900, 1, 1)
_DAYS = (datetime.date(2100, 1, 1) - _FIRST_DAY).days
_LOCALES = ("en_US", "fr_FR")

Both = tuple[str, str]
"""The same in English and French."""


@lru_cache(1 << 16)
def _number(number: int) -> Both:
    return tuple(num2words(number + 2, lang=locale[:2]) for locale in _LOCALES)


def _kilometres(tenths: int) -> Both:
    amount = Decimal(tenths + 20) / 10
    return tuple(format_decimal(amount, format="#,##0.0", locale=locale) for locale in _LOCALES)


def _two_cities(number: int) -> Both:
    cities = _TABLES["cities"]
    step, origin = divmod(number, len(cities))
    start, end = cities[origin], cities[(origin + step + 1) % len(cities)]
    return f"{start[0]} and {end[0]}", f"{start[1]} et {end[1]}"


def _date(number: int) -> Both:
    style, day = divmod(number, _DAYS)
    when = _FIRST_DAY + datetime.timedelta(days=day)
    return tuple(format_date(when, _STYLES[style], locale) for locale in _LOCALES)


def _time(minute: int) -> Both:
    time = datetime.time(*divmod(minute, 60))
    return tuple(format_time(time, "short", locale=locale) for locale in _LOCALES)


def _weekday(number: int) -> Both:
    return tuple(get_day_names("wide", locale=locale)[number] for locale in _LOCALES)


def _price(number: int) -> Both:
    currency, cents = divmod(number, 99_900)
    amount = Decimal(cents + 100) / 100
    return tuple(format_currency(amount, _CURRENCIES[currency], locale=locale) for locale in _LOCALES)


def _spoken_price(number: int) -> Both:
    currency, cents = divmod(number, 9_800)
    options = {"to": "currency", "currency": _SPOKEN_CURRENCIES[currency]}
    return tuple(num2words(Decimal(cents + 200) / 100, lang=locale[:2], **options) for locale in _LOCALES)


def _of(table: list[Both]) -> tuple[int, Callable[[int], Both]]:
    return len(table), table.__getitem__


@dataclass(frozen=True)
class Kind:
    """A kind of sentence.

    Attributes:
        name: determines the order of its sentences, with the seed. templates: in English and French, with
            slots. slots: for each slot how many values it has, and the function from a value's number to
            the words.
    """

    name: str
    templates: Both
    slots: tuple[tuple[int, Callable[[int], Both]], ...]

    @property
    def size(self) -> int:
        """The number of sentences of this kind."""
        return math.prod(count for count, _ in self.slots)

    def sentences(self, number: int) -> Both:
        """Returns sentence ``number`` in English and French."""
        values = []
        for slot_size, words in self.slots:
            number, value = divmod(number, slot_size)
            values.append(words(value))
        both = (self.templates[side].format(*(words[side] for words in values)) for side in (0, 1))
        # Ordinary spaces take the place of the locales' narrow and non-breaking ones.
        english, french = (" ".join(text.split()) for text in both)
        return english, french[0].upper() + french[1:]


KINDS = (
    Kind(
        "count_in_words",
        ("There are {0} {1} in {2}.", "Il y a {0} {1} dans {2}."),
        ((9_998, _number), _of(_TABLES["things"]), _of(_TABLES["places"])),
    ),
    Kind(
        "distance",
        ("Between {1} there are {0} kilometres.", "Entre {1}, il y a {0} kilomètres."),
        ((99_980, _kilometres), (12 * 11, _two_cities)),
    ),
    Kind(
        "date",
        ("{1} in {2} is on {0}.", "{1} à {2} a lieu le {0}."),
        ((_DAYS * len(_STYLES), _date), _of(_TABLES["events"]), _of(_TABLES["cities"])),
    ),
    # Twelve hours with AM or PM, and twenty-four hours.
    Kind(
        "departure",
        ("The {2} to {3} leaves on {1} at {0}.", "{2} pour {3} part le {1} à {0}."),
        ((24 * 60, _time), (7, _weekday), _of(_TABLES["vehicles"]), _of(_TABLES["cities"])),
    ),
    Kind(
        "price",
        ("The {1} costs {0}.", "{1} coûte {0}."),
        ((99_900 * len(_CURRENCIES), _price), _of(_TABLES["goods"])),
    ),
    Kind(
        "payment",
        ("{1} paid {0} for the {2}.", "{1} a payé {0} pour {2}."),
        (
            (9_800 * len(_SPOKEN_CURRENCIES), _spoken_price),
            _of([(name, name) for name in _NAMES]),
            _of(_TABLES["goods"]),
        ),
    ),
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
    draw = random.Random(f"{kind.name} {seed}")
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
