"""Shared code of the project's commands: a quiet start, one-line errors, and output that may fail."""

import logging
import os
import sys
from collections.abc import Callable

from rhhn_fairseq.compat.errors import message_of, wants_traceback
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import (
    CLOSED,
    READER_LEFT,
    PlainRecord,
    exit_status,
    interrupted_by_sigterm,
    own_output,
)


def run(main: Callable[[], None]) -> int:
    """Calls ``main`` and returns the exit status.

    The status is 1 after a user's error, which is reported in one line, 130 after Ctrl-C and 143 after
    SIGTERM. If the reader of standard output closes it early, as in ``... | head``, the program ends there
    with status 0. Any other failure to write is an error.
    """
    if sys.stderr is None:
        # ``print`` would write errors to standard output instead.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        # The next file that is opened would get its descriptor, and printed output would go there.
        return _refuse(CLOSED)
    # Some of fairseq's modules configure the root logger when they are imported, and log details that do
    # not concern the user of a script; the first configuration wins.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.setLogRecordFactory(PlainRecord)
    try:
        with own_output(), interrupted_by_sigterm():
            main()
    except UsageError as error:
        return _refuse(str(error))
    except KeyboardInterrupt as interrupt:
        return exit_status(interrupt)
    except SystemExit as end:
        if end.code != READER_LEFT:
            raise
    except Exception as error:
        if wants_traceback():
            raise
        return _refuse(message_of(error))
    return 0


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    return 1
