"""Averages the weights of several checkpoints: ``rhhn average``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.average_checkpoints import main

if __name__ == "__main__":
    sys.exit(run(main))
