"""What a training of translation shows at each validation: BLEU, one sentence, and the time left."""

import re

import pytest
from helpers import tiny_translation
from helpers.cli import fairseq_train

# Hydra deprecates what fairseq's own configuration rests on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_translation.prepare(tmp_path_factory.mktemp("corpus"))


def screen(corpus, save_dir, *options) -> str:
    sizes = ["--arch", "lstm_gnmt_small", "--hidden-size", 32, "--embed-dim", 32, "--warmup-updates", 10]
    line = tiny_translation.arguments(
        corpus, save_dir, *sizes, "--max-epoch", 8, "--log-interval", 5, *options
    )
    return fairseq_train([str(word) for word in line if word != "--disable-validation"]).stdout


def test_each_validation_has_a_bleu_and_the_same_sentence(corpus, tmp_path):
    text = screen(corpus, tmp_path)
    scores = [float(score) for score in re.findall(r"\| valid \|.* bleu ([\d.]+)", text)]
    shown = re.findall(r"gnmt_translation \| (.*) -> (.*)", text)
    assert len(scores) == len(shown) == 8
    (source,) = {source for source, _ in shown}
    assert source in tiny_translation.sentences("valid")
    # Of words: the French words have several pieces each, whose mark must be gone.
    assert scores[-1] > 50 > scores[0] and shown[-1][1].split()[0] in tiny_translation.FRENCH


@pytest.mark.slow
def test_the_time_left_falls_to_zero(corpus, tmp_path):
    text = screen(corpus, tmp_path, "--no-eval-bleu", "--update-freq", 2)
    left = [float(minutes) for minutes in re.findall(r"train_inner.* minutes_left=([\d.]+)", text)]
    assert left and left[-1] == 0
    assert " bleu " not in text and " -> " not in text
