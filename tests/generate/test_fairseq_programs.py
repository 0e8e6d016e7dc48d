"""fairseq-generate and fairseq-interactive: lines of the input, and sacreBLEU."""

import re

import pytest
from helpers.cli import fairseq_train, python, run_module
from helpers.tiny_translation import lstm, prepare
from sacrebleu.metrics import BLEU


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    fairseq_train(lstm(data, folder, "--max-update", 20, size=16))
    return folder / "checkpoint_last.pt"


def test_a_carriage_return_within_a_line_is_no_end_of_it(data, model, tmp_path):
    (tmp_path / "in.en").write_bytes("▁one ▁t w\r ▁two\n▁three\r\n".encode())
    options = [data, "--path", model, "--source-lang", "en", "--target-lang", "fr", "--buffer-size", 8]
    result = run_module("fairseq_cli.interactive", [*options, "--input", tmp_path / "in.en", "--cpu"])
    assert re.findall(r"^S-(\d+)", result.stdout, re.M) == ["0", "1"]


def test_preprocessing_and_raw_data_have_as_many_sentences_as_lines(tmp_path):
    """A process of its own, because only programs of fairseq read text by this rule."""
    (tmp_path / "train.en").write_bytes("one\rtwo \u2028three\r\nfour\n".encode())
    program = f"""
import fairseq_cli, rhhn_fairseq.plugin
from fairseq.data import Dictionary, indexed_dataset
path, dictionary = {str(tmp_path / "train.en")!r}, Dictionary()
Dictionary.add_file_to_dictionary(path, dictionary, str.split, 1)
raw = indexed_dataset.IndexedRawTextDataset(path, dictionary)
print(dictionary.count[dictionary.eos()] - 1, [len(tokens) for tokens in raw])
"""
    result = python(program)
    assert result.stdout == "2 [4, 2]\n", result.stderr


def test_sacrebleu_is_the_scorer(data, model):
    options = [data, "--path", model, "--gen-subset", "test", "--beam", 2, "--max-tokens", 200, "--cpu"]
    result = run_module("fairseq_cli.generate", [*options, "--post-process", "sentencepiece", "--sacrebleu"])
    line = r"-(\d+)\t(?:-\d\S*\t)?(.*)$"
    texts = {letter: dict(re.findall(f"^{letter}{line}", result.stdout, re.M)) for letter in "TD"}
    numbers = sorted(texts["T"], key=int)
    assert len(numbers) == 30
    expected = BLEU().corpus_score(
        [texts["D"][number] for number in numbers], [[texts["T"][number] for number in numbers]]
    )
    printed = re.search(r"Generate test with beam=2: BLEU = ([\d.]+)", result.stdout)
    assert printed and float(printed[1]) == pytest.approx(expected.score, abs=0.006)
