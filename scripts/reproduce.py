"""Reproduces rows of the papers' tables: ``rhhn reproduce``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.reproduce import main

if __name__ == "__main__":
    sys.exit(run(main))
