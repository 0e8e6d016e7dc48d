"""The commands in the documentation exist, with the options that stand there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rhhn_fairseq.cli.table import COMMANDS, FAIRSEQ, load
from rhhn_fairseq.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
# Pages of results say how their figures were made at the time.
PAGES = sorted(
    path
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "results" not in path.relative_to(ROOT).parts
)


def commands_of(page: Path, program: str = "rhhn ") -> list[list[str]]:
    """The words of every command of a program in the blocks of a page, continued lines joined."""
    fence = re.compile(r"^```(?:bash|console)?(?: title=.*?)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = fence.findall(page.read_text())
    blocks += re.findall(r"((?:^    .*\n)+)", page.read_text(), re.MULTILINE)
    found = []
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(rf"\s*(?:\$ |\.venv/bin/)*({program}.*)", line)
            if match:
                # What follows several spaces is a remark.
                words = shlex.split(re.split(r"\s[<>|&]|\s{2,}(?!-)", match[1])[0], comments=True)
                found.append(words)
    return found


def _help_of(command: str, capsys) -> str:
    """What ``--help`` prints, for a command and its own subcommands."""
    try:
        load(command.split()[0]).main([*command.split()[1:], "--help"])
    except SystemExit as end:
        assert not end.code, command
    return capsys.readouterr().out


def _subcommand(words: list[str]) -> str:
    """The command, with the corpus or picture that follows it where it has several forms."""
    several = words[1] in ("prepare", "plot") and len(words) > 2 and not words[2].startswith("-")
    return " ".join(words[1:3]) if several else words[1]


def test_commands_are_found():
    """The pages are read as they are meant to be."""
    assert sum(len(commands_of(page)) for page in PAGES) > 40
    assert commands_of(ROOT / "docs" / "reproduce.md", "python -m ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page, capsys):
    for words in commands_of(page):
        assert words[1] in COMMANDS or words[1].startswith("-") or words[1].isupper(), words
        if words[1] not in COMMANDS or words[1] in FAIRSEQ:
            continue
        options = {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}
        if "--" in words:
            options &= set(words[: words.index("--")])
        try:
            text = _help_of(_subcommand(words), capsys)
        except UsageError as error:
            raise AssertionError(f"{page.name}: {' '.join(words)}: {error}") from error
        missing = [option for option in options if not re.search(rf"{option}(?![\w-])", text)]
        assert not missing, f"{page.name}: {' '.join(words)}: no {', '.join(missing)}"


@pytest.mark.slow
def test_benchmarks_and_experiments_have_the_options_that_the_pages_name():
    """They are run from a checkout, so that a page is all that shows how."""
    checked = {}
    for page in PAGES:
        for _, _, module, *words in commands_of(page, r"python -m (?:benchmarks|experiments)\."):
            if module not in checked:
                command = [sys.executable, "-m", module, "--help"]
                result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
                checked[module] = result.stdout
            options = {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}
            assert not [o for o in options if not re.search(rf"{o}(?![\w-])", checked[module])], (page, words)
    assert len(checked) > 6
