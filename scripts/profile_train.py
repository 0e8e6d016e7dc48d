"""Shows where the time of a training update goes: ``rhhn profile``."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.profile_train import main

if __name__ == "__main__":
    sys.exit(run(main))
