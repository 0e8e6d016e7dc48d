"""Writes a model as safetensors and JSON: ``rhhn export``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.export_model import main

if __name__ == "__main__":
    sys.exit(run(main))
