"""Prepares a text for character models: ``rhhn prepare ptb|enwik8|text|stdlib``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.prepare_chars import main

if __name__ == "__main__":
    sys.exit(run(main))
