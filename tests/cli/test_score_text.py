"""rhhn score-text: the bits per character of a file are those of the same text in a data directory."""

import re

import pytest
import torch
from helpers.cli import USER_DIR, run_module
from helpers.tiny_char_lm import TEST, VALID, build_model, build_task, save, write_corpus

from rhhn_fairseq.cli import score_text
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.nn import save_pretrained
from rhhn_fairseq.nn.character import CharacterNetwork
from rhhn_fairseq.tasks.evaluation import Tally

# Hydra deprecates what fairseq's own configuration rests on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("protocol", ["carry", "carry:3", "window:20/5"])
def test_a_file_scores_as_the_split_that_was_made_of_it(tmp_path, capsys, protocol):
    data = write_corpus(tmp_path)
    save(build_model(build_task(data)), data, tmp_path / "checkpoint.pt")
    model = ["--path", tmp_path / "checkpoint.pt", "--protocol", protocol, "--cpu"]
    for split, text in (("test", TEST), ("valid", VALID)):
        (tmp_path / "file.txt").write_text(text)
        score_text.main([str(tmp_path / "checkpoint.pt"), str(tmp_path / "file.txt"), "--protocol", protocol])
        said = capsys.readouterr().out
        ended = run_module(
            "fairseq_cli.eval_lm", [data, *model, "--gen-subset", split, "--user-dir", USER_DIR]
        )
        line = r"([\d.]+) bits per character, .* ([\d,]+ unknown)"
        (expected,) = re.findall(line, ended.stdout + ended.stderr)
        bits, unknown = re.findall(line, said)[0]
        # Sums in another order, of float32 numbers.
        assert float(bits) == pytest.approx(float(expected[0]), abs=2e-6) and unknown == expected[1]
        assert (unknown == "0 unknown") == (split == "test")


def test_a_model_in_half_precision_is_scored_in_float32(tmp_path, monkeypatch, capsys):
    (tmp_path / "file.txt").write_text("abab")
    sizes = StackConfig(cell="lstm", input_size=2, hidden_size=4)
    network = CharacterNetwork(sizes, CharVocabulary("ab", newline_occurs=False))
    save_pretrained(network.bfloat16(), tmp_path / "model")
    seen, see = [], Tally.see

    def watch(self, model, scores, *rest, **options):
        seen.append(scores.dtype)
        see(self, model, scores, *rest, **options)

    monkeypatch.setattr(Tally, "see", watch)
    score_text.main([str(tmp_path / "model"), str(tmp_path / "file.txt")])
    assert seen == [torch.float32] and "bits per character" in capsys.readouterr().out
    for model in (["--pretrained"], [str(tmp_path / "model")]):
        with pytest.raises(UsageError, match="--data goes with a checkpoint"):
            score_text.main([*model, str(tmp_path / "file.txt"), "--data", "nowhere"])
