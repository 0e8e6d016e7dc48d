"""How much weights change over a text: against matrices made in full, as a picture, and as a page."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from helpers import script_cli
from helpers.browser import opened_page
from helpers.tiny_reader import build

from rhhn_fairseq.cells.hyper import below, naive_scaling
from rhhn_fairseq.cells.rhn import naive_rhn
from rhhn_fairseq.data.text.words import prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection import plotting, weights
from rhhn_fairseq.inspection.colours import colour_limit
from rhhn_fairseq.inspection.pictures import TEXT_ROWS, draw_weights, wrapped
from rhhn_fairseq.inspection.weights import Reading, read_text, weight_page

HYPER = dict(hyper_size=3, hyper_embed_size=2)
HIGHWAYS = dict(hyper_size=3, rhn_depth=2, main_cell="rhn", hyper_cell="rhn", hyper_map="direct")
CELLS = [
    ("hyperlstm", HYPER, ("i", "f", "g", "o")),
    ("ln_hyperlstm", HYPER | {"hyper_state": "previous"}, ("i", "f", "g", "o")),
    ("hyperrnn", HYPER, ("W",)),
    ("hyperrnn", HYPER | {"hyper_form": "full"}, ("W",)),
    ("hyperrhn", dict(hyper_size=3, rhn_depth=2), ("h1", "t1", "h2", "t2")),
    ("hyperrhn", dict(hyper_size=3, rhn_depth=2, first_step="skip"), ("h1", "t1", "h2", "t2")),
    ("hyperlstm", HYPER | {"hyper_rank": 3}, ("i", "f", "g", "o")),
    ("hyperrhn", dict(hyper_size=3, rhn_depth=2, hyper_rank=2), ("h1", "t1", "h2", "t2")),
    ("hyper", HYPER | {"hyper_cell": "gru"}, tuple(f"weight_h {gate}" for gate in range(1, 5))),
    ("hyper", HIGHWAYS, tuple(f"weight_s.{depth} {gate}" for depth in range(2) for gate in (1, 2))),
]
TEXT = "abba cd\nab < d"
plot, sample = script_cli.load("plot"), script_cli.load("sample")


def matrices_of(network, entries):
    """For each entry, the matrices that the one layer's hypernetwork generates, made in full."""
    (cell,) = network.stack.cells
    kind = type(cell).__name__
    p = {name: value.detach().numpy() for name, value in cell.named_parameters()}
    with torch.no_grad():
        x = network.embed(torch.tensor(entries)).numpy()
        matrices, state = [], None
        if kind == "HyperRHN":
            inner = {
                name.removeprefix("hyper."): value for name, value in p.items() if name.startswith("hyper.")
            }
            states, _ = naive_rhn(inner, cell.config.hyper(), x, None, None, all_layers=True)
            for by_layer in states.reshape(len(x), 2, 3):
                row = []
                for layer, state_N in enumerate(by_layer):
                    z = state_N @ p["weight_z"][layer] + p["bias_z"][layer]
                    scale = np.r_[z, z]
                    if cell.config.hyper_rank > 1:
                        left, right = np.split(state_N @ p["weight_rank"][layer] + p["bias_rank"][layer], 2)
                        scale = scale + np.outer(left, np.r_[right, right])
                    row += np.split(p[f"weight_s.{layer}"] * scale, 2, axis=1)
                matrices.append(row)
            return matrices
        for row in x:
            before = state
            _, state = cell(torch.from_numpy(row)[None, None], state)
            if kind == "Hyper":
                matrices.append(matrices_of_hyper(cell, p, state[len(cell.main.state_sizes)][0].numpy()))
                continue
            source = before if cell.config.hyper_state == "previous" else state
            e = (cell.zero_state(1, dtype=torch.float64) if source is None else source)[
                2 if kind == "HyperLSTM" else 1
            ]
            e = e[0].numpy()
            if kind == "FullHyperRNN":
                z = e @ p["weight_zh"] + p["bias_zh"]
                matrices.append([np.einsum("k,hkj->hj", z, p["weight_h"])])
                continue
            gates, Z = (4 if kind == "HyperLSTM" else 1), 2
            z = (e @ p["scaling.weight_z"])[: gates * Z] + p["scaling.bias_z"][: gates * Z]
            d = [z[n * Z : (n + 1) * Z] @ p["scaling.weight_d"][n] for n in range(gates)]
            if getattr(cell.config, "hyper_rank", 1) == 3:
                H = cell.config.hidden_size
                vectors = (e @ p["weight_rank_z"] @ p["weight_rank"] + p["bias_rank"]).reshape(10, H)
                left, right = vectors[:2], vectors[2:].reshape(2, 4, H)
                d = [d[n] + left.T @ right[:, n] for n in range(4)]
            matrices.append(
                [W * d_n for W, d_n in zip(np.split(p["weight_h"], gates, axis=1), d, strict=True)]
            )
    return matrices


def matrices_of_hyper(cell, p, e):
    """The matrices of a step of the cell ``hyper``, whose hypernetwork's output is ``e``."""
    matrices, config = [], cell.config
    for number, name in enumerate(cell.main.state_matrices()):
        own, W = below(p, f"scaling.{number}."), p[f"main.{name}"]
        scaled = cell.scaling[number].scaled
        shifted = 0 if "bias_d" in own else own["weight_z"].shape[1] // config.hyper_embed_size - scaled
        d, _ = naive_scaling(own, config, e, scaled, shifted)
        matrices += np.split(W * d[: W.shape[1]], W.shape[1] // config.hidden_size, axis=1)
    return matrices


@pytest.mark.parametrize("steps", ["all steps at once", "one"])
@pytest.mark.parametrize("cell, options, names", CELLS)
def test_changes_are_norms_of_differences_of_full_matrices(cell, options, names, steps, monkeypatch):
    if steps == "one":
        monkeypatch.setattr(weights, "FACTORS_AT_ONCE", 1)
    network, vocabulary = build(cell, **options)
    entries = prompt_indices(vocabulary, TEXT)
    reading = read_text(network, vocabulary, entries)
    assert reading.names == names and "".join(reading.symbols) == TEXT
    matrices = matrices_of(network, entries)
    expected = [
        [np.linalg.norm(new - old) for new, old in zip(now, last, strict=True)]
        for now, last in zip(matrices[1:], matrices[:-1], strict=True)
    ]
    # Float64; the full form goes through the eigenvalues of a matrix of squares, which halves the digits.
    np.testing.assert_allclose(reading.changes, expected, rtol=1e-7 if "full" in options.values() else 1e-10)
    assert reading.changes.min() > 1e-6


def test_probabilities_are_of_the_symbol_before_it_came():
    network, vocabulary = build("hyperlstm", **HYPER)
    entries = prompt_indices(vocabulary, TEXT)
    reading = read_text(network, vocabulary, entries)
    with torch.no_grad():
        y, _ = network.stack(network.embed(torch.tensor(entries)[:, None]))
        expected = network.output(y)[:-1, 0].softmax(-1)
    came = expected[torch.arange(len(TEXT)), torch.tensor(entries[1:])]
    # The sequence at once and step by step round otherwise, in float64.
    np.testing.assert_allclose(reading.probabilities, came, rtol=1e-10)
    np.testing.assert_allclose(reading.expected[:, 0], expected.max(-1).values, rtol=1e-10)
    assert reading.candidates[3][0] == vocabulary.decode([int(expected[3].argmax())])
    assert (np.diff(reading.expected) <= 0).all() and reading.expected.shape == (len(TEXT), 5)


def reading_of(text: str, names=("i", "f")) -> Reading:
    draws = np.random.default_rng(1)
    T = len(text)
    return Reading(
        tuple(text),
        tuple(names),
        draws.random((T, len(names))),
        np.full(T, 0.25),
        tuple(("a", "b") for _ in text),
        np.tile([0.5, 0.25], (T, 1)),
    )


def test_lines_of_the_picture():
    assert wrapped(tuple("ab\n\ncd"), 10) == [(0, 4), (4, 6)]
    assert wrapped(tuple("abcdefg"), 3) == [(0, 3), (3, 6), (6, 7)]
    assert wrapped(tuple("abc\n"), 3) == [(0, 3), (3, 4)]


def test_a_strip_is_under_the_line_of_its_symbols():
    reading = dataclasses.replace(reading_of("ab\ncd", ("W",)), changes=np.arange(1.0, 6.0)[:, None])
    table = np.asarray(draw_weights(reading, "title").axes[0].images[0].get_array().filled(np.nan))
    rows = np.flatnonzero(~np.isnan(table).all(axis=1))
    assert [row[~np.isnan(row)].tolist() for row in table[rows]] == [[1, 2, 3], [4, 5]]
    assert rows.tolist() == [TEXT_ROWS, 2 * TEXT_ROWS + 1]


def test_words_do_not_overlap():
    words = ("the ", "$5 ", "internationalization ", "$7 ") * 19
    figure = draw_weights(dataclasses.replace(reading_of("a" * 76), symbols=words), "title")
    figure.draw_without_rendering()
    (axes, _), boxes = figure.axes, [text.get_window_extent() for text in figure.axes[0].texts]
    for box, after in zip(boxes, boxes[1:], strict=False):
        assert box.x1 < after.x0 or after.y1 < box.y0
    assert all(axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1 for box in boxes)


def test_the_strongest_colour_is_a_percentile_above_zero():
    assert colour_limit(np.arange(101.0)) == 98.0
    assert colour_limit(np.r_[np.zeros(1000), 5.0]) == 5.0
    assert colour_limit(np.zeros(3)) == colour_limit(np.zeros((0, 2))) == 1.0


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_holds_its_numbers_and_loads_nothing():
    reading = reading_of("a</script><b>\n&ü")
    page = weight_page(reading, "<title> & more")
    data = data_of(page)
    assert "".join(data["symbols"]) == "a</script><b>\n&ü" and data["names"] == ["i", "f"]
    np.testing.assert_allclose(data["changes"], reading.changes, rtol=1e-4)
    assert data["limit"] == pytest.approx(np.percentile(reading.changes, 98))
    assert "<h1>&lt;title&gt; &amp; more</h1>" in page
    # A word, unlike a character, could close the element.
    words = dataclasses.replace(reading, symbols=("</script>",) * len(reading.symbols))
    assert data_of(weight_page(words, "words"))["symbols"] == list(words.symbols)
    assert not re.search(r"(?:src|href)=|https?:|@import|url\(", page)


def test_sampling_writes_the_page_of_its_text(tmp_path, capsys):
    out = tmp_path / "page.html"
    options = ["--pretrained", "--prompt", "def ", "--length", "30", "--seed", "3"]
    sample.main(options)
    plain = capsys.readouterr().out
    sample.main([*options, "--weights", str(out)])
    assert capsys.readouterr().out == plain
    assert "".join(data_of(out.read_text())["symbols"]) == plain[:-1]
    assert np.load(tmp_path / "page.npz")["changes"].shape == (34, 4)


def test_a_given_text_is_drawn(tmp_path, capsys):
    (tmp_path / "text.py").write_text("def f(x):\n    return x\n")
    line = ["--pretrained", "--file", str(tmp_path / "text.py"), "--output", str(tmp_path / "a.svg")]
    plot.main(["weights", *line])
    assert capsys.readouterr().out == f"written: {tmp_path}/a.svg and {tmp_path}/a.npz\n"
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    # The arrays of a picture may become those of its page, but no others.
    plotting.check_picture("--output", tmp_path / "a.html", page=True)
    (tmp_path / "mine.npz").touch()
    with pytest.raises(UsageError, match="its arrays would replace"):
        plotting.check_picture("--output", tmp_path / "mine.svg")


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1000])
def test_a_browser_shows_the_page(tmp_path, width):
    reading = reading_of("ab\n\ncd é<b>")
    (tmp_path / "a.html").write_text(weight_page(reading, "a page"), encoding="utf-8")
    with opened_page(f"file://{tmp_path}/a.html", width) as page:
        assert page.inner_text("#panel") == "No symbol is selected."
        page.hover("span[data-number='4']")
        shown = page.inner_text("#panel").split()
        assert shown[:6] == ["symbol", "c", "number", "5", "of", str(len(reading.symbols))]
        assert f"{-math.log2(0.25):.2f}" in shown and f"{reading.changes[4, 0]:.3g}"[:4] in " ".join(shown)
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#came") == "d"
        page.click("span[data-number='8']")
        assert page.inner_text("#came") == "<"
        image = page.screenshot(path=tmp_path / "a.png")
        assert len(image) > 5000
        # Nothing sticks out of the window.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
