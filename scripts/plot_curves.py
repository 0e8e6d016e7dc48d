"""Draws the metrics of trainings: ``rhhn plot``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.plot_curves import main

if __name__ == "__main__":
    sys.exit(run(main))
