"""Runs fairseq's command-line programs as their users do, in processes of their own."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

USER_DIR = str(Path(__file__).resolve().parent.parent / "rhhn_fairseq")


def run_module(module, args, *, workers=None, env=None, timeout=300, check=True, cwd=None):
    """Runs `python -m module args`; with `workers`, that many copies under torchrun on localhost.

    Each process computes with one thread, and shows where it was if it is aborted. Returns the
    CompletedProcess with stdout and stderr as text; with `check`, a status other than 0 is an
    AssertionError that shows the output.
    """
    launch = []
    if workers is not None:
        launch = ["torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        launch += ["--nproc-per-node", str(workers), "-m"]
    command = [sys.executable, "-m", *launch, module, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout, cwd=cwd
    )
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{result.stdout[-5000:]}\n{result.stderr[-5000:]}")
    return result


def fairseq_train(args, *, workers=1, user_dir=USER_DIR, **options) -> subprocess.CompletedProcess:
    """fairseq-train; more than one worker run under torchrun. Options as in `run_module`."""
    arguments = [*args, "--user-dir", user_dir] if user_dir else args
    return run_module("fairseq_cli.train", arguments, workers=None if workers == 1 else workers, **options)


def json_log(output: str) -> list[dict]:
    """The records that --log-format json printed, in order, numbers as floats.

    `tag` tells where a record comes from: train_inner, train, or the name of a validation subset.
    """
    records = []
    for tag, text in re.findall(r"([\w.-]+)(?: \| |\]\[INFO\] - |:)(\{\".*\})$", output, re.M):
        record = {key: _number(value) for key, value in json.loads(text).items()}
        records.append({"tag": tag, **record})
    return records


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def preprocess(folder: Path, sentences: int = 60) -> Path:
    """Writes a small random text into `folder` and returns the folder of its binary form."""
    words = "the network reads and writes its own weights at every step of a long text".split()
    draw = random.Random(1)
    for split, count in (("train", sentences), ("valid", sentences // 5)):
        lines = (" ".join(draw.choices(words, k=draw.randint(5, 14))) for _ in range(count))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    binary = folder / "binary"
    texts = ["--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt"]
    run_module("fairseq_cli.preprocess", ["--only-source", *texts, "--destdir", binary])
    return binary
