"""The fourth stage: runs fairseq-preprocess and checks its output."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.parallel.encoding import DICTIONARY_NAME
from rhhn_fairseq.data.text.stream import StreamWriter, read_index, storage_dtype
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import interpreter

# fairseq-preprocess starts a process for every part of a text; this limits them to ``workers``.
_PREPROCESS = """
import sys
from multiprocessing import Pool
from fairseq import binarizer
from fairseq_cli import preprocess
workers = int(sys.argv.pop(1))
binarizer.Pool = lambda processes: Pool(min(processes, workers))
preprocess.cli_main()
"""

SENTENCES_AT_A_TIME = 4_000_000
"""Training pairs that one process binarises: it keeps two Python integers for each, some 80 bytes."""

# fairseq processes the first piece of a text after all others. Small pieces keep the processors busy until
# then and leave only a small piece for the end.
_PIECES_PER_WORKER = 4
_EOS = 2
_BLOCK = 1 << 20
_SECONDS = 0.1


def binarise(encoded: Path, subsets: dict[str, dict], vocab_size: int, workers: int, folder: Path) -> dict:
    """Binarises the encoded texts into ``folder``.

    encoded: the folder with SUBSET.LANG and dict.txt. subsets: for each subset and language the counts
    of encoding, which the binary files must match.

    Raises UsageError if fairseq-preprocess fails.
    """
    source, target = subsets["train"]
    pieces = workers * _PIECES_PER_WORKER if workers > 1 else 1
    command = interpreter("-c", _PREPROCESS, str(workers))
    command += ["--source-lang", source, "--target-lang", target]
    command += ["--joined-dictionary", "--srcdict", str((encoded / DICTIONARY_NAME).resolve())]
    command += ["--workers", str(pieces)]
    tests = ",".join(name for name in subsets if name.startswith("test"))
    evaluation = ["--validpref", "valid", "--testpref", tests]
    itemsize = storage_dtype(vocab_size).itemsize
    size = {name: itemsize * sum(entry["tokens"] for entry in subsets[name].values()) for name in subsets}
    sentences = subsets["train"][source]["sentences"]
    if sentences <= SENTENCES_AT_A_TIME:
        _run([*command, "--trainpref", "train", *evaluation], encoded, sum(size.values()), folder)
    else:
        _run([*command, *evaluation], encoded, sum(size.values()) - size["train"], folder)
        languages = source, target
        _binarise_in_shards(command, encoded, languages, vocab_size, sentences, size["train"], folder)
    for subset, languages in subsets.items():
        for language, counts in languages.items():
            prefix = folder / f"{subset}.{source}-{target}.{language}"
            index = read_index(prefix)
            written = prefix.with_name(f"{prefix.name}.bin").stat().st_size
            actual = _amount(index.items, index.symbols, written)
            expected = _amount(counts["sentences"], counts["tokens"], counts["tokens"] * itemsize)
            if actual != expected:
                raise UsageError(
                    f"{prefix.name}: fairseq-preprocess wrote {actual}, expected {expected}; "
                    "run again with --workers 1"
                )
    return {}


def _amount(sentences: int, tokens: int, size: int) -> str:
    return f"{sentences:,} sentences of {tokens:,} tokens in {size:,} bytes"


def _binarise_in_shards(
    command: list[str],
    encoded: Path,
    languages: tuple[str, str],
    vocab_size: int,
    sentences: int,
    size: int,
    folder: Path,
) -> None:
    """Binarises ``sentences`` training pairs in shards and joins the results, ``size`` bytes in all."""
    shard = folder / "shard"
    pair = "-".join(languages)
    with ExitStack() as stack:
        texts, writers = {}, {}
        for language in languages:
            texts[language] = stack.enter_context((encoded / f"train.{language}").open("rb"))
            writer = StreamWriter(folder / f"train.{pair}.{language}", vocab_size)
            writers[language] = stack.enter_context(writer)
        for _ in range(0, sentences, SENTENCES_AT_A_TIME):
            binary = shard / "binary"
            binary.mkdir(parents=True)
            for language, text in texts.items():
                with (shard / f"train.{language}").open("wb") as file:
                    file.writelines(islice(text, SENTENCES_AT_A_TIME))
            _run([*command, "--trainpref", "train"], shard, size * SENTENCES_AT_A_TIME // sentences, binary)
            for language, writer in writers.items():
                _append(binary / f"train.{pair}.{language}.bin", storage_dtype(vocab_size), writer)
            shutil.rmtree(shard)


def _append(path: Path, dtype: np.dtype, writer: StreamWriter) -> None:
    with path.open("rb") as file:
        while block := file.read(_BLOCK * dtype.itemsize):
            indices = np.frombuffer(block, dtype=dtype)
            writer.write(indices, indices == _EOS)


def _run(command: list[str], directory: Path, total: int, folder: Path) -> None:
    """Runs fairseq-preprocess in ``directory``; it writes about ``total`` bytes into ``folder``.

    The texts are named without folders, because fairseq splits --testpref at commas, which folders may have.
    """
    command = [*command, "--destdir", str(folder.resolve())]
    with tempfile.TemporaryFile() as output:
        # It runs in a process group of its own, so that all of its processes can be ended together.
        process = subprocess.Popen(
            command, cwd=directory, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        progress = tqdm(desc="fairseq-preprocess", total=total, unit="B", unit_scale=True, disable=None)
        try:
            with progress:
                while process.poll() is None:
                    progress.update(min(_bytes_written(folder), total) - progress.n)
                    time.sleep(_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            output.seek(0)
            last = output.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise UsageError(f"fairseq-preprocess ended with status {process.returncode} ({last[:300]})")
    # fairseq leaves its log there.
    (folder / "preprocess.log").unlink(missing_ok=True)


def _bytes_written(folder: Path) -> int:
    size = 0
    for path in folder.glob("*.bin"):
        # fairseq removes a worker's part once it has copied it.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
