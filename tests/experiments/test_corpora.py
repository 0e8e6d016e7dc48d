"""The corpora of the tables: a share of a text, and options that follow from files."""

import pytest

from experiments import corpora
from rhhn_fairseq.data.problems.images import T10K_SPLIT
from rhhn_fairseq.data.text.corpora import enwik8, ptb, text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_share_of_a_corpus_is_the_beginning_of_each_split(tmp_path, monkeypatch, as_bytes):
    texts = {"train": "né\n" * 30, "valid": "én\n" * 10, "test": "nn\n" * 10}
    files = {split: [tmp_path / f"{split}.txt"] for split in texts}
    for split, text in texts.items():
        files[split][0].write_text(text, encoding="utf-8")
    prepare(text_files(files, as_bytes), tmp_path / "text")
    place = corpora.prepare_share(tmp_path / "text", 0.25)
    assert place == tmp_path / "text-x0.25"
    vocabulary = CharVocabulary.load(place)
    assert vocabulary.mode == ("bytes" if as_bytes else "text")
    for split, text in texts.items():
        whole = text.encode("utf-8") if as_bytes else text
        found = vocabulary.decode(open_stream(place / split, len(vocabulary)))
        assert found == whole[: int(0.25 * len(whole))]
    # It is prepared once.
    monkeypatch.setattr(corpora.cli, "main", None)
    assert corpora.prepare_share(tmp_path / "text", 0.25) == place


def test_a_corpus_in_another_form_than_the_papers_is_refused(tmp_path):
    data = tmp_path / "data"
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text(" a b \n")
    (tmp_path / "enwik8").write_text("a b\n" * 50)
    prepare(ptb("char", tmp_path, tmp_path), data / "ptb", verify=False)
    prepare(enwik8(False, tmp_path, tmp_path), data / "enwik8", verify=False)
    with pytest.raises(UsageError, match="ptb: holds PTB char, .* symbols, not the text of the table; name"):
        corpora.prepare("ptb", data, None)
    with pytest.raises(UsageError, match="enwik8: holds enwik8 as characters, .* not the text of the table"):
        corpora.prepare("enwik8", data, None)
    prepare(ptb("raw", tmp_path, tmp_path), data / "ptb", verify=False, force=True)
    prepare(enwik8(True, tmp_path, tmp_path), data / "enwik8", verify=False, force=True)
    assert corpora.prepare("ptb", data, None) == data / "ptb"
    assert corpora.prepare("enwik8", data, None) == data / "enwik8"
    other = text_files({split: [tmp_path / "enwik8"] for split in ("train", "valid", "test")}, False)
    prepare(other, data / "ptb", force=True)
    assert corpora.prepare("ptb", data, None) == data / "ptb"


def test_the_split_of_mnist_follows_from_its_files(tmp_path):
    (tmp_path / "t10k-images-idx3-ubyte.gz").touch()
    assert corpora.task_options("mnist", tmp_path) == {"mnist_dir": str(tmp_path), "mnist_split": T10K_SPLIT}
    (tmp_path / "train-images-idx3-ubyte.gz").touch()
    assert corpora.task_options("mnist", tmp_path) == {"mnist_dir": str(tmp_path)}
    assert corpora.task_options("mnist", None) == corpora.task_options("ptb", tmp_path) == {}
