"""Character n-grams with interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3).

With c the count of an n-gram at the highest order, and at lower orders the number of different symbols that
precede it (Kneser and Ney 1995)::

    p_n(w | h)  = (c(h w) - D(c(h w))) / c(h)  +  gamma(h) p_{n-1}(w | h')
    gamma(h)    = (D1 N1(h) + D2 N2(h) + D3 N3+(h)) / c(h)
    p_n(w | h)  = p_{n-1}(w | h')  if h was never seen;         p_0 = 1 / V

c(h) is the sum of c(h w) over w, and h' is h without its first symbol. D(c) is 0 for c = 0, else D1, D2 or D3
for counts of 1, 2, and 3 or more::

    Y = n1 / (n1 + 2 n2),   D1 = 1 - 2 Y n2 / n1,   D2 = 2 - 3 Y n3 / n2,   D3 = 3 - 4 Y n4 / n3

from the numbers n1 to n4 of n-grams that have these counts. Low orders of characters have no rare n-grams,
so these estimates do not exist; D is then (1/2, 1, 3/2), as in KenLM.

All orders share their lower orders, so one pass over a text gives the probabilities by every order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.errors import UsageError

UNSEEN = -1
FALLBACK = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Counts:
    """The smoothed counts of one order, for the n-grams that occur in the training text.

    Attributes:
        kept: (c - D(c)) / c(h) by n-gram, float64 [N].
        gamma: the weight of the lower order by context, float64 [M], M the n-grams of the order below.
        discounts: (D1, D2, D3).
    """

    kept: np.ndarray
    gamma: np.ndarray
    discounts: tuple[float, float, float]


@dataclass(frozen=True)
class Order:
    """The n-grams of one order.

    Attributes:
        keys: context V + symbol, ascending, int64 [N]. A context is the index of its n - 1 symbols among the
            keys of the order below.
        top: the counts if this order is the highest. lower: the counts if it is not; None for the last order.
    """

    keys: np.ndarray
    top: Counts
    lower: Counts | None


class NGrams:
    """Kneser-Ney models of all orders up to ``order``.

    Args:
        text: the training text, integers [T] in [0, V).
        symbols: V.
        order: the highest n.

    Raises:
        UsageError: the order is below 1, or the text is shorter than it.
    """

    def __init__(self, text: np.ndarray, symbols: int, order: int):
        if not 1 <= order <= len(text):
            raise UsageError(f"a text of {len(text)} symbols has no {order}-grams")
        self.symbols = symbols
        self.orders: list[Order] = []
        text = text.astype(np.int64)
        # Index of the n-gram that ends at each position, for the order below and for this one.
        below = np.zeros(len(text) + 1, dtype=np.int64)
        contexts, keys, counts = 1, None, None
        for n in range(1, order + 1):
            new_keys, first, places, new_counts = np.unique(
                below[:-1] * symbols + text[n - 1 :],
                return_index=True,
                return_inverse=True,
                return_counts=True,
            )
            if keys is not None:
                # Each distinct n-gram adds one to the count of the (n-1)-gram that it ends with.
                preceded = np.bincount(below[first + 1], minlength=len(keys))
                self._add(keys, counts, preceded, contexts)
                contexts = len(keys)
            keys, counts, below = new_keys, new_counts, places
        self._add(keys, counts, None, contexts)

    def _add(self, keys, counts, preceded, contexts: int) -> None:
        context = keys // self.symbols
        lower = None if preceded is None else smooth(preceded, context, contexts)
        self.orders.append(Order(keys, smooth(counts, context, contexts), lower))

    def probabilities(self, text: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the probability of each symbol of a text by the model of order 1, then 2, and so on.

        Args:
            text: integers [T]. A symbol outside [0, V) has no probability, and no context spans it.

        Yields:
            float64 [T]; nan at symbols outside [0, V). The first symbols have shorter contexts.
        """
        text = text.astype(np.int64)
        known = (text >= 0) & (text < self.symbols)
        # Index of the n - 1 symbols before each position.
        context = np.zeros(len(text), dtype=np.int64)
        lower = np.where(known, 1.0 / self.symbols, np.nan)
        for order in self.orders:
            seen = (context != UNSEEN) & known
            place = np.full(len(text), UNSEEN)
            place[seen] = find(order.keys, context[seen] * self.symbols + text[seen])
            yield interpolate(order.top, context, place, lower)
            if order.lower is not None:
                lower = interpolate(order.lower, context, place, lower)
            context = np.concatenate([[UNSEEN], place[:-1]])


def smooth(counts: np.ndarray, context: np.ndarray, contexts: int) -> Counts:
    """Discounts the counts of one order.

    Args:
        counts: of each n-gram [N], zero where nothing precedes it.
        context: the index of each n-gram's context [N].
        contexts: M.
    """
    discounts = estimate_discounts(counts)
    by_count = np.array([0.0, *discounts])
    discount = by_count[np.minimum(counts, 3)]
    total = np.bincount(context, counts, minlength=contexts)
    removed = np.bincount(context, discount, minlength=contexts)
    # A context that only ends the text, or begins it, leaves everything to the lower order.
    gamma = np.divide(removed, total, out=np.ones(contexts), where=total > 0)
    kept = np.divide(counts - discount, total[context], out=np.zeros(len(counts)), where=counts > 0)
    return Counts(kept, gamma, discounts)


def estimate_discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Returns D1, D2 and D3, estimated from the numbers of n-grams with counts of 1, 2, 3 and 4."""
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not n1 or not n2 or not n3:
        return FALLBACK
    y = n1 / (n1 + 2 * n2)
    discounts = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
    possible = all(0 <= discount <= count for count, discount in enumerate(discounts, 1))
    return discounts if possible else FALLBACK


def interpolate(counts: Counts, context: np.ndarray, place: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Returns p_n from p_{n-1} [T], given the indices of the contexts and of the n-grams."""
    gamma = np.where(context == UNSEEN, 1.0, counts.gamma[context])
    return np.where(place == UNSEEN, 0.0, counts.kept[place]) + gamma * lower


def find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the index of each number among ascending keys, ``UNSEEN`` if it is not among them."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, UNSEEN)
