"""Runs many command lines in a moment each: one process imports fairseq, and every command is a fork of it.

Tests of imports run their code in forks of a process that has imported neither fairseq nor the package.

What a command breaks is its own: a crash, a hang, a limit or a changed module does not reach the next one,
nor the tests' process. Exceptions that nobody catches reach `sys.excepthook`, as in a program.

Started as a program it serves requests, one JSON object a line, on its standard input.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
# A command that asks for more address space than this, in addition, is told that there is no more memory.
MEMORY = 8 << 30
# The programs of fairseq that log to standard output. In others, a task that is imported earlier sends the
# log to standard error.
LOG_TO_STDOUT = ("train",)
LOG_FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
LOG_DATE = "%Y-%m-%d %H:%M:%S"
CLI = ("eval_lm", "generate", "hydra_train", "interactive", "preprocess", "train", "validate")
PRELOADED = {
    "programs": (
        "torch",
        *(f"fairseq_cli.{name}" for name in CLI),
        "rhhn_fairseq.plugin",
        "rhhn_fairseq.cli.translate",
        # The first optimizer of a training imports it, for two seconds.
        "torch._dynamo",
    ),
    "torch": ("torch", "torch.distributed", "torch.utils.tensorboard", "sacrebleu", "scipy.stats", "sklearn"),
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended; a negative status is the signal that ended it, `hung` that it was stopped."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    hung: bool


class Programs:
    """A process that has fairseq and the plugin of one source tree imported, ready to be forked.

    Args:
        root: the source tree.
        environment: that of the commands; None for this process's.
        preloaded: what the process has imported: "programs", those of fairseq and the plugin, or "torch",
            torch and other packages that fairseq imports, but neither fairseq nor the plugin.
    """

    def __init__(
        self, root: Path = ROOT, environment: dict[str, str] | None = None, preloaded: str = "programs"
    ):
        self.root = root
        given = os.environ if environment is None else environment
        environment = {**given, "OMP_NUM_THREADS": "1"}
        if preloaded == "programs":
            environment["PYTHONPATH"] = str(root)
        environment.pop("RHHN_TRACEBACK", None)
        self.server = subprocess.Popen(
            [sys.executable, __file__, preloaded],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(
        self,
        program: str,
        arguments,
        cwd: Path,
        timeout: float = 30.0,
        stdin: str = "",
        workers: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> Outcome:
        """Runs one command.

        Args:
            program: train, generate, ... of fairseq_cli, rhhn, or -c.
            arguments: what follows it; for -c, the code to run. cwd: where it runs.
            timeout: seconds before it is stopped.
            stdin: its standard input.
            workers: how many processes run it, with the variables of torchrun. Their outputs follow each
                other; if one fails, the others are stopped.
            environment: variables that differ from those of the process.
        """
        request = {"program": program, "arguments": [str(a) for a in arguments], "cwd": str(cwd)}
        request |= {"timeout": timeout, "stdin": stdin, "root": str(self.root), "workers": workers}
        request["environment"] = environment or {}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        reply = self.server.stdout.readline()
        if not reply:
            raise RuntimeError(f"the server of forks ended with {self.server.wait()}")
        return Outcome(**json.loads(reply))

    def close(self) -> None:
        """Ends the process."""
        # It holds nothing that has to be written; taking an interpreter down takes seconds.
        self.server.kill()
        self.server.wait()
        self.server.stdin.close()
        self.server.stdout.close()


def serve() -> None:
    """Answers requests until standard input ends."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # What an import prints is no reply.
    os.dup2(2, 1)
    for module in PRELOADED[sys.argv[1]]:
        importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)
    if "hydra" in sys.modules:
        # Its parser fills tables with what it reads, which every command would do again.
        words = ("1", "-1", "1.5", "1e-3", "true", "null", "'a.b: c'", "[1, 2]", "['a']", "a_b", "[]")
        parser = importlib.import_module("hydra.core.override_parser.overrides_parser").OverridesParser
        parser.create().parse_overrides([f"a.b_c={word}" for word in words])
    # A collection in a fork would copy every page that holds an object.
    gc.collect()
    gc.freeze()
    for line in requests:
        # TemporaryDirectory would be removed by the child too: its finalizer is one of the functions at exit.
        folder = Path(tempfile.mkdtemp())
        try:
            outcome = fork(json.loads(line), folder)
        finally:
            shutil.rmtree(folder)
        replies.write(json.dumps(outcome.__dict__) + "\n")
        replies.flush()


def fork(request: dict, folder: Path) -> Outcome:
    """Runs one request in a child process, or in several."""
    started, children, hung = time.monotonic(), [], False
    for number, variables in enumerate(environments(request["workers"])):
        variables |= request["environment"]
        place = folder / str(number)
        place.mkdir()
        (place / "stdin").write_text(request["stdin"])
        child = os.fork()
        if child == 0:
            become(request, place, variables)
        children.append(child)
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses and (ended := os.waitpid(child, os.WNOHANG))[0]:
                statuses[child] = os.waitstatus_to_exitcode(ended[1])
        hung = hung or time.monotonic() - started > request["timeout"]
        if hung or any(statuses.values()):
            kill(child for child in children if child not in statuses)
        time.sleep(0.005)
    # What they started.
    kill(children)
    texts = [
        "".join((folder / str(number) / name).read_text(errors="replace") for number in range(len(children)))
        for name in ("stdout", "stderr")
    ]
    # Of several, the first that failed by itself; those that were stopped for it have the signal.
    status = max(statuses.values()) or min(statuses.values())
    return Outcome(status, *texts, time.monotonic() - started, hung)


def environments(workers: int | None) -> list[dict[str, str]]:
    """Returns the variables that torchrun would set for each worker; one process without any for None."""
    if workers is None:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


def kill(children) -> None:
    """Kills the process groups of children, ended or not."""
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)


def become(request: dict, folder: Path, variables: dict[str, str]) -> None:
    """Turns the forked child into the program, and ends as Python ends it."""
    status = 1
    try:
        os.setsid()
        os.environ.update(variables)
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            with open(folder / name, mode) as file:
                os.dup2(file.fileno(), number)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(request["cwd"])
        status = call(request["program"], request["arguments"], request["root"])
        atexit._run_exitfuncs()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def call(program: str, arguments: list[str], root: str) -> int:
    """The exit status of a program that is called with these arguments."""
    try:
        if program == "-c":
            run_code(*arguments)
        else:
            run_program(program, arguments, root)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def run_code(code: str) -> None:
    """Runs what follows ``python -c``."""
    sys.argv, sys.path[0] = ["-c"], ""
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, vars(main))


def run_program(program: str, arguments: list[str], root: str) -> None:
    """Runs a program of fairseq, or rhhn."""
    sys.argv = [program, *arguments]
    # As in a process of its own: the first import that asks decides for all.
    stream = sys.stdout if program in LOG_TO_STDOUT else sys.stderr
    # rhhn sets nothing up: it shows warnings alone.
    level = logging.WARNING if program == "rhhn" else logging.INFO
    logging.basicConfig(format=LOG_FORMAT, datefmt=LOG_DATE, level=level, stream=stream, force=True)
    if program == "rhhn":
        sys.path[0] = root
        runpy.run_module("rhhn_fairseq", run_name="__main__")
    else:
        sys.modules[f"fairseq_cli.{program}"].cli_main()


if __name__ == "__main__":
    serve()
