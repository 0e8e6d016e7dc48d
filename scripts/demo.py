"""Serves a page to play with: ``rhhn demo``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.demo import main

if __name__ == "__main__":
    sys.exit(run(main))
