"""Prepares pairs of sentences: ``rhhn prepare multi30k|wmt14-en-fr|synthetic|files``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.prepare_translation import main

if __name__ == "__main__":
    sys.exit(run(main))
