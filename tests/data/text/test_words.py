"""Words of a corpus that fairseq-preprocess made, in the task char_lm."""

import gzip
import math
import zlib

import pytest
import torch
from fairseq import options
from fairseq_cli import preprocess
from helpers.tiny_char_lm import build_model, build_task, write_corpus

from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.words import WordVocabulary, load_vocabulary
from rhhn_fairseq.errors import UsageError

LINES = ["the cat sat on the mat", "the dog sat on a log <rare>", "a cat and a dog"] * 9


def binarise(folder, lines, valid=None):
    """The directory that fairseq-preprocess makes of lines, the same in every split but ``valid``."""
    folder.mkdir(exist_ok=True)
    arguments = ["--only-source", "--padding-factor", "1", "--destdir", str(folder / "data")]
    for split in ("train", "valid", "test"):
        text = valid if valid is not None and split == "valid" else lines
        (folder / split).write_text("".join(f" {line} \n" for line in text), encoding="utf-8")
        arguments += [f"--{split}pref", str(folder / split)]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return folder / "data"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return binarise(tmp_path_factory.mktemp("words"), LINES, valid=["the cow sat on the cat"])


def test_first_lines_of_ptb(data_dir, tmp_path, caplog):
    with gzip.open(data_dir / "ptb" / "ptb.train.txt.gz", "rt", encoding="utf-8") as file:
        lines = [next(file).strip().replace("<unk>", "<rare>") for _ in range(200)]
    data = binarise(tmp_path / "ptb", lines)
    caplog.set_level("INFO")
    task = build_task(str(data))
    distinct = {word for line in lines for word in line.split()}
    assert "<rare>" in distinct
    assert f"data as words, {len(distinct) + 1:,} symbols" in caplog.text
    stream = open_stream(data / "train", len(task.dictionary))
    assert len(stream) == sum(len(line.split()) + 1 for line in lines)
    assert task.vocabulary.decode(stream) == "".join(f"{line} \n" for line in lines)
    assert task.vocabulary.encode("\n".join(lines) + "\n").tolist() == stream.tolist()


def test_figures_are_per_word_and_score_every_known_one(words, caplog):
    task = build_task(str(words), tokens_per_sample=7)
    model = build_model(task, embed_dim=5).eval()
    assert model.weight_out.shape[1] == len({word for line in LINES for word in line.split()}) + 1
    for split, lines, unknown in (("test", LINES, 0), ("valid", ["the cow sat on the cat"], 1)):
        task.load_dataset(split)
        caplog.set_level("INFO")
        batches = task.eval_lm_dataloader(task.dataset(split))
        for sample in batches:
            with torch.no_grad():
                model.get_normalized_probs(model(**sample["net_input"]), True, sample)
        entries = torch.from_numpy(task.vocabulary.encode("\n".join(lines) + "\n"))
        inputs = torch.cat([torch.tensor([task.dictionary.eos()]), entries[:-1]])
        with torch.no_grad():
            logs = model(inputs[None])[0][0].double().log_softmax(-1)
        known = entries != task.dictionary.unk()
        expected = -logs[known, entries[known]].mean().item() / math.log(2)
        assert batches.tally.unknown == unknown and batches.tally.scored == len(entries) - unknown
        assert abs(batches.tally.bpc - expected) < 1e-6
        assert f"{batches.tally.bpc:.6f} bits per word, perplexity" in caplog.messages[-1]


def test_prompts_and_samples_are_words(words):
    task = build_task(str(words))
    prompt = task.encode_prompt("the cat\na dog")
    decoder = task.vocabulary.incremental_decoder()
    assert decoder.feed(prompt[1:]) + decoder.finish() == "the cat \na dog "
    with pytest.raises(UsageError, match=r"symbols the model does not know: \['Cat'\]"):
        task.encode_prompt("the Cat")


def test_a_model_of_words_refuses_other_symbols(words, tmp_path):
    weights = build_model(build_task(str(words)), embed_dim=5).state_dict()
    other = build_task(write_corpus(tmp_path))
    with pytest.raises(UsageError, match="trained on other symbols"):
        build_model(other, embed_dim=5).load_state_dict(weights)


@pytest.mark.parametrize(
    "line, message",
    [
        ("word", "line 1 is 'word', not 'SYMBOL COUNT'"),
        ("<unk> 3", "<unk> is reserved by fairseq"),
        ("a 3\nb 2\na 1", "the word a occurs twice"),
    ],
)
def test_damaged_dictionaries_are_one_line(tmp_path, line, message):
    (tmp_path / "preprocess.log").write_text("")
    (tmp_path / "dict.txt").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=message):
        load_vocabulary(tmp_path)
    with pytest.raises(UsageError, match="occurs twice"):
        WordVocabulary(["a", "a"])


def test_codes_of_words_are_no_code_points():
    codes = WordVocabulary(["a"]).codes()
    assert codes.tolist() == [0x110000 + zlib.crc32(b"\n"), 0x110000 + zlib.crc32(b"a")]


def test_reserved_words_in_the_text_are_named(tmp_path):
    data = binarise(tmp_path, ["<s> the cat </s>", "a dog"])
    with pytest.raises(UsageError, match=r"train.bin: symbol 0 is <s>, which fairseq reserves; rename it"):
        open_stream(data / "train", len(load_vocabulary(data)))
