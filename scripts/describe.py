"""Prints the layers and parameters of an architecture: ``rhhn describe``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.describe import main

if __name__ == "__main__":
    sys.exit(run(main))
