"""Reading files within limits, and standard output that cannot be written."""

import io
import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile

import pytest

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.data.common.sources import FileSource
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import decode_batches, read_json, read_regular, readable, tar_files

NEEDS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def refused(call, *arguments) -> str:
    with pytest.raises(UsageError) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "itself").symlink_to("itself")
    assert refused(read_regular, tmp_path / "pipe", 10).endswith("is no regular file")
    assert refused(read_regular, tmp_path, 10).endswith("Is a directory)")
    assert refused(read_regular, "/dev/zero", 10).endswith("is no regular file")
    assert "Too many levels of symbolic links" in refused(read_regular, tmp_path / "itself", 10)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    assert "has more than 4 bytes" in refused(read_regular, tmp_path / "file", 4)


def test_json(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        read_json(path)
    for content in (
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
        "1" * 5000,
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert "a.json: is not JSON (" in refused(read_json, path, "write it again")
    path.write_text(json.dumps({"a": [1]}))
    assert read_json(path) == {"a": [1]}


@pytest.mark.parametrize("packing", ["", "gz", "bz2", "xz"])
@pytest.mark.parametrize("mode", ["r", "r|*"])
def test_no_cut_of_a_tar_archive_is_taken_for_the_whole(packing, mode):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{packing}") as archive:
        for number in range(4):
            entry = tarfile.TarInfo(f"file{number}")
            entry.size = 600
            archive.addfile(entry, io.BytesIO(random.Random(number).randbytes(600)))

    def count(content):
        with readable("a.tar"), tarfile.open(fileobj=io.BytesIO(content), mode=mode) as archive:
            return sum(1 for _ in tar_files(archive))

    content = packed.getvalue()
    assert count(content) == 4
    # The random bytes of the files take this much, packed or not; zeros follow.
    for cut in range(0, 2400 if packing else 4 * 1536, 60):
        assert "a.tar: " in refused(count, content[:cut])


def test_packed_text_that_cannot_be_unpacked(tmp_path):
    path = tmp_path / "text.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text", b"some text " * 100)
    whole = path.read_bytes()

    def read():
        return b"".join(FileSource(path).chunks())

    assert read() == b"some text " * 100
    for offset, value in ((8, 99), (8, 12), (8, 14), (6, 1)):
        content = bytearray(whole)
        content[offset] = value
        content[content.index(b"PK\x01\x02") + offset + 2] = value
        path.write_bytes(content)
        assert "text.zip: " in refused(read)
    for cut in range(0, len(whole), 5):
        path.write_bytes(whole[:cut])
        assert "text.zip: " in refused(read)


PROGRAMS = {
    "lines": "for _ in range(20_000): print('a line of text')",
    "bytes": "sys.stdout.buffer.write(b'text' * 20_000); sys.stdout.buffer.flush()",
    "an error": "print('text'); raise UsageError('of mine')",
}


def ran(program: str, redirection: str, unbuffered: bool):
    """Status and errors of a program, the output of which goes elsewhere."""
    text = "import sys\nfrom rhhn_fairseq.cli.running import run\n"
    text += f"from rhhn_fairseq.errors import UsageError\ndef main():\n    {program}\nexit(run(main))"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = f'"$0" -c "$1" {redirection}; exit ${{PIPESTATUS[0]}}'
    result = subprocess.run(
        ["bash", "-c", command, sys.executable, text], capture_output=True, text=True, env=environment
    )
    return result.returncode, result.stderr


@NEEDS_FULL
@pytest.mark.parametrize("program, unbuffered", zip(PROGRAMS.values(), (False, True, False), strict=True))
def test_standard_output_that_cannot_be_written(program, unbuffered):
    status, error = ran(program, ">/dev/full", unbuffered)
    assert status == 1 and error.startswith("error: ") and error.count("\n") == 1
    if "of mine" not in program:
        assert error == "error: standard output: cannot be written (No space left on device)\n"
    assert ran(program, ">&-", unbuffered) == (
        1,
        "error: standard output is closed; send what is not wanted to /dev/null\n",
    )
    if "of mine" not in program:
        assert ran(program, "| true", unbuffered) == (0, "")


def test_the_output_comes_back_to_where_it_was(capfd):
    before = sys.stdout
    assert cli.run(lambda: print("text \udc80")) == 0
    assert sys.stdout is before
    assert capfd.readouterr().out == "text \\udc80\n"


def taken(pieces, size=4) -> list[list[str]]:
    """The lists that a program gets whose input comes in these pieces, each when it asks for more."""
    reader, writer = os.pipe()
    found = []
    with open(reader, "rb") as file:
        lists = decode_batches(file, "a pipe", size)
        for content, expected in pieces:
            if content is None:
                os.close(writer)
            else:
                os.write(writer, content)
            found.append([next(lists) for _ in range(expected)])
        assert next(lists, None) is None
    return found


def test_lines_that_come_slowly_are_not_waited_for():
    pieces = [(b"one\n", 1), (b"two\nthr", 1), (b"ee\nfour\n", 1), (b"a\nb\nc\nd\ne\nf\n", 2), (b"end", 0)]
    assert taken([*pieces, (None, 1)]) == [
        [["one"]],
        [["two"]],
        [["three", "four"]],
        [["a", "b", "c", "d"], ["e", "f"]],
        [],
        [["end"]],
    ]


def test_lines_that_come_quickly_are_full_lists(tmp_path):
    text = "".join(f"line {number}\n" for number in range(20_000)).encode()
    expected = text.decode().splitlines()
    path = tmp_path / "text"
    path.write_bytes(text)

    def checked(file):
        parts = list(decode_batches(file, "text", 1024))
        assert [line for part in parts for line in part] == expected
        return [len(part) for part in parts]

    full = [1024] * (len(expected) // 1024) + [len(expected) % 1024]
    with path.open("rb") as file:
        assert checked(file) == full
    assert checked(io.BytesIO(text)) == full
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as process:
        # The other program may have to wait for its turn, so not every list must be full.
        assert len(checked(process.stdout)) < 2 * len(full)
