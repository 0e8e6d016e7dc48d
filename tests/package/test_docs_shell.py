"""The shell commands of the documentation run, as they stand there, on small corpora.

What cannot run here says so in the title of its block, as in ``title="needs a GPU"``.
Further options make long commands short; everything else is as a reader types it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import HANGS
from helpers.parallel_cli import write_files
from helpers.strokes_cli import object_array, random_rows

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if "results" not in path.relative_to(ROOT).parts
)
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```bash(?: title=\"(needs [^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Options that follow those of a command, by the words that it starts with, so that it takes seconds.
SHORTER = {
    "fairseq-train data-bin/ptb --arch ln_hyperlstm_ptb --log-dynamics": (
        "--max-update 3 --cpu --log-dynamics 1 --log-interval 1"
    ),
    # The checkpoints that the page averages.
    "fairseq-train data-bin/multi30k-en-fr --arch hyperlstm_gnmt_small --save-dir checkpoints/gnmt": "--cpu",
    "fairseq-train": "--max-update 3 --cpu",
    "fairseq-hydra-train": "optimization.max_update=3 common.cpu=true",
    "rhhn train": "--max-update 3 --cpu",
    "rhhn prepare ptb": "--from-dir ~/ptb --no-verify",
    "rhhn prepare multi30k": "--vocab-size 60",
    "rhhn prepare files": "--vocab-size 60",
    "rhhn prepare hershey": "--lines 120",
    "rhhn prepare synthetic": "--pairs 500 --vocab-size 300",
    "python -m experiments.tune": "--seconds 1 --trials 1 --repeats 1",
    "python -m experiments.reproduce ha-ptb": "--updates 3",
    "scripts/train_torchrun.sh": "--max-update 3",
}
TRAIN = "fairseq-train data-bin/ptb --arch char_lm --hidden-size 16 --batch-size 4 --save-dir"
TRANSLATE = "rhhn prepare multi30k --from-dir ~/multi30k"
GNMT = "fairseq-train data-bin/multi30k-en-fr --arch hyperlstm_gnmt_small --save-dir checkpoints"
# Commands before those of a page, for what its reader has.
BEFORE = {
    "docs/baselines.md": "rhhn prepare ptb",
    "docs/inside.md": f"""
        rhhn prepare ptb
        rhhn prepare hershey
        {TRAIN} checkpoints --cell hyperrhn --hyper-size 8
        cp checkpoints/checkpoint_last.pt checkpoints/checkpoint_1_100.pt
        {TRAIN} paper --cell ln_hyperlstm --hyper-size 8 --save-interval-updates 1
        cp -r paper broken_symmetry
        mkdir runs
        for model in lstm rhn "hyperrhn --hyper-size 8"; do
            cell=${{model%% *}}
            {TRAIN} $cell --cell $model --log-file runs/${{cell}}_s1.log
            cp $cell/checkpoint_last.pt $cell.pt
        done
        cp lstm.pt lstm2.pt
        cp runs/lstm_s1.log runs/lstm_s2.log
        echo "some words of a text" > page.txt
        {TRANSLATE}
        {GNMT}/hyperlstm_gnmt_small""",
    "docs/layers.md": f"""
        rhhn prepare stdlib
        {TRAIN.replace("ptb", "stdlib")} checkpoints/own
        rhhn prepare hershey --dest data-bin/words
        rhhn train data-bin/words --arch handwriting --save-dir checkpoints/words
        {TRANSLATE}
        {GNMT}/en-fr
        for part in checkpoints/*; do cp $part/checkpoint_last.pt $part/checkpoint_best.pt; done
        head -n 2 data-bin/multi30k-en-fr/raw/valid.en > text.en
        python -c "from sentencepiece import SentencePieceProcessor as Pieces
p = Pieces('data-bin/multi30k-en-fr/pieces.model')
for line in open('text.en'): print(*p.encode(line, out_type=str))" > pieces.en""",
    "docs/pretrained.md": """
        rhhn prepare ptb
        fairseq-train data-bin/ptb --arch ln_hyperlstm_ptb --save-dir checkpoints/ln_hyperlstm_ptb""",
    "docs/reference/commands.md": "rhhn prepare ptb",
    "docs/reproduce.md": "rhhn prepare ptb",
    "docs/training_many.md": TRANSLATE,
    "docs/translation.md": f"{TRANSLATE}; {GNMT}/gnmt --save-interval 1 --max-epoch 5",
}
# Their own commands run the tests, or install into the repository.
RUN_ELSEWHERE = ("README.md", "CONTRIBUTING.md")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """What each block of shell commands needs, if anything, and its commands."""
    return BLOCK.findall((ROOT / page).read_text())


RUN = [page for page in PAGES if page not in RUN_ELSEWHERE and any(not needs for needs, _ in blocks_of(page))]


def test_every_block_is_read():
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert len(re.findall(r"^```bash", text, re.MULTILINE)) == sum(len(blocks_of(page)) for page in PAGES)
    assert len(RUN) > 10 and set(BEFORE) <= set(RUN)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_of_the_page_run(page, tmp_path):
    home, here, programs = tmp_path / "home", tmp_path / "here", tmp_path / "programs"
    _write_files(home, here)
    for program in {words.split()[0] for words in SHORTER}:
        _write_program(here / program if "/" in program else programs / program, program)
    path = os.pathsep.join([str(programs), str(BIN), os.environ["PATH"]])
    environment = os.environ | {"HOME": str(home), "PATH": path, "PYTHON": sys.executable}
    script = [BEFORE.get(page, ""), *(commands for needs, commands in blocks_of(page) if not needs)]
    result = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(script)],
        cwd=here, env=environment, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def _write_program(path: Path, program: str) -> None:
    """A program that calls the one of its name with the options of ``SHORTER``."""
    real = ROOT / program if "/" in program else BIN / program
    cases = [
        f'    "{words} "*) exec {real} "$@" {options} ;;'
        for words, options in SHORTER.items()
        if words.split()[0] == program
    ]
    path.parent.mkdir(exist_ok=True)
    lines = ["#!/bin/bash", f'case "{program} $* " in', *cases, f'    *) exec {real} "$@" ;;', "esac", ""]
    path.write_text("\n".join(lines))
    path.chmod(0o755)


def _write_files(home: Path, here: Path) -> None:
    """The files that the pages speak of: corpora in the home directory, a reader's own in the working one."""
    for directory in (home / "ptb", home / "multi30k", home / "simple-examples/data", here / "folder"):
        directory.mkdir(parents=True)
    for name in ("rhhn_fairseq", "configs", "benchmarks", "experiments"):
        (here / name).symlink_to(ROOT / name)
    for split, lines in (("train", 700), ("valid", 100), ("test", 60)):
        text = "".join(f" line {n} of some {split} text with <unk> words \n" for n in range(lines))
        for directory in (home / "ptb", home / "simple-examples/data"):
            (directory / f"ptb.{split}.txt").write_text(text)
    novel = "".join(f"The sentence {n} of a very short novel.\n" for n in range(3000))
    (here / "novel.txt").write_text(novel)
    write_files(here)
    for split, own in (("train", "a"), ("valid", "b"), ("test", "c")):
        names = {"valid": ["val"], "test": ["test_2016_flickr", "test_2017_flickr"]}.get(split, [split])
        for language in ("en", "fr"):
            lines = (here / f"{split}.{language}").rename(here / f"{own}.{language}").read_text()
            for name in names:
                (home / "multi30k" / f"{name}.{language}").write_text(lines)
    (here / "text.en").write_text("a man and the dog walk\n")
    lines = [random_rows(20 + n, seed=n) for n in range(30)]
    np.savez(here / "short_kanji.npz", **{split: object_array(lines) for split in ("train", "valid", "test")})
    for number, rows in enumerate(lines):
        np.save(here / f"folder/{number}.npy", rows)
