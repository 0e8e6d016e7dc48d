"""Models that read from right to left: order of training, evaluation and sampling, and what they refuse."""

import numpy as np
import pytest
import torch
from fairseq.sequence_scorer import SequenceScorer
from helpers.in_process import char_lm, train
from helpers.programs import run
from helpers.tiny_char_lm import TEST, TRAIN, build_model, build_task, iterator, save, write_corpus

from rhhn_fairseq.cli.convert import to_checkpoint, to_directory
from rhhn_fairseq.cli.demo import load_models
from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.data.text.words import WordVocabulary, prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.loading import beginning_of, load_char_lm
from rhhn_fairseq.saving import from_pretrained


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def _backwards(folder) -> str:
    """A corpus whose texts are those of ``corpus`` from right to left."""
    files = {}
    for split, text in (("train", TRAIN), ("valid", TEST), ("test", TEST)):
        files[split] = [folder / f"{split}.txt"]
        files[split][0].write_text(text[::-1])
    prepare(text_files(files, as_bytes=False), folder / "data")
    return str(folder / "data")


def _bpc(task, model) -> float:
    task.load_dataset("test")
    scorer = SequenceScorer(task.target_dictionary)
    batches = task.eval_lm_dataloader(task.dataset("test"))
    for sample in batches:
        scorer.generate([model], sample)
    return batches.tally.bpc


def _model(task):
    # A fresh output layer scores every text alike.
    model = build_model(task).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("protocol", ["carry", "carry:4", "window:20/10"])
@pytest.mark.parametrize("batching", ["lanes", "windows"])
def test_reading_backwards_is_reading_the_text_backwards(corpus, tmp_path, protocol, batching):
    shared = {"protocol": protocol, "batching": batching, "tokens_per_sample": 16}
    reverse = build_task(corpus, reverse=True, **shared)
    mirror = build_task(_backwards(tmp_path), **shared)
    forward = build_task(corpus, **shared)
    model = _model(reverse)
    assert _bpc(reverse, model) == _bpc(mirror, model) != _bpc(forward, model)
    for one, other in zip(iterator(reverse).next_epoch_itr(), iterator(mirror).next_epoch_itr(), strict=True):
        assert torch.equal(one["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
        assert torch.equal(one["target"], other["target"])
    assert beginning_of(reverse, "train", 5) == beginning_of(mirror, "train", 5)


@pytest.mark.parametrize("mode", ["text", "bytes", "words"])
def test_samples_are_printed_from_left_to_right(mode):
    text = "naïve café\n"
    if mode == "words":
        # Every word is followed by a space.
        text = "one two \none "
        vocabulary = WordVocabulary(["one", "two"], reverse=True)
    else:
        symbols = sorted(set(text.encode() if mode == "bytes" else text) - {"\n", ord("\n")})
        written = [f"\\x{ord(s) if mode == 'text' else s:02x}" for s in symbols]
        vocabulary = CharVocabulary(written, mode, reverse=True)
    first, *entries = prompt_indices(vocabulary, text)
    assert first == 2 and entries == vocabulary.encode(text).tolist()[::-1]
    decoder = vocabulary.incremental_decoder()
    assert decoder.feed(entries[:3]) + decoder.feed(np.array(entries[3:])) == ""
    assert decoder.finish() == text


def test_files_keep_the_direction(corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    task = build_task(corpus, reverse=True)
    model = _model(task)
    save(model, corpus, tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    state["cfg"]["task"]["reverse"], state["task_state"] = True, task.state_dict()
    torch.save(state, tmp_path / "a.pt")
    assert load_char_lm(str(tmp_path / "a.pt"))[1].vocabulary.reverse
    to_directory(tmp_path / "a.pt", tmp_path / "a")
    assert from_pretrained(tmp_path / "a").vocabulary.reverse
    torch.save(to_checkpoint(tmp_path / "a", corpus), tmp_path / "b.pt")
    assert load_char_lm(str(tmp_path / "b.pt"))[1].vocabulary.reverse
    with pytest.raises(UsageError, match="a: reads texts from right to left.*rhhn sample"):
        load_models([str(tmp_path / "a")], None)
    line = [corpus, "--path", tmp_path / "a.pt", "--cpu", "--num-workers", 0]
    outcome = run("eval_lm", line)
    assert outcome.kind == "works"
    title = "test, read from right to left, protocol carry"
    assert any(title in record.getMessage() for record in caplog.records)
    outcome = run("eval_lm", [*line, "--task", "char_lm"])
    assert "the checkpoint reads texts from right to left: give --reverse" in outcome.text
    assert outcome.kind != "works"


def test_trainings_go_on_in_their_direction_only(corpus):
    for reverse, advice in ((True, "give --reverse"), (False, "leave --reverse out")):
        state = build_task(corpus, reverse=reverse).get_checkpoint_dict()["CharLMTask"]
        build_task(corpus, reverse=reverse).set_checkpoint_dict(state)
        with pytest.raises(UsageError, match=advice):
            build_task(corpus, reverse=not reverse).set_checkpoint_dict(state)


def test_fine_tuning_in_the_other_direction_is_refused(tmp_path):
    train(*char_lm(tmp_path, tmp_path / "a", "--reverse", "--max-update", 2))
    options = ["--finetune-from-model", tmp_path / "a" / "checkpoint_last.pt", "--max-update", 2]
    with pytest.raises(UsageError, match="reads texts from right to left: give --reverse"):
        train(*char_lm(tmp_path, tmp_path / "b", *options))
    train(*char_lm(tmp_path, tmp_path / "b", *options, "--reverse"))
