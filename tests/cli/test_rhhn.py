"""``rhhn``: its table, its help, and the names that its messages use."""

import importlib.metadata
import inspect
import os
import subprocess
import sys

import pytest
from helpers.script_cli import error_of

import rhhn_fairseq
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli import table


def rhhn(*arguments) -> int:
    return cli.run(lambda: table.dispatch(list(map(str, arguments))))


@pytest.mark.parametrize("name", sorted(table.COMMANDS.keys() - set(table.FAIRSEQ)))
def test_every_command_has_its_program(name):
    assert "argv" in inspect.signature(table.load(name).main).parameters
    assert f"\n  {name} " in table.overview()


def rhhn_status(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        rhhn(*arguments)
    return end.value.code


def test_help_loads_neither_torch_nor_fairseq():
    code = "import sys; from rhhn_fairseq.cli import table; table.dispatch(['--help']);"
    code += "table.dispatch(['prepare', '--help']);"
    code += "sys.exit(bool({'torch', 'fairseq', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("name", sorted(set(table.COMMANDS) - {"prepare", "plot", *table.FAIRSEQ}))
def test_help_names_the_command(name, capsys):
    assert rhhn_status(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: rhhn {name} ")


@pytest.mark.parametrize(
    "line, words",
    [
        ("rhhn sa", "sample "),
        ("rhhn sample --temp", "--temperature "),
        ("rhhn plot wei", "weights "),
        ("rhhn prepare ptb --var", "--variant "),
        ("rhhn train --arch hyperlstm_gnmt_s", "hyperlstm_gnmt_small "),
    ],
)
def test_the_tab_key_completes(tmp_path, line, words):
    """As bash asks it: https://kislyuk.github.io/argcomplete, register-python-argcomplete."""
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "words")
    subprocess.run([sys.executable, "-m", "rhhn_fairseq"], env=os.environ | asked, check=True)
    assert (tmp_path / "words").read_text() == words


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["smaple"], "rhhn smaple: no such command, did you mean sample?"),
        (["prepare", "ptbb"], "rhhn prepare ptbb: no such corpus, did you mean ptb?"),
        (["prepare"], "rhhn prepare: name the corpus first, one of ptb, enwik8, "),
        (
            ["sample", "x.pt", "--lenght", "5"],
            "unrecognized arguments: --lenght 5: no such option here, did you",
        ),
        (["describe", "--cell", "ugrn"], "unknown cell 'ugrn', did you mean rhn or gru"),
        (["--user-dir"], "--user-dir is empty, name a directory before the command"),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, line):
    assert error_of(rhhn, capsys, *arguments).startswith(f"error: {line}")


def test_ctrl_c_while_a_program_starts(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(table.importlib, "import_module", interrupted)
    monkeypatch.setattr(table.sys, "argv", ["rhhn", "train"])
    assert table.main() == 130


def test_the_version_is_known_without_an_installation(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert rhhn("--version") == 0
    assert capsys.readouterr().out == f"rhhn_fairseq {rhhn_fairseq.__version__}\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [("train", ["--user-dir", "my 'cells'"]), ("hydra-train", [r"common.user_dir='my \'cells\''"])],
)
@pytest.mark.parametrize("option", [["--user-dir", "my 'cells'"], ["--user-dir=my 'cells'"]])
def test_a_user_directory_is_named_as_the_program_takes_it(monkeypatch, option, program, words):
    monkeypatch.setattr(sys, "argv", ["rhhn", *option, program, "x"])
    monkeypatch.setattr(table, "run_fairseq", lambda name, argv: [name, *argv])
    assert table.main() == [program, "x", *words]
