"""docs/options.md: what it lists as refused is refused, in one line, by each program that it names."""

import re
from pathlib import Path

import pytest
from helpers import tiny_translation
from helpers.programs import run
from helpers.tiny_char_lm import write_corpus

import rhhn_fairseq.plugin  # noqa: F401  (replaces the functions of fairseq)

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROOT = Path(__file__).parents[2]
REFUSED = (ROOT / "docs" / "options.md").read_text().split("## Refused")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `(--.*?)` \| (.*) \|$", REFUSED, re.M)
PROBLEM = ["--problem", "adding", "--length", "10", "--train-examples", "20", "--valid-examples", "4"]
TRAINING = ["--optimizer", "adam", "--lr", "0.01", "--max-update", "1", "--disable-validation", "--cpu"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> dict[str, list]:
    """For each program a command line that works, with a model that was trained for one update."""
    folder = tmp_path_factory.mktemp("models")
    text, pairs = write_corpus(folder), tiny_translation.prepare(folder)
    data = {
        "char_lm": [text, "--arch", "char_lm", "--cell", "lstm", "--batch-size", "2"],
        "gnmt": [pairs, "--arch", "lstm_gnmt_small", "--embed-dim", "8", "--max-tokens", "100"],
        "problem": ["--arch", "classifier", "--task", "synthetic", *PROBLEM, "--batch-size", "2"],
    }
    paths = {}
    for name, words in data.items():
        paths[name] = ["--path", folder / name / "checkpoint_last.pt"]
        outcome = run("train", [*words, "--hidden-size", "8", *TRAINING, "--save-dir", folder / name])
        assert outcome.kind == "works", outcome.text
    return {
        "train": [*data["char_lm"], *TRAINING, "--no-save"],
        "validate": [text, *paths["char_lm"], "--cpu"],
        "eval-lm": [text, *paths["char_lm"], "--gen-subset", "valid", "--cpu"],
        "generate": [pairs, *paths["gnmt"], "--cpu"],
        "interactive": [pairs, *paths["gnmt"], "--cpu"],
        "problem": [*paths["problem"], "--cpu"],
        "languages": [*data["gnmt"], *TRAINING, "--no-save"],
    }


def test_the_table_is_read():
    assert len(ROWS) > 8


@pytest.mark.parametrize("program", ["train", "validate", "eval-lm", "generate", "interactive", "problem"])
def test_a_line_without_refused_options_works(lines, program):
    outcome = run(MODULES.get(program, program.replace("-", "_")), lines[program], stdin="one two\n")
    assert outcome.kind == "works", outcome.text


MODULES = {"problem": "validate", "languages": "train"}


@pytest.mark.parametrize("option, reason", ROWS, ids=[option for option, _ in ROWS])
def test_what_the_page_lists_as_refused_is(lines, option, reason):
    programs = re.findall(r"fairseq-([a-z-]+)", reason.split(":")[0]) or ["languages"]
    for program in ["problem"] if "the checkpoint's problem" in reason else programs:
        module = MODULES.get(program, program.replace("-", "_"))
        outcome = run(module, [*lines[program], *option.split()], stdin="one two\n")
        assert outcome.kind == "refused", (program, outcome.text[-300:])
