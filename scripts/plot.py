"""Draws what trainings and trained networks did: ``rhhn plot``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.plot import main

if __name__ == "__main__":
    sys.exit(run(main))
