"""Kneser-Ney n-grams against counts by hand, a slow transcription, and real text."""

import json
from collections import Counter

import numpy as np
import pytest
from helpers import script_cli

from experiments.ngram import FALLBACK, NGrams, estimate_discounts, main
from rhhn_fairseq.errors import UsageError


def random_text(length, symbols, seed):
    """Text with a little structure, so that contexts repeat."""
    generator = np.random.default_rng(seed)
    text = [0]
    for _ in range(length - 1):
        text.append(int((text[-1] * 2 + generator.choice([0, 1, 3], p=[0.7, 0.2, 0.1])) % symbols))
    return np.array(text)


def naive_probability(train, symbols, order, history, symbol):
    """The equations of the module with dictionaries, one symbol at a time; the highest order is ``order``."""

    def counts_of(n, highest):
        grams = Counter(tuple(train[i : i + n]) for i in range(len(train) - n + 1))
        if highest:
            return grams
        longer = {tuple(train[i : i + n + 1]) for i in range(len(train) - n)}
        preceded = Counter(gram[1:] for gram in longer)
        return {gram: preceded[gram] for gram in grams}

    def p(n, history):
        if n == 0:
            return 1 / symbols
        counts = counts_of(n, n == order)
        discounts = estimate_discounts(np.array(list(counts.values())))
        context = tuple(history[len(history) - n + 1 :]) if n > 1 else ()
        following = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        total = sum(following.values())
        if len(history) < n - 1 or total == 0:
            return p(n - 1, history)

        def discount(count):
            return (0.0, *discounts)[min(count, 3)]

        gamma = sum(discount(count) for count in following.values()) / total
        count = following.get(symbol, 0)
        return (count - discount(count)) / total + gamma * p(n - 1, history)

    return p(order, list(history))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_equal_the_slow_transcription(order):
    V = 5
    train, text = random_text(300, V, 1), random_text(40, V, 2)
    fast = list(NGrams(train, V, 4).probabilities(text))[order - 1]
    slow = [naive_probability(train.tolist(), V, order, text[:t].tolist(), s) for t, s in enumerate(text)]
    # Sums and products of at most a dozen numbers below one.
    np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-14)


@pytest.mark.parametrize("history", [[], [3], [0, 1], [4, 4, 4], [2, 0, 1]])
def test_probabilities_of_all_symbols_sum_to_one(history):
    V = 6
    model = NGrams(random_text(400, V, 3), V, 4)
    sums = np.zeros(4)
    for symbol in range(V):
        text = np.array([*history, symbol])
        sums += [probability[-1] for probability in model.probabilities(text)]
    np.testing.assert_allclose(sums, 1.0, rtol=0, atol=1e-14)


def test_discounts_by_hand():
    counts = np.repeat([1, 2, 3, 4, 9], [40, 20, 8, 4, 7])
    y = 40 / 80
    expected = 1 - 2 * y * 20 / 40, 2 - 3 * y * 8 / 20, 3 - 4 * y * 4 / 8
    assert estimate_discounts(counts) == pytest.approx(expected, abs=1e-15)
    assert estimate_discounts(np.array([7, 9, 30])) == FALLBACK


def test_unknown_symbols_have_no_probability_and_end_contexts():
    V = 4
    model = NGrams(random_text(200, V, 5), V, 3)
    text = np.array([1, 2, -1, 3, 2, 1])
    for probability in model.probabilities(text):
        assert np.isnan(probability[2])
        assert np.isfinite(np.delete(probability, 2)).all()
    after = [probability[3:] for probability in model.probabilities(text)]
    alone = list(model.probabilities(text[3:]))
    np.testing.assert_array_equal(after, alone)


@pytest.fixture
def prepared(tmp_path):
    """A small prepared text."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 60)
    options = ["--input", str(tmp_path / "text.txt"), "--split", "80/10/10", "--dest", str(tmp_path / "data")]
    script_cli.load("prepare").main(["text", *options])
    return tmp_path / "data"


def test_command_scores_every_symbol(prepared, tmp_path, capsys):
    report = tmp_path / "ngram.json"
    main([str(prepared), "--max-order", "5", "--json", str(report)])
    printed = capsys.readouterr().out
    figures = json.loads(report.read_text())
    assert [row["order"] for row in figures["orders"]] == [1, 2, 3, 4, 5]
    bpc = [row["bpc"]["test"] for row in figures["orders"]]
    assert bpc == sorted(bpc, reverse=True)
    assert f"{bpc[-1]:.4f}" in printed and "(100.00 %)" in printed


def test_a_split_of_unknown_symbols_is_refused(tmp_path):
    for name, text in (("a", "abc abc\n"), ("z", "zzz")):
        (tmp_path / name).write_text(text)
    options = ["--train", str(tmp_path / "a"), "--valid", str(tmp_path / "z"), "--test", str(tmp_path / "a")]
    script_cli.load("prepare").main(["text", *options, "--dest", str(tmp_path / "data")])
    with pytest.raises(UsageError, match="no symbol of the split valid occurs in the training text"):
        main([str(tmp_path / "data"), "--max-order", "2"])
