"""Draws text from a character language model: ``rhhn sample``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.sample import main

if __name__ == "__main__":
    sys.exit(run(main))
