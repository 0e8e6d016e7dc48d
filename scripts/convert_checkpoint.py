"""Converts checkpoints to safetensors and back: ``rhhn convert``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(run(main))
