"""Scores translations: ``rhhn score``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.score_bleu import main

if __name__ == "__main__":
    sys.exit(run(main))
