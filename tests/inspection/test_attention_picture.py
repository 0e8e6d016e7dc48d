"""The attention of a translation: words of pieces, and the picture."""

import numpy as np
import pytest
from helpers import script_cli, tiny_translation
from helpers.script_cli import error_of

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.inspection.attention import Attention, join_words, word_attention
from rhhn_fairseq.inspection.pictures import draw_attention

plot = script_cli.load("plot")


def test_pieces_are_joined_to_words():
    words, numbers = join_words(["▁a", "▁ca", "t", "</s>"])
    assert words == ["a", "cat", "</s>"] and numbers.tolist() == [0, 1, 1, 2]
    # Without a sign before the first piece, and with the sign by itself.
    assert join_words(["ca", "t", "▁", "dog"])[0] == ["cat", "dog"]
    # Ends of sentences are words, wherever they stand.
    assert join_words(["</s>", "ca", "t", "</s>"])[0] == ["</s>", "cat", "</s>"]


def test_weights_of_source_pieces_are_added_and_of_target_pieces_averaged():
    weights = np.array([[0.1, 0.4, 0.0], [0.2, 0.4, 0.5], [0.7, 0.2, 0.5]])
    source, target, joined = word_attention(Attention(("▁ca", "t", "</s>"), ("▁chat", "te", "</s>"), weights))
    assert (source, target) == (["cat", "</s>"], ["chatte", "</s>"])
    np.testing.assert_allclose(joined, [[(0.3 + 0.8) / 2, 0.5], [(0.7 + 0.2) / 2, 0.5]])


def test_the_picture_has_a_column_for_each_source_word():
    weights = np.array([[0.9, 0.2], [0.1, 0.3], [0.0, 0.5]])
    axes, _ = draw_attention(Attention(("▁a", "▁b", "</s>"), ("▁c", "</s>"), weights)).axes
    np.testing.assert_array_equal(axes.images[0].get_array(), weights.T)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "</s>"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "</s>"]


@pytest.mark.slow
def test_a_trained_model_looks_at_the_word_it_translates(tmp_path, capsys):
    data = tiny_translation.prepare(tmp_path)
    checkpoint = tiny_translation.train(data, tmp_path / "saved")
    line = [str(checkpoint), "--text", "the cat seven", "--output", str(tmp_path / "a.png")]
    plot.main(["attention", *line])
    arrays = np.load(tmp_path / "a.npz")
    assert capsys.readouterr().out.startswith("le chat sept\n")
    assert arrays["source"].tolist()[:3] == ["the", "cat", "seven"]
    assert arrays["target"].tolist()[:3] == ["le", "chat", "sept"]
    np.testing.assert_allclose(arrays["weights"].sum(axis=0), 1.0, atol=1e-5)
    run = lambda *words: cli.run(lambda: plot.main(["attention", *words]))  # noqa: E731
    line[2] = " "
    assert "has nothing to translate" in error_of(run, capsys, *line)
