"""Subword regularisation: what is drawn, how often, and by whom."""

import collections

import numpy as np
import pytest
import sentencepiece
import torch
from fairseq.data import Dictionary

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.segmentation import SegmentationSampler

TEXT = ["new newer newest", "low lower lowest", "a new low", "west to east", "we owe no one"] * 20


def _learn(folder, kind="unigram"):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(folder / "pieces"),
        vocab_size=30,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with pieces, their model and a dictionary in another order."""
    folder = tmp_path_factory.mktemp("pieces")
    processor, dictionary = _learn(folder), Dictionary()
    for piece in reversed(range(3, processor.vocab_size())):
        dictionary.add_symbol(processor.id_to_piece(piece))
    return folder, processor, dictionary


def _entries(prepared, text):
    _, processor, dictionary = prepared
    return dictionary.encode_line(
        " ".join(processor.encode(text, out_type=str)), add_if_not_exist=False
    ).long()


def _segmentations(text, pieces):
    """All ways to cut a text into pieces, with the sums of their scores."""
    if not text:
        return {(): 0.0}
    return {
        (piece, *rest): score + others
        for piece, score in pieces.items()
        if text.startswith(piece)
        for rest, others in _segmentations(text[len(piece) :], pieces).items()
    }


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_frequencies_are_powers_of_the_probabilities(prepared, alpha):
    folder, processor, dictionary = prepared
    pieces = {
        processor.id_to_piece(n): processor.get_score(n)
        for n in range(processor.vocab_size())
        if not processor.is_control(n) and not processor.is_unknown(n)
    }
    expected = _segmentations("\u2581newer", pieces)
    assert len(expected) > 3
    weights = np.exp(alpha * np.array(list(expected.values())))
    sampler, rng, count = SegmentationSampler(folder, dictionary, alpha, 512), np.random.default_rng(0), 4000
    found = collections.Counter()
    for _ in range(count):
        drawn = sampler.draw(_entries(prepared, "newer"), rng)
        found[tuple(dictionary[entry] for entry in drawn[:-1])] += 1
    assert found.keys() <= expected.keys()
    p = weights / weights.sum()
    # Five standard deviations of a frequency.
    bound = 5 * np.sqrt(p * (1 - p) / count) + 1e-12
    assert (np.abs(np.array([found[each] / count for each in expected]) - p) < bound).all()


def test_the_text_stays_and_so_do_other_symbols(prepared):
    folder, processor, dictionary = prepared
    sampler, rng = SegmentationSampler(folder, dictionary, 0.1, 64), np.random.default_rng(0)
    entries = _entries(prepared, "newest lowest west")
    marked = torch.cat((torch.tensor([dictionary.bos()]), entries))
    lengths = set()
    for _ in range(20):
        drawn = sampler.draw(marked, rng)
        assert drawn.dtype == marked.dtype
        assert drawn[0] == dictionary.bos() and drawn[-1] == dictionary.eos()
        pieces = [dictionary[entry] for entry in drawn[1:-1]]
        assert processor.decode(pieces) == "newest lowest west"
        lengths.add(len(pieces))
    assert len(lengths) > 1
    for text in ("new \u03c9 low", "new \u03c9", "\u03c9 new", "\u03c9"):
        unknown = _entries(prepared, text)
        assert dictionary.unk() in unknown and torch.equal(sampler.draw(unknown, rng), unknown)
    interrupted = torch.cat((entries, entries))
    for _ in range(5):
        assert torch.equal(sampler.draw(interrupted, rng), interrupted), "a symbol within would be lost"
    empty = torch.tensor([dictionary.eos()])
    assert torch.equal(sampler.draw(empty, rng), empty)


def test_no_piece_that_the_dictionary_lacks_is_drawn(prepared):
    """As in a dictionary of fairseq-preprocess, which has only pieces that occur."""
    folder, _, dictionary = prepared
    entries = _entries(prepared, "newest lowest west")
    fewer = Dictionary()
    # All pieces of the sentence, and half of the others.
    kept = {*entries.tolist(), *range(dictionary.nspecial, len(dictionary), 2)} - {dictionary.eos()}
    for entry in sorted(kept):
        fewer.add_symbol(dictionary[entry])
    entries = torch.tensor([fewer.index(dictionary[entry]) for entry in entries])
    sampler, rng = SegmentationSampler(folder, fewer, 0.2, 512), np.random.default_rng(0)
    drawn = [sampler.draw(entries, rng).tolist() for _ in range(50)]
    assert fewer.unk() not in {entry for entries in drawn for entry in entries}
    assert len(set(map(tuple, drawn))) > 1


def test_pieces_without_probabilities_are_refused(tmp_path):
    with pytest.raises(OSError, match="pieces.model"):
        SegmentationSampler(tmp_path, Dictionary(), 0.1, 64)
    for damaged in (b"", b"no model"):
        (tmp_path / "pieces.model").write_bytes(damaged)
        with pytest.raises(RuntimeError):
            SegmentationSampler(tmp_path, Dictionary(), 0.1, 64)
    _learn(tmp_path, "bpe")
    with pytest.raises(UsageError, match="prepare the data with --model-type unigram"):
        SegmentationSampler(tmp_path, Dictionary(), 0.1, 64)
