"""rhhn score-text: the bits per character of a file are those of the same text in a data directory."""

import re

import pytest
from helpers.cli import USER_DIR, run_module
from helpers.tiny_char_lm import TEST, VALID, build_model, build_task, save, write_corpus

from rhhn_fairseq.cli import score_text

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
