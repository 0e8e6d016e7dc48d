"""Runs fairseq's command-line programs as their users do, in processes of their own."""

import atexit
import functools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import torch

from helpers.forks import Programs
from rhhn_fairseq.errors import UsageError

# Seconds after which a program hangs, however busy the machine is: no verdict depends on how fast it is.
HANGS = 600

USER_DIR = str(Path(__file__).resolve().parents[2] / "rhhn_fairseq")

FORKED = ["train", "hydra_train", "generate", "eval_lm", "validate", "interactive", "preprocess"]
"""Programs of fairseq that may run as forks of a process that has imported them."""

ENVIRONMENT = dict(os.environ)

UNREAD = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "PYTHONWARNINGS",  # by fairseq.data.iterators
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables that pytest and libraries set in this process, and that change no command."""


def run_module(module, args, *, workers=None, env=None, timeout=HANGS, check=True, cwd=None, torchrun=True):
    """Runs `python -m module args`; with `workers`, that many copies under torchrun on localhost.

    Each process computes with one thread, and shows where it was if it is aborted. Returns the
    CompletedProcess with stdout and stderr as text; with `check`, a status other than 0 is an
    AssertionError that shows the output.

    A single process of one of fairseq's programs is a fork (`helpers.forks`), which saves the seconds that
    imports take, and so are several without `torchrun`. They are new processes where the test has set
    environment variables.
    """
    program = module.removeprefix("fairseq_cli.")
    may_fork = workers is None or not torchrun
    if program in FORKED and may_fork and env is None and _is_environment_unchanged():
        result = _run_fork(program, [str(argument) for argument in args], cwd, timeout, workers)
    else:
        result = _run_process(module, args, workers, env, timeout, cwd)
    if check and result.returncode != 0:
        command = " ".join(map(str, result.args))
        raise AssertionError(f"{command}\n{result.stdout[-5000:]}\n{result.stderr[-5000:]}")
    return result


def _is_environment_unchanged() -> bool:
    return {key for key, _ in ENVIRONMENT.items() ^ os.environ.items()} <= UNREAD


@functools.cache
def _programs() -> Programs:
    programs = Programs(environment=ENVIRONMENT)
    atexit.register(programs.close)
    return programs


def _run_fork(program, arguments, cwd, timeout, workers=None) -> subprocess.CompletedProcess:
    outcome = _programs().run(program, arguments, cwd or Path.cwd(), timeout, workers=workers)
    command = [f"fairseq-{program}", *arguments]
    if outcome.hung:
        raise subprocess.TimeoutExpired(command, timeout, outcome.stdout, outcome.stderr)
    return subprocess.CompletedProcess(command, outcome.status, outcome.stdout, outcome.stderr)


def run_rhhn(*args, check=True) -> subprocess.CompletedProcess:
    """Runs `rhhn args` as a fork; the result and `check` are those of `run_module`."""
    result = _run_fork("rhhn", [str(argument) for argument in args], None, HANGS)
    if check and result.returncode != 0:
        raise AssertionError(f"rhhn {args}\n{result.stdout[-5000:]}\n{result.stderr[-5000:]}")
    return result


@functools.cache
def _interpreters() -> Programs:
    interpreters = Programs(environment=ENVIRONMENT, preloaded="torch")
    atexit.register(interpreters.close)
    return interpreters


def python(code: str, cwd=None, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python -c code` in a fork that has imported neither fairseq nor the package."""
    outcome = _interpreters().run("-c", [code], cwd or Path.cwd(), HANGS, environment=environment)
    return subprocess.CompletedProcess(["-c"], outcome.status, outcome.stdout, outcome.stderr)


def forked_output(command: list[str], threads: int, log: Path) -> list[str]:
    """What `experiments.running.output` is, for one of fairseq's programs, as a fork."""
    assert threads == 1 and command[:3] == [sys.executable, "-P", "-m"]
    result = run_module(command[3], command[4:], check=False)
    lines = (result.stdout + result.stderr).splitlines(keepends=True)
    if result.returncode:
        raise UsageError(lines[-1].strip())
    return lines


def _run_process(module, args, workers, env, timeout, cwd) -> subprocess.CompletedProcess:
    launch = []
    if workers is not None:
        launch = ["torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        launch += ["--nproc-per-node", str(workers), "-m"]
    command = [sys.executable, "-m", *launch, module, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, cwd=cwd)


def fairseq_train(args, *, workers=1, user_dir=USER_DIR, **options) -> subprocess.CompletedProcess:
    """fairseq-train; several workers are forks, or with `torchrun` under it. Options as in `run_module`."""
    arguments = [*args, "--user-dir", user_dir] if user_dir else args
    options = {"torchrun": False} | options
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


def lstm(corpus, save_dir, *options):
    """Arguments of a small fairseq model without dropout."""
    sizes = ["--decoder-embed-dim", 8, "--decoder-hidden-size", 8, "--decoder-out-embed-dim", 8]
    data = [corpus, "--task", "language_modeling", "--tokens-per-sample", 12, "--max-tokens", 48]
    model = ["--arch", "lstm_lm", "--decoder-layers", 1, *sizes, "--dropout", 0]
    logs = ["--log-format", "json", "--log-interval", 1, "--save-dir", save_dir]
    return [*data, *model, "--optimizer", "adam", "--lr", 0.01, *logs, *options]


def model_of(save_dir, name="checkpoint_last.pt"):
    return torch.load(save_dir / name, weights_only=True)["model"]


def hydra_arguments(corpus, save_dir, *overrides):
    model = ["model=transformer_lm", "model.decoder_layers=1", "model.decoder_embed_dim=16"]
    model += ["model.decoder_ffn_embed_dim=16", "model.decoder_attention_heads=2", "model.dropout=0"]
    task = ["task=language_modeling", f"task.data={corpus}", "task.tokens_per_sample=12"]
    rest = ["criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed"]
    rest += ["optimization.lr=[0.01]", "dataset.max_tokens=48", f"common.user_dir={USER_DIR}"]
    rest += [f"checkpoint.save_dir={save_dir}", "common.log_format=json", "common.log_interval=1"]
    hydra = ["hydra.run.dir=.", "hydra.job.chdir=false", "hydra.output_subdir=null"]
    return [*model, *task, *rest, *hydra, *overrides]
