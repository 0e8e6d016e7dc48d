"""rhhn prepare interrupted, killed and started again; and how much memory it takes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.parallel_cli import (
    SCRIPT,
    SMALL,
    contents,
    error_of,
    names,
    run,
    sentences,
    write_files,
)

from rhhn_fairseq.data.parallel import prepare, stages

STAGES = ["texts", "pieces", "binary"]
WORKERS = ("write_texts", "train_pieces", "encode_texts")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What a run without interruptions makes."""
    folder = tmp_path_factory.mktemp("whole")
    assert run("files", *write_files(folder), *SMALL, "--dest", folder / "dest") == 0
    return contents(folder / "dest")


def said(capsys) -> list[str]:
    """The stages that a run found finished, and those it ran."""
    return [
        line.removeprefix("stage ") for line in capsys.readouterr().out.splitlines() if line[:6] == "stage "
    ]


@pytest.mark.parametrize(
    "stage, error",
    [(0, KeyboardInterrupt()), (1, OSError(28, "No space left on device")), (2, KeyboardInterrupt())],
)
def test_an_interrupted_run_goes_on_at_its_stage(tmp_path, capsys, monkeypatch, uninterrupted, stage, error):
    command = ["files", *write_files(tmp_path), *SMALL, "--dest", tmp_path / "dest"]
    make = getattr(prepare, WORKERS[stage])

    def interrupted(*arguments):
        make(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(prepare, WORKERS[stage], interrupted)
        if isinstance(error, KeyboardInterrupt):
            assert run(*command) == 130
            assert "the same command continues at the first unfinished stage" in capsys.readouterr().err
        else:
            assert "cannot be written (No space left on device)" in error_of(capsys, *command)
    work = tmp_path / ".dest.work"
    assert not (tmp_path / "dest").exists()
    assert work.exists() == bool(stage)
    if stage:
        assert names(work) == sorted([*STAGES[:stage], *(f"{name}.json" for name in STAGES[:stage])])
    capsys.readouterr()
    assert run(*command) == 0
    assert said(capsys) == [f"{name}: finished before" for name in STAGES[:stage]] + STAGES[stage:]
    assert contents(tmp_path / "dest") == uninterrupted
    assert not work.exists()


def test_other_options_begin_again_where_they_matter(tmp_path, capsys, monkeypatch):
    command = ["files", *write_files(tmp_path), "--workers", 1, "--dest", tmp_path / "dest"]
    monkeypatch.setattr(prepare, "encode_texts", lambda *arguments: 1 / 0)

    def stages(*options):
        capsys.readouterr()
        assert run(*command, *options) == 1
        return said(capsys)

    assert stages("--vocab-size", 60) == STAGES
    again = "texts: finished before", "pieces: finished before", "binary"
    assert stages("--vocab-size", 60) == [*again]
    assert stages("--vocab-size", 61) == ["texts: finished before", *STAGES[1:]]
    assert stages("--vocab-size", 61, "--max-words", 50) == STAGES
    # The files' contents are compared, not their names or dates.
    os.utime(tmp_path / "train.en")
    assert stages("--vocab-size", 61, "--max-words", 50) == [*again]
    write_files(tmp_path, test=sentences(8, 2000))
    assert stages("--vocab-size", 61, "--max-words", 50) == STAGES
    assert stages("--vocab-size", 61, "--max-words", 50, "--force") == STAGES
    # Another version may clean or cut the text differently.
    monkeypatch.setattr(prepare, "versions", lambda *packages: {"sentencepiece": "0"})
    assert stages("--vocab-size", 61, "--max-words", 50) == STAGES


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from helpers import parallel_cli
from rhhn_fairseq.data.parallel import prepare

train_pieces = prepare.train_pieces

def die_after(*arguments):
    train_pieces(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

prepare.train_pieces = die_after
parallel_cli.run(*sys.argv[2:])
"""


def test_a_killed_run_goes_on(tmp_path, capsys):
    """Killed within its second stage, of which all files are written and nothing is recorded."""
    command = ["files", *write_files(tmp_path), *SMALL, "--dest", tmp_path / "dest"]
    tests = str(Path(__file__).parents[2])
    process = subprocess.run([sys.executable, "-c", KILLED, tests, *map(str, command)], capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert (tmp_path / ".dest.work" / "texts.json").exists()
    assert not (tmp_path / "dest").exists()
    assert run(*command) == 0
    assert said(capsys) == ["texts: finished before", *STAGES[1:]]
    undisturbed = tmp_path / "undisturbed"
    assert run(*command[:-1], undisturbed) == 0
    assert contents(tmp_path / "dest") == contents(undisturbed)


def test_a_run_that_was_killed_after_its_last_step_leaves_no_stages(tmp_path, monkeypatch, capsys):
    command = ["files", *write_files(tmp_path), *SMALL, "--dest", tmp_path / "dest"]
    with monkeypatch.context() as patch:
        patch.setattr(stages.Stages, "discard", lambda self: None)
        assert run(*command) == 0
    # What a kill leaves: the folder of the last stage is the destination now, the others are still there.
    work = tmp_path / ".dest.work"
    assert (work / "binary.json").exists() and not (work / "binary").exists()
    assert run(*command) == 0 and not work.exists()
    # Stages that another request may use stay.
    monkeypatch.setattr(prepare, "encode_texts", lambda *arguments: 1 / 0)
    assert run(*command, "--max-words", 50, "--force") == 1
    left = names(work)
    assert run(*command) == 0 and names(work) == left == ["pieces", "pieces.json", "texts", "texts.json"]


PEAK = """
import re, runpy, sys
sys.path.insert(0, sys.argv[2])
from helpers import parallel_cli
from rhhn_fairseq.data.parallel import encoding, prepare
encoding._BLOCK_BYTES = 50_000
prepare.publish = lambda *arguments: 1 / 0
main = runpy.run_path(sys.argv[1])["main"]
# getrusage would count the memory of the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
try:
    main(sys.argv[3:])
except ZeroDivisionError:
    print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    grown = []
    for count in (30_000, 130_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        options = write_files(folder, train=sentences(1000))
        for language in ("en", "fr"):
            text = (folder / f"train.{language}").read_bytes().split(b"\n")[:-1]
            with (folder / f"train.{language}").open("wb") as file:
                for number in range(count):
                    file.write(b"%s %d\n" % (text[number % 1000], number))
        more = ["--sample-sentences", "2000", *SMALL, "--dest", str(folder / "dest")]
        command = [
            sys.executable,
            "-c",
            PEAK,
            str(SCRIPT),
            str(Path(__file__).parents[2]),
            "files",
            *options,
            *more,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        grown.append(int(result.stdout.split()[-1]) / 1024)
    # For 8 MB of text more; with a file's pairs in a list it is 21 MB.
    assert grown[1] - grown[0] < 8
