"""Checkpoints of handwriting models that several files of tests use."""

import pytest
from helpers.tiny_handwriting import build, disturb, prepare_words, save

from rhhn_fairseq.models.handwriting import HandwritingConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with prepared words in ``data`` and checkpoints of models with and without a window."""
    folder = tmp_path_factory.mktemp("trained")
    prepare_words(folder / "data", words=_words_file(folder))
    for name, window in (("plain", 0), ("window", 2)):
        options = {"cell": "hyperlstm", "hyper_size": 4, "hyper_embed_size": 2}
        config = HandwritingConfig(hidden_size=8, mixtures=2, window=window, **options)
        save(disturb(build(window=window, **options), 0.1), config, folder / f"{name}.pt", folder / "data")
    return folder


def _words_file(folder):
    path = folder / "words.txt"
    path.write_text("abe head bead")
    return path
