"""Compares cells at equal parameters, time and search: ``rhhn tune``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.tune import main

if __name__ == "__main__":
    sys.exit(run(main))
