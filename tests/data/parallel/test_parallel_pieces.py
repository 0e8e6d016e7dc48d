"""Learning pieces and encoding with them: sizes, determinism, order, what the pieces cannot spell."""

import re
from collections import Counter
from itertools import chain

import pytest
from fairseq.data import Dictionary, data_utils
from helpers.parallel_cli import lines_of, sentences

from rhhn_fairseq.data.parallel import encoding, pieces
from rhhn_fairseq.data.parallel.encoding import encode_texts
from rhhn_fairseq.data.parallel.pieces import PiecesConfig, load_pieces, train_pieces


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The two sides of a small training text."""
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / "train.en", folder / "train.fr"]
    for path, side in zip(paths, zip(*sentences(300), strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def model(texts, tmp_path_factory):
    """The folder of a model with 59 pieces."""
    folder = tmp_path_factory.mktemp("pieces")
    train_pieces(texts, 300, PiecesConfig(vocab_size=60), folder)
    return folder


def learn(texts, folder, **options):
    folder.mkdir()
    result = train_pieces(texts, 300, PiecesConfig(**options), folder)
    return (folder / "pieces.model").read_bytes(), result


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_learning_is_deterministic_and_the_size_counts_fairseqs_specials(texts, tmp_path, model_type):
    options = {"vocab_size": 70, "model_type": model_type}
    first, result = learn(texts, tmp_path / "first", **options)
    assert result == {"sentences": 600}
    assert learn(texts, tmp_path / "second", **options)[0] == first
    processor = load_pieces(tmp_path / "first")
    assert processor.vocab_size() == 69
    listed = [line.split("\t")[0] for line in lines_of(tmp_path / "first" / "pieces.vocab")]
    assert listed == [processor.id_to_piece(index) for index in range(69)]
    assert listed[:3] == ["<unk>", "<s>", "</s>"]


@pytest.mark.parametrize(("limit", "expected"), [(2, [299]), (6, [99, 199, 299]), (1000, range(300))])
def test_the_sample_is_spread_evenly_and_both_sides_of_a_pair_are_in_it(texts, limit, expected):
    take = min(300, limit // 2)
    sample = list(pieces._sample(texts, 300, take))
    pairs = sentences(300)
    assert sample == [line for number in expected for line in pairs[number]]


def test_digits_rare_characters_and_long_sentences(tmp_path):
    """Digits stay together unless told otherwise, and sentences of any length are learnt from."""
    paths = [tmp_path / "train.en", tmp_path / "train.fr"]
    lines = ["the year 1984 and the year 1985"] * 100 + ["a word \u00e9", "the word \u03a9 " * 400]
    for path in paths:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def learnt(**options):
        folder = tmp_path / str(options)
        folder.mkdir()
        config = {"vocab_size": 40, "model_type": "bpe", "character_coverage": 1.0, **options}
        train_pieces(paths, len(lines), PiecesConfig(**config), folder)
        processor = load_pieces(folder)
        return [processor.id_to_piece(index) for index in range(3, processor.vocab_size())]

    plain = learnt()
    assert "\u00e9" in plain and "\u03a9" in plain and any("98" in piece for piece in plain)
    assert not any(re.search(r"\d\d", piece) for piece in learnt(split_digits=True))
    assert "\u00e9" not in learnt(character_coverage=0.98)


def subsets(texts, tmp_path, awkward):
    (tmp_path / "test.en").write_bytes("".join(f"{line}\n" for line in awkward).encode())
    (tmp_path / "test.fr").write_bytes(b"\n" * len(awkward))
    return {
        "train": dict(zip(("en", "fr"), texts, strict=True)),
        "test": {language: tmp_path / f"test.{language}" for language in ("en", "fr")},
    }


AWKWARD = [
    "a man and the dog",
    "",
    "   ",
    "漢字 and 漢",
    "one\u2028line\x85still\x1cone\x0cand\rso",
    "<s> <pad> </s> <unk> ▁ \u2581a",
    "\ufeffbom \x07bell \U0010ffff",
    "a " * 10_000,
    "x" * 5_000,
]


def test_every_line_stays_and_is_cut_as_sentencepiece_cuts_it(texts, model, tmp_path, monkeypatch):
    # Many small blocks.
    monkeypatch.setattr(encoding, "_BLOCK_BYTES", 300)
    found, files = [], []
    for workers in (1, 2):
        folder = tmp_path / f"{workers} workers"
        folder.mkdir()
        found.append(encode_texts(subsets(texts, tmp_path, AWKWARD), model, folder, workers))
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1] and files[0] == files[1]
    counts = found[0]
    processor, dictionary = load_pieces(model), Dictionary.load(str(folder / "dict.en.txt"))
    dataset = data_utils.load_indexed_dataset(str(folder / "test.en-fr.en"), dictionary)
    cut = [processor.encode(text) for text in AWKWARD]
    known = [[processor.id_to_piece(index) for index in pieces] for pieces in cut]
    assert [[dictionary[index] for index in item] for item in dataset] == [[*line, "</s>"] for line in known]
    tokens, unknown = sum(map(len, cut)), sum(line.count("<unk>") for line in known)
    assert counts["test"]["en"] == {"sentences": 9, "tokens": tokens + 9, "unknown": unknown}
    assert counts["test"]["fr"] == {"sentences": 9, "tokens": 9, "unknown": 0}
    assert unknown > 0 and counts["train"]["en"]["sentences"] == 300
    seen = Counter(chain.from_iterable(processor.encode(line) for text in texts for line in lines_of(text)))
    assert dictionary.count[dictionary.nspecial :] == [seen[index] for index in range(3, 59)]
