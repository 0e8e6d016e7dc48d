"""A process that holds a lock."""

import subprocess
import sys
from contextlib import contextmanager

HOLD = """
import os, sys
from pathlib import Path
from rhhn_fairseq.locks import acquire
acquire(Path(sys.argv[1]), "never")
if sys.argv[2:] and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path, *options):
    """Another process that holds the lock at ``path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline()
        yield process
        process.stdin.close()
