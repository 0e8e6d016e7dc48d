"""``python -m rhhn_fairseq``: runs ``rhhn`` if it is not on the path."""

import sys

from rhhn_fairseq.cli.table import main

if __name__ == "__main__":
    sys.exit(main())
