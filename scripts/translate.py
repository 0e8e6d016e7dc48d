"""Translates text, line by line: ``rhhn translate``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.translate import main

if __name__ == "__main__":
    sys.exit(run(main))
