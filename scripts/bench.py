"""Measures speed and memory: ``rhhn bench``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.bench import main

if __name__ == "__main__":
    sys.exit(run(main))
