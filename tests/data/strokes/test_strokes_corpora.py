"""rhhn prepare, of handwriting: every corpus, what is written, and what is refused in one line."""

import hashlib
import shutil
import tarfile
import zipfile

import numpy as np
import pytest
from helpers.in_process import train
from helpers.strokes_cli import (
    FORMS,
    contents,
    error_of,
    line_xml,
    manifest_of,
    object_array,
    random_rows,
    run,
    write_iam,
)

from rhhn_fairseq.data.strokes import iam, stroke3
from rhhn_fairseq.data.strokes.points import to_strokes
from rhhn_fairseq.data.strokes.store import StrokeManifest, StrokeSplit
from rhhn_fairseq.data.strokes.svg import read_svg


def _lists(folder, train=20, valid=4, test=4, points=6):
    """A .npz file of random lines in the stroke-3 format."""
    counts = {"train": train, "valid": valid, "test": test}
    splits = {
        split: object_array([random_rows(points, 100 * k + seed) for seed in range(count)])
        for k, (split, count) in enumerate(counts.items())
        if count
    }
    np.savez(folder / "lists.npz", **splits)
    return folder / "lists.npz"


def test_the_default_is_hershey(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("--lines", 30) == 0
    out = capsys.readouterr().out
    assert out.startswith("prepared: data-bin/hershey\n")
    assert "words in the Hershey fonts futural (seed 1)" in out
    manifest = manifest_of("data-bin/hershey")
    assert {split: counts["lines"] for split, counts in manifest["splits"].items()} == (
        {"train": 30, "valid": 1, "test": 1}
    )
    split = StrokeSplit("data-bin/hershey", "train")
    assert all(split.texts) and set("".join(split.texts)) == set(manifest["symbols"])
    letters = sum(map(len, split.texts))
    assert manifest["points_per_symbol"] == pytest.approx(split.sizes.sum() / letters)


def test_hershey_lines_follow_from_the_seed(tmp_path):
    for name, options in (("a", []), ("b", []), ("more", ["--lines", 40]), ("other", ["--seed", 2])):
        assert run("hershey", "--lines", 20, "--dest", tmp_path / name, *options) == 0
    one, same = (contents(tmp_path / name) for name in "ab")
    assert one == same
    assert contents(tmp_path / "other")["train.points.npy"] != one["train.points.npy"]
    more, first = StrokeSplit(tmp_path / "more", "train"), StrokeSplit(tmp_path / "a", "train")
    assert more.texts[:20] == first.texts
    np.testing.assert_array_equal(more.points(19), first.points(19))
    assert StrokeSplit(tmp_path / "a", "valid").texts[0] != first.texts[0]


def test_hershey_draws_what_the_font_has(tmp_path):
    """Without slant, size and jitter, points lie on the font's lines and strokes end where they end."""
    from HersheyFonts import HersheyFonts

    plain = ["--slant", 0, "--size", 0, "--jitter", 0, "--lines", 5, "--max-words", 1, "--fonts", "futural"]
    assert run("hershey", *plain, "--dest", tmp_path / "data") == 0
    font = HersheyFonts()
    font.load_default_font("futural")
    font.normalize_rendering(100)
    split = StrokeSplit(tmp_path / "data", "train")
    for index in range(5):
        strokes = [np.array(list(stroke)) for stroke in font.strokes_for_text(split.texts[index])]
        ends = [end for stroke in strokes for end in (stroke[0], stroke[-1])]
        drawn = to_strokes(split.points(index))
        assert len(drawn) <= len(strokes)
        for stroke in drawn:
            for place in (stroke[0], stroke[-1]):
                # The font's y grows upwards; coordinates count from the first point, stored as float32.
                found = place * (1, -1) + strokes[0][0]
                assert min(np.abs(found - end).max() for end in ends) < 1e-3


def test_hershey_takes_words_from_a_file(tmp_path, capsys):
    (tmp_path / "words.txt").write_text("zig\nzag")
    known = ["--words", tmp_path / "words.txt", "--letters", 0]
    assert run(*known, "--lines", 10, "--dest", tmp_path / "data") == 0
    words = {
        word.strip(",.?!").lower()
        for text in StrokeSplit(tmp_path / "data", "train").texts
        for word in text.split()
    }
    assert words == {"zig", "zag"}
    (tmp_path / "words.txt").write_text("zig é")
    assert "'é' has characters that no Hershey font has" in error_of(
        capsys, "--words", tmp_path / "words.txt"
    )


def test_iam_splits_follow_the_benchmark(tmp_path, capsys):
    source = write_iam(tmp_path / "iam")
    small = ["--min-points", 2]
    assert run("iam", "--from-dir", source, "--dest", tmp_path / "data", *small) == 0
    for number, (split, form) in enumerate(
        zip(("train", "valid", "valid_second", "test"), FORMS.values(), strict=True)
    ):
        found = StrokeSplit(tmp_path / "data", split)
        assert found.names == [f"{form}-01", f"{form}-02"]
        assert found.texts == [f"first of {number}", f"second of {number}"]
        strokes = to_strokes(found.points(1))
        assert [len(stroke) for stroke in strokes] == [4, 2]
        # From (100, 50 + number) to the second line's last point (153, 60).
        assert strokes[1][-1].tolist() == [53, 10 - number]
    assert StrokeManifest.load(tmp_path / "data").splits == ("train", "valid", "valid_second", "test")
    model = ["--arch", "handwriting", "--hidden-size", 4, "--mixtures", 1, "--max-epoch", 1]
    log = train(tmp_path / "data", *model, "--valid-subset", "valid,valid_second", "--cpu", "--no-save")
    assert any("valid_second" in message for message in log.messages)
    options = ["--protocol", "graves", "--dest", tmp_path / "graves", *small]
    assert run("iam", "--from-dir", source, *options) == 0
    counts = manifest_of(tmp_path / "graves")["splits"]
    assert {split: count["lines"] for split, count in counts.items()} == {"train": 6, "valid": 2}


def test_iam_is_the_same_from_archives(tmp_path, capsys):
    source = write_iam(tmp_path / "iam")
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in ("lineStrokes", "ascii"):
        with tarfile.open(packed / f"{name}-all.tar.gz", "w:gz") as archive:
            archive.add(source / name, name)
    with zipfile.ZipFile(packed / "task1.zip", "w") as archive:
        for name in FORMS:
            archive.write(source / f"{name}.txt", f"task1/{name}.txt")
    # What is not looked at need not be an archive at all.
    (packed / "original-xml-all.tar.gz").write_text("no archive")
    for name, folder in (("plain", source), ("packed", packed)):
        options = ["--dest", tmp_path / f"from-{name}", "--min-points", 2]
        assert run("iam", "--from-dir", folder, *options) == 0
    assert contents(tmp_path / "from-plain") == contents(tmp_path / "from-packed")
    # Unpacked beside its archive, a file counts once.
    shutil.copytree(source / "lineStrokes", packed / "lineStrokes")
    capsys.readouterr()
    assert run("iam", "--from-dir", packed, *options) == 0
    assert capsys.readouterr().out.startswith("already prepared")


def test_iam_counts_what_does_not_fit(tmp_path, capsys):
    source = write_iam(tmp_path / "iam")
    (source / "lineStrokes" / "c03-001a-01.xml").write_text(line_xml([[(0, 0), (1, 1)]]))
    (source / "ascii" / "a01" / "a01-000" / "a01-000u.txt").write_text("CSR:\n\nonly one%%%%%%%%%%%")
    (source / "trainset.txt").write_text("a01-000u\nx99-000y\n")
    assert run("iam", "--from-dir", source, "--dest", tmp_path / "data", "--min-points", 2) == 0
    out = capsys.readouterr().out
    for words in ("lines in no set", "entries of sets without a line", "lines without a text"):
        assert f"{words}: 1\n" in out
    found = StrokeSplit(tmp_path / "data", "train")
    assert found.texts == ["only one", ""]
    assert manifest_of(tmp_path / "data")["splits"]["train"]["with_text"] == 1


def test_iam_defaults_drop_short_lines_and_long_steps(tmp_path, capsys):
    source = write_iam(tmp_path / "iam")
    drawn = [[(k % 7, k % 5) for k in range(300)], [(5000, 0)], [(0, 1)]]
    for form in FORMS.values():
        (path,) = source.glob(f"lineStrokes/*/*/{form}-01.xml")
        path.write_text(line_xml(drawn))
    assert run("iam", "--from-dir", source, "--dest", tmp_path / "data") == 0
    counts = manifest_of(tmp_path / "data")["splits"]["train"]
    # Without the steps out and back the first line has 300 points left; the second has six.
    assert counts["dropped"] == {"short": 1, "long": 0, "flat": 0}
    assert counts["outliers"] == 2


# Each entity is ten of the one before, so the last would be 10 GB of text.
ENTITIES = (
    '<!DOCTYPE a [<!ENTITY e0 "aaaaaaaaaa">'
    + "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    + "]><a>&e9;</a>"
)


@pytest.mark.parametrize(
    "content, reason",
    [
        ("<StrokeSet><Stroke>", "is not well-formed XML"),
        (line_xml([[(1, 2), ("nan", 3)]]), "point 1 is not finite"),
        (line_xml([[(1, 2)]]).replace("ISO-8859-1", "no-such-code"), "is not well-formed XML"),
        ("<a>" * 200_000 + "</a>" * 200_000, "has no StrokeSet"),
        (ENTITIES, "is not well-formed XML"),
    ],
    ids=range(5),
)
def test_damaged_iam_lines(tmp_path, capsys, content, reason):
    source = write_iam(tmp_path / "iam")
    (path,) = source.glob("lineStrokes/*/*/a01-001w-02.xml")
    path.write_text(content)
    message = error_of(capsys, "iam", "--from-dir", source, "--dest", tmp_path / "data")
    assert str(path) in message and reason in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iam"]


def test_iam_archives_that_cannot_be_unpacked(tmp_path, capsys, monkeypatch):
    source = write_iam(tmp_path / "iam")
    folder = tmp_path / "packed"
    folder.mkdir()
    command = ["iam", "--from-dir", folder, "--dest", tmp_path / "data"]
    path = folder / "lineStrokes.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source / "trainset.txt", "trainset.txt")
    content = path.read_bytes()
    for cut in (2, 30, len(content) - 10):
        path.write_bytes(content[:cut])
        assert "lineStrokes.zip: " in error_of(capsys, *command)
    path.write_bytes(content)
    monkeypatch.setattr(iam, "LARGEST", 5)
    assert "lineStrokes.zip:trainset.txt: has more than 5 bytes" in error_of(capsys, *command)


def test_incomplete_iam(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    options = ["--dest", tmp_path / "data", "--min-points", 2]
    assert "has no lineStrokes" in error_of(capsys, "iam", "--from-dir", empty, *options)
    source = write_iam(tmp_path / "iam")
    (source / "testset_t.txt").unlink()
    assert "has no testset_t.txt; expected" in error_of(capsys, "iam", "--from-dir", source, *options)
    (source / "testset_t.txt").write_text(FORMS["trainset"])
    message = error_of(capsys, "iam", "--from-dir", source, *options)
    assert "a01-000u-01: is in two of the benchmark's sets" in message
    (source / "testset_t.txt").write_text("")
    assert "the valid_second split has no lines" in error_of(capsys, "iam", "--from-dir", source, *options)


def test_stroke3_lists(tmp_path, capsys):
    path = _lists(tmp_path)
    assert run("stroke3", "--input", path, "--dest", tmp_path / "data") == 0
    out = capsys.readouterr().out
    # Six rows and the origin they are drawn from.
    assert "train        20         140         0        0        0" in out
    manifest = manifest_of(tmp_path / "data")
    assert manifest["request"]["inputs"] == [
        {
            "name": "lists.npz",
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    ]
    assert (manifest["symbols"], manifest["points_per_symbol"]) == ("", 0.0)
    for name, digest in manifest["sha256"].items():
        content = (tmp_path / "data" / name).read_bytes()
        assert (manifest["files"][name], digest) == (len(content), hashlib.sha256(content).hexdigest())
    train = StrokeSplit(tmp_path / "data", "train")
    offsets = np.concatenate([train.points(index)[1:, :2] for index in range(20)])
    np.testing.assert_allclose(manifest["statistics"]["mean"], offsets.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(manifest["statistics"]["std"], offsets.std(axis=0), rtol=1e-6)
    assert (
        run(
            "stroke3",
            "--input",
            _lists(tmp_path, test=0),
            "--dest",
            tmp_path / "data2",
            "--first-row",
            "moved",
        )
        == 0
    )
    assert manifest_of(tmp_path / "data2")["splits"].keys() == {"train", "valid"}
    assert StrokeSplit(tmp_path / "data2", "train").sizes.tolist() == [6] * 20


def test_stroke3_files_without_splits(tmp_path, capsys):
    folder = tmp_path / "lines"
    folder.mkdir()
    for number in range(10):
        np.save(folder / f"style-{number}-strokes.npy", random_rows(5 + number))
        np.save(folder / f"style-{number}-chars.npy", np.bytes_(f"line {number}"))
    np.save(folder / "plain.npy", random_rows(30).astype(np.float32))
    (folder / "plain.txt").write_text("plain line\n")
    np.save(tmp_path / "block.npy", np.stack([random_rows(6, seed) for seed in range(3)]))
    sources = ["--input", folder, tmp_path / "block.npy"]
    assert run("stroke3", *sources, "--split", "60/20/20", "--dest", tmp_path / "data") == 0
    splits = {name: StrokeSplit(tmp_path / "data", name) for name in ("train", "valid", "test")}
    assert [len(split) for split in splits.values()] == [8, 3, 3]
    texts = {n: t for split in splits.values() for n, t in zip(split.names, split.texts, strict=True)}
    assert texts["style-3-strokes"] == "line 3" and texts["plain"] == "plain line" and texts["block[2]"] == ""
    assert len(texts) == 14
    again = ["stroke3", *sources, "--split", "60/20/20", "--dest", tmp_path / "data"]
    for text, write in (
        ("style-3-chars.npy", lambda path: np.save(path, np.bytes_("changed"))),
        ("plain.txt", lambda path: path.write_text("changed\n")),
    ):
        before = (folder / text).read_bytes()
        write(folder / text)
        assert f"was prepared from other files, {text} differs" in error_of(capsys, *again)
        (folder / text).write_bytes(before)
    assert run(*again) == 0
    other = ["--split", "60/20/20", "--seed", 2, "--dest", tmp_path / "other"]
    assert run("stroke3", *sources, *other) == 0
    assert StrokeSplit(tmp_path / "other", "train").names != splits["train"].names
    # Of three lines each split has one, whatever the percentages.
    for name, split in (("even", []), ("skewed", ["--split", "1/1/98"])):
        assert run("stroke3", "--input", tmp_path / "block.npy", *split, "--dest", tmp_path / name) == 0
        assert {key: values["lines"] for key, values in manifest_of(tmp_path / name)["splits"].items()} == (
            {"train": 1, "valid": 1, "test": 1}
        )


DRAWING = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 90">
<g transform="translate(10 20) scale(2)"><path d="M0 0 a10 10 0 0 1 20 0 M30 0 v0"/></g>
<polyline points="10,60 12,60 14,61"/><text>no stroke</text><line x1="0" y1="48" x2="0" y2="72"/></svg>"""
# The same with strokes, on a page, and beside a line that is hidden.
PAGE = '<rect width="90" height="90" fill="white" stroke="none"/><path d="M0 0L9 9" visibility="hidden"/>'
ON_PAGE = DRAWING.replace('90 90">', f'90 90"><g stroke="black">{PAGE}').replace("</svg>", "</g></svg>")


def test_stroke3_reads_svg(tmp_path):
    """A half circle, a dot, a polyline whose points stay, and a straight line, in a folder with a text."""
    folder = tmp_path / "drawings"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.svg").write_text(DRAWING)
    (folder / "b.txt").write_text("an arch")
    assert run("stroke3", "--input", folder, "--dest", tmp_path / "data") == 0
    split = StrokeSplit(tmp_path / "data", "train")
    points = split.points(0)
    start = np.array([10.0, 20.0])
    arch, dot, steps, line = (stroke + start for stroke in to_strokes(points))
    np.testing.assert_allclose(np.hypot(*(arch - (30, 20)).T), 20, atol=1e-5)
    assert len(arch) > 20 and arch[len(arch) // 2, 1] < 1
    np.testing.assert_allclose(dot, [(70, 20)] * 2, atol=1e-4)
    np.testing.assert_allclose(steps, [(10, 60), (12, 60), (14, 61)], atol=1e-4)
    # A twenty-fourth of the height, which goes from 0 to 72.
    np.testing.assert_allclose(np.diff(line[:, 1]), 3, atol=1e-4)
    texts = [
        text for name in ("train", "valid", "test") for text in StrokeSplit(tmp_path / "data", name).texts
    ]
    assert sorted(filter(None, texts)) == ["an arch"]
    (tmp_path / "page.svg").write_text(ON_PAGE)
    np.testing.assert_allclose(read_svg(tmp_path / "page.svg"), points, atol=1e-5)


@pytest.mark.parametrize(
    "shape, low, high",
    [
        ('<rect x="10" y="10" width="100" height="50" transform="rotate(90)"/>', (-60, 10), (-10, 110)),
        ('<circle cx="10" cy="10" r="5" transform="scale(-1 1)"/>', (-15, 5), (-5, 15)),
        ('<ellipse cx="10" cy="0" rx="5" ry="2" transform="matrix(0 1 1 0 0 0)"/>', (-2, 5), (2, 15)),
    ],
)
def test_svg_turns_every_shape(tmp_path, shape, low, high):
    drawing = f'<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0L1 0"/>{shape}</svg>'
    (tmp_path / "a.svg").write_text(drawing)
    _, outline = to_strokes(read_svg(tmp_path / "a.svg"))
    np.testing.assert_allclose([outline.min(0), outline.max(0)], [low, high], atol=0.1)


def test_refused_svg(tmp_path, capsys):
    parts = "".join(f'<g id="g{k + 1}"><use href="#g{k}"/><use href="#g{k}"/></g>' for k in range(40))
    prefixed = parts.replace("<", "<s:").replace("<s:/", "</s:")
    hidden = f'<s:svg xmlns:s="http://www.w3.org/2000/svg">{prefixed}</s:svg>'
    refused = {
        "<svg/>": "has no points",
        f"<svg>{parts}</svg>": "has <use> elements",
        hidden: "has <use> elements",
    }
    for content, line in refused.items():
        (tmp_path / "a.svg").write_text(content)
        assert line in error_of(capsys, "stroke3", "--input", tmp_path / "a.svg", "--dest", tmp_path / "data")


def test_refused_stroke3(tmp_path, capsys):
    def refused(content, *options):
        path = tmp_path / "bad.npz"
        np.savez(path, **content)
        message = error_of(capsys, "stroke3", "--input", path, "--dest", tmp_path / "data", *options)
        path.unlink()
        assert not list(tmp_path.iterdir())
        return message

    good = object_array([random_rows(5), random_rows(6)])
    assert "has arrays weights, expected train, valid and test" in refused({"weights": np.zeros(3)})
    assert "the valid split has no lines, dropped were none" in refused({"train": good})
    assert "bad.npz:valid: is an array of float64 of shape (4,)" in refused(
        {"train": good, "valid": np.zeros(4)}
    )
    nans = object_array([random_rows(5), np.full((4, 3), np.nan)])
    assert "bad.npz:valid[1]: point 0 is not finite" in refused({"train": good, "valid": nans})
    same = object_array([np.array([[0, 0, 0], [1, 3, 1]])] * 3)
    assert "--normalise standard: dx is the same" in refused({"train": same, "valid": same})
    huge = object_array([np.array([[0, 0, 0], [1e39, 3, 1], [0, 0, 1]])])
    assert "too large to be stored" in refused({"train": huge, "valid": huge})


def test_preparing_again(tmp_path, capsys):
    path, dest = _lists(tmp_path), tmp_path / "data"
    options = ["stroke3", "--input", path, "--dest", dest]
    assert run(*options) == 0
    before = contents(dest)
    capsys.readouterr()
    assert run(*options) == 0
    assert capsys.readouterr().out.startswith(f"already prepared: {dest}")
    assert "was prepared with min_points 2, not 3" in error_of(capsys, *options, "--min-points", 3)
    _lists(tmp_path, train=21)
    assert "lists.npz differs" in error_of(capsys, *options)
    assert contents(dest) == before
    assert run(*options, "--force", "--min-points", 7) == 0
    assert manifest_of(dest)["splits"]["train"]["lines"] == 21
    content = (dest / "train.points.npy").read_bytes()
    (dest / "train.points.npy").write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    assert "train.points.npy: was changed since" in error_of(capsys, *options, "--min-points", 7)
    (dest / "train.points.npy").write_bytes(b"")
    assert "train.points.npy: is missing or has not" in error_of(capsys, *options, "--min-points", 7)
    (dest / "mine.txt").write_text("a note")
    assert "holds 'mine.txt', which does not belong to a prepared corpus" in error_of(
        capsys, *options, "--force"
    )


def test_statistics_of_another_directory(tmp_path, capsys):
    path = _lists(tmp_path)
    assert run("stroke3", "--input", path, "--dest", tmp_path / "one") == 0
    made = ["hershey", "--lines", 5, "--dest", tmp_path / "two", "--statistics-of"]
    assert run(*made, tmp_path / "one") == 0
    assert manifest_of(tmp_path / "two")["statistics"] == manifest_of(tmp_path / "one")["statistics"]
    capsys.readouterr()
    assert run(*made, tmp_path / "one") == 0
    assert capsys.readouterr().out.startswith("already prepared")
    assert "--normalise has no effect" in error_of(capsys, *made, tmp_path / "one", "--normalise", "none")


def test_real_kanji(data_dir, tmp_path, capsys):
    path = data_dir / "kanji" / "short_kanji.npz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    assert run("stroke3", "--input", path, "--dest", tmp_path / "kanji") == 0
    counts = manifest_of(tmp_path / "kanji")["splits"]
    assert {split: (c["lines"], c["points"]) for split, c in counts.items()} == {
        "train": (10000, 416111),
        "valid": (600, 26055),
        "test": (500, 21293),
    }
    # Strokes are drawn downwards, so more offsets have y above 0.
    assert manifest_of(tmp_path / "kanji")["statistics"]["mean"][1] > 0


def test_texts_that_windows_wrote(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffhello\r\nworld\r\n".encode())
    assert stroke3._text(tmp_path / "a.txt") == "hello\nworld"
