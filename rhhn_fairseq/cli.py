"""What the programs in scripts/ share: quiet start, one-line errors."""

import logging
import sys
from collections.abc import Callable

from rhhn_fairseq.adaptations.one_line import usage_message, wants_traceback
from rhhn_fairseq.errors import UsageError


def run(main: Callable[[], None]) -> int:
    """Calls ``main``; returns the exit status, 1 after an error that is the user's, said in one line."""
    # Some of fairseq's modules set up the root logger when they are imported, and report there what does
    # not concern the user of a script; the first to set it up decides.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has gone, as in `... | head`; what it wanted is printed.
        sys.stderr.close()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = usage_message(error)
        if message is None or wants_traceback():
            raise
        print(f"error: {message}", file=sys.stderr)
        return 1
    return 0
