"""Character n-grams as a baseline: ``rhhn ngram``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.baseline_ngram import main

if __name__ == "__main__":
    sys.exit(run(main))
