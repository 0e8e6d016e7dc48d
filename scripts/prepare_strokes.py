"""Prepares handwriting: ``rhhn prepare hershey|iam|stroke3``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.prepare_strokes import main

if __name__ == "__main__":
    sys.exit(run(main))
