"""A process that holds a lock."""

import subprocess
import sys
from contextlib import contextmanager

HOLD = """
import os, sys
from pathlib import Path
from rhhn_fairseq.files import lock
held = lock(Path(sys.argv[1]), "never")
held.__enter__()
# The child says that it has begun, and by then it has closed the lock.
if not sys.argv[2:] or os.fork() == 0:
    print("ready", flush=True)
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
