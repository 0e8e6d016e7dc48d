"""Standard output that fails ends a program in one line, or silently where the reader has left."""

import os
import subprocess
import sys

import pytest

from rhhn_fairseq import programs

PRINTING = """
import fairseq_cli, logging, sys
logging.basicConfig(stream=sys.stdout, level="INFO")
from rhhn_fairseq.programs import end_with_failing_output
assert end_with_failing_output() and not end_with_failing_output()
try:
    logging.info("a line")
except Exception:
    pass
print("another line")
"""


def run(stdout, command: str = 'exec "$@"') -> tuple[int, str]:
    """The exit status and standard error of a program that logs and prints."""
    shell = ["bash", "-c", command, "bash", sys.executable, "-c", PRINTING]
    ended = subprocess.run(shell, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return ended.returncode, ended.stderr


def test_full_output():
    with open("/dev/full", "wb") as full:
        line = "error: standard output: cannot be written (No space left on device)\n"
        assert run(full) == (1, line)


def test_closed_output():
    assert run(subprocess.DEVNULL, 'exec "$@" >&-') == (1, f"error: {programs.CLOSED}\n")


def test_reader_that_has_left():
    """The status is that of a program that SIGPIPE has killed."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        assert run(pipe) == (141, "")


def test_nothing_is_written_after_a_failure():
    with programs.Output("/dev/full", "wb") as full:
        with pytest.raises(OSError, match="No space left"):
            full.write(b"lost")
        assert full.write(b"more") == 4
        assert programs.describe(full.failure).endswith("cannot be written (No space left on device)")


COMMAND = "from rhhn_fairseq.cli.running import run; run(lambda: print('another line, \\u00e0'))"


@pytest.mark.parametrize("code", [PRINTING.replace("another line", "another line, \\u00e0"), COMMAND])
@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_output_is_utf_8_in_every_locale(code, locale):
    program = [sys.executable, "-c", code]
    output = subprocess.run(program, env=os.environ | locale, capture_output=True, check=True).stdout
    assert output.endswith("another line, à\n".encode())
