"""Draws handwriting: ``rhhn write``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.write import main

if __name__ == "__main__":
    sys.exit(run(main))
