"""Shared code of the project's commands: a quiet start, one-line errors, and output that may fail."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rhhn_fairseq.compat.errors import message_of, wants_traceback
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import (
    CLOSED,
    Output,
    PlainRecord,
    describe,
    exit_status,
    interrupted_by_sigterm,
    open_on,
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
    with watched_output() as output:
        try:
            with interrupted_by_sigterm():
                main()
            sys.stdout.flush()
        except UsageError as error:
            return _refuse(str(error))
        except KeyboardInterrupt as interrupt:
            return exit_status(interrupt)
        except SystemExit:
            # argparse ignores the error if --help cannot be written.
            _flush()
            if output.failure is None:
                raise
        except Exception as error:
            if error is not output.failure:
                if wants_traceback():
                    raise
                return _refuse(message_of(error))
        if isinstance(output.failure, OSError) and not isinstance(output.failure, BrokenPipeError):
            return _refuse(describe(output.failure))
    return 0


@contextmanager
def watched_output() -> Iterator[Output]:
    """Replaces standard output with an ``Output`` if it has a file descriptor, within the context."""
    stdout = sys.stdout
    try:
        output = Output(stdout.fileno(), "wb", closefd=False)
    except (AttributeError, OSError, ValueError):
        yield Output(os.devnull, "wb")
        return
    sys.stdout = open_on(stdout, output, stdout.line_buffering or stdout.write_through)
    try:
        yield output
    finally:
        _flush()
        sys.stdout = stdout


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # ``Output`` keeps the error.
        return


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    return 1
