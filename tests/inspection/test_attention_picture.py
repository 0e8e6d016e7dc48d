"""The attention of a translation: words of pieces, and the picture."""

import numpy as np
import pytest
from helpers import script_cli, tiny_translation
from helpers.script_cli import error_of
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.inspection.attention import Attention, join_words, word_attention
from rhhn_fairseq.inspection.attention_picture import draw_attention

plot_attention = script_cli.load("plot_attention")


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


@pytest.mark.parametrize("words, rows", [(("3.5", "kg"), 12), (tuple("abcdefghijklmnop"), 2)])
def test_words_and_title_lie_inside_of_the_picture(words, rows):
    source = tuple(f"▁{word}" for word in words)
    target = tuple(f"▁{'long' * 12}{n}" for n in range(rows))
    figure = draw_attention(Attention(source, target, np.full((len(source), rows), 1 / len(source))))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes, bar = figure.axes
    labels = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    for text in (axes.title, *labels):
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0 and box.y1 <= figure.bbox.y1
    # The colour bar is below the words.
    assert bar.get_window_extent().y1 < min(label.get_window_extent().y0 for label in labels)
    assert max(len(label.get_text()) for label in labels) == 20


@pytest.mark.slow
def test_a_trained_model_looks_at_the_word_it_translates(tmp_path, capsys):
    data = tiny_translation.prepare(tmp_path)
    checkpoint = tiny_translation.train(data, tmp_path / "saved")
    line = [str(checkpoint), "--text", "the cat seven", "--output", str(tmp_path / "a.png")]
    plot_attention.main(line)
    arrays = np.load(tmp_path / "a.npz")
    assert capsys.readouterr().out.startswith("le chat sept\n")
    assert arrays["source"].tolist()[:3] == ["the", "cat", "seven"]
    assert arrays["target"].tolist()[:3] == ["le", "chat", "sept"]
    np.testing.assert_allclose(arrays["weights"].sum(axis=0), 1.0, atol=1e-5)
    run = lambda *words: cli.run(lambda: plot_attention.main(list(words)))  # noqa: E731
    line[2] = " "
    assert "has nothing to translate" in error_of(run, capsys, *line)
