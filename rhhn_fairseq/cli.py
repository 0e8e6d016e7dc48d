"""What the programs in scripts/ share: quiet start, one-line errors."""

import logging
import sys
from collections.abc import Callable

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.signals import exit_status, interrupted_by_sigterm


def run(main: Callable[[], None]) -> int:
    """Calls ``main``; returns the exit status.

    That is 1 after an error that is the user's, said in one line, 130 after Ctrl-C and 143 after SIGTERM.
    """
    # Some of fairseq's modules set up the root logger when they are imported, and report there what does
    # not concern the user of a script; the first to set it up decides.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        with interrupted_by_sigterm():
            main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has gone, as in `... | head`; what it wanted is printed.
        sys.stderr.close()
    except KeyboardInterrupt as interrupt:
        return exit_status(interrupt)
    return 0
