"""The first run on one screen: ``rhhn quickstart``. ``scripts/quickstart.sh`` installs the package first."""

import sys

from rhhn_fairseq.cli import run
from rhhn_fairseq.commands.quickstart import main

if __name__ == "__main__":
    sys.exit(run(main))
