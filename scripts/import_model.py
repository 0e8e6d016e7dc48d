"""Writes safetensors and JSON as a checkpoint: ``rhhn import``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.import_model import main

if __name__ == "__main__":
    sys.exit(run(main))
