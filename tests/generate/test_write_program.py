"""The program that writes: its checkpoints, the lines it reads first, and what it refuses."""

from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers import script_cli
from helpers.strokes_cli import random_rows
from helpers.tiny_handwriting import NORMALISATION, SYMBOLS, build, disturb
from helpers.written_pictures import SVG, svg_lines

from rhhn_fairseq.cli import plot
from rhhn_fairseq.cli.running import run as run_program
from rhhn_fairseq.cli.write import read_prime
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.strokes.cleaning import CleaningConfig
from rhhn_fairseq.data.strokes.prepare import prepare
from rhhn_fairseq.data.strokes.store import StrokeSplit
from rhhn_fairseq.data.strokes.stroke3 import stroke3
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.loading import load_handwriting

write_script = script_cli.load("write")


def test_checkpoints_are_loaded_without_data(trained):
    model, data = load_handwriting(str(trained / "window.pt"))
    assert not model.training and model.symbols == SYMBOLS and model.normalisation == NORMALISATION
    assert data == str(trained / "data")
    expected = disturb(build("hyperlstm", 2), 0.1).state_dict()
    for key, part in model.state_dict().items():
        assert torch.equal(part, expected[key]), key


def test_primes(trained, tmp_path):
    data = str(trained / "data")
    split = StrokeSplit(data, "train")
    line = read_prime("train:3", data)
    assert (line.name, line.text) == (split.names[3], split.texts[3])
    np.testing.assert_array_equal(line.points, split.points(3))
    assert read_prime("train:3", data, text="b", points=4).text == "b"
    # The text of a part of a line is not known.
    first = read_prime("train:3", data, points=4)
    assert len(first.points) == 4 and first.text is None
    assert read_prime("train:3", data, points=len(line.points)).text == line.text
    np.save(tmp_path / "mine.npy", random_rows(5))
    (tmp_path / "mine.txt").write_text("head\n")
    line = read_prime(str(tmp_path / "mine.npy"), None, y_up=True)
    assert line.text == "head" and line.points[1].tolist() == (random_rows(5)[0] * (1, -1, 1)).tolist()
    for place, options, reason in (
        ("train:3", {"data": None}, "--prime train:3: name the data directory with --data"),
        ("train:99", {}, "--prime train:99: the train split of .* has lines 0 to 23"),
        ("dev:0", {}, "the directory has these splits of handwriting: test, train, valid"),
        ("train:0", {"points": 0}, "--prime-points 0: the line has"),
    ):
        with pytest.raises(UsageError, match=reason):
            read_prime(place, **{"data": data} | options)
    np.save(tmp_path / "two.npy", np.stack([random_rows(5)] * 2))
    with pytest.raises(UsageError, match="two.npy: expected one line of handwriting"):
        read_prime(str(tmp_path / "two.npy"), None)


def test_a_primed_file_is_read_and_scaled_as_the_corpus(tmp_path):
    rows = [random_rows(length) * (7, 7, 1) for length in (5, 6, 8)]
    np.savez(tmp_path / "lines.npz", **{name: [row] for name, row in zip(SPLITS, rows, strict=True)})
    corpus = stroke3([tmp_path / "lines.npz"], first_row="moved", y_up=True)
    prepare(corpus, tmp_path / "data", CleaningConfig(scale="step"))
    np.save(tmp_path / "new.npy", rows[2])
    line = read_prime(str(tmp_path / "new.npy"), str(tmp_path / "data"))
    stored = StrokeSplit(tmp_path / "data", "test").points(0)
    np.testing.assert_allclose(line.points, stored, rtol=1e-6)
    np.save(tmp_path / "dot.npy", rows[2][:1] * 0)
    with pytest.raises(UsageError, match="dot.npy: is too short to be scaled as the lines of .*data"):
        read_prime(str(tmp_path / "dot.npy"), str(tmp_path / "data"))


def _program(*arguments) -> int:
    return run_program(lambda: write_script.main([str(argument) for argument in arguments]))


def test_the_program_writes(trained, tmp_path, capsys):
    output = tmp_path / "written"
    options = ["--lines", 2, "--points", 15, "--bias", 0.5]
    assert _program(trained / "plain.pt", *options, "--output", output) == 0
    *written, changes = capsys.readouterr().out.splitlines()
    assert written == [f"written: {output}.svg", f"written: {output}.png"]
    assert changes.startswith("the weights change by 0.0")
    first = output.with_suffix(".svg").read_bytes()
    assert _program(trained / "plain.pt", *options, "--output", output, "--prime", f"{output}.svg") == 1
    assert f"{output}.svg: is the file" in capsys.readouterr().err
    assert _program(trained / "plain.pt", *options, "--output", output) == 0
    assert output.with_suffix(".svg").read_bytes() == first
    # The strips of two lines, and the colour bar.
    images = list(ElementTree.fromstring(first).iter(f"{SVG}image"))
    assert len(images) == 3
    capsys.readouterr()
    assert _program(trained / "plain.pt", *options, "--no-changes", "--output", tmp_path / "p.svg") == 0
    assert "change" not in capsys.readouterr().out
    assert not list(ElementTree.parse(tmp_path / "p.svg").iter(f"{SVG}image"))


def test_the_program_writes_a_text_after_a_line(trained, tmp_path, capsys):
    texts = StrokeSplit(trained / "data", "train").texts
    known = next(number for number, text in enumerate(texts) if set(text) <= set(SYMBOLS))
    known_name = StrokeSplit(trained / "data", "train").names[known]
    options = ["--text", "abe", "--text", "bead", "--lines", 1, "--points", 12, "--prime", f"train:{known}"]
    output = tmp_path / "w.svg"
    assert _program(trained / "window.pt", *options, "--output", output) == 0
    assert "#d55e00" in svg_lines(output)
    assert "not finished within --points: 'abe'" in capsys.readouterr().err
    assert _program(trained / "window.pt", *options, "--prime-text", "a\u2603", "--output", output) == 1
    refused = capsys.readouterr().err
    assert refused.startswith(f"error: {known_name}: contains '\u2603', which did not occur in training")


def test_the_program_refuses_in_one_line(trained, tmp_path, capsys):
    def refused(*arguments):
        capsys.readouterr()
        assert _program(*arguments, "--output", tmp_path / "w") == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
        assert not list(tmp_path.iterdir())
        return captured.err

    plain = trained / "plain.pt"
    assert "the model was trained without --window" in refused(plain, "--text", "a")
    assert "--text is missing" in refused(trained / "window.pt")
    assert "--y-up describes a .npy file" in refused(plain, "--prime", "train:0", "--y-up")
    state = torch.load(plain, weights_only=True)
    state["cfg"]["model"]["_name"] = "char_lm"
    torch.save(state, trained / "other.pt")
    assert "holds no handwriting model" in refused(trained / "other.pt")


def test_prepared_lines_are_drawn_in_a_grid(trained, tmp_path, capsys):
    output = tmp_path / "grid.svg"
    options = ["--lines", "5", "--columns", "2", "--seed", "3", "--output", str(output)]
    plot.main(["strokes", str(trained / "data"), *options])
    assert capsys.readouterr().out == f"written: {output} and {output.with_suffix('.npz')}\n"
    split, arrays = StrokeSplit(trained / "data", "train"), np.load(output.with_suffix(".npz"))
    numbers = [int(name.split(":")[1]) for name in arrays]
    assert len(numbers) == 5 and numbers == sorted(set(numbers))
    strokes = 0
    for number in numbers:
        np.testing.assert_array_equal(arrays[f"train:{number}"], split.points(number))
        strokes += int(split.points(number)[:, 2].sum())
    assert len(svg_lines(output)["#000000"]) == strokes
    assert f"<!-- train:{numbers[0]}  {split.texts[numbers[0]]} -->" in output.read_text()
    for change, reason in (
        (["--lines", "0"], "--lines 0: choose from 1 to 200"),
        (["--split", "dev"], "the directory has these splits of handwriting: test, train, valid"),
    ):
        with pytest.raises(UsageError, match=reason):
            plot.main(["strokes", str(trained / "data"), *options, *change])
    output.unlink()
    with pytest.raises(UsageError, match=r"its arrays would replace .*grid\.npz"):
        plot.main(["strokes", str(trained / "data"), *options])
