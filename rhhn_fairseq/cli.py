"""What the project's commands share: quiet start, one-line errors, and an output that may fail."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rhhn_fairseq.adaptations.one_line import usage_message, wants_traceback
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.output import CLOSED, Output, describe, open_on
from rhhn_fairseq.signals import exit_status, interrupted_by_sigterm


def run(main: Callable[[], None]) -> int:
    """Calls ``main``; returns the exit status.

    That is 1 after an error that is the user's, said in one line, 130 after Ctrl-C and 143 after SIGTERM. A
    reader of standard output that leaves early, as in ``... | head``, has had what it wanted: the program
    ends there with status 0. Any other failure to write is an error.
    """
    if sys.stderr is None:
        # ``print`` would write errors to standard output instead.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        # The next file that is opened would take its place, and what others print would go there.
        return _refuse(CLOSED)
    # Some of fairseq's modules set up the root logger when they are imported, and report there what does
    # not concern the user of a script; the first to set it up decides.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
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
            # argparse ignores it where --help cannot be written.
            _flush()
            if output.failure is None:
                raise
        except Exception as error:
            if error is not output.failure:
                message = usage_message(error)
                if message is None or wants_traceback():
                    raise
                return _refuse(message)
        if isinstance(output.failure, OSError) and not isinstance(output.failure, BrokenPipeError):
            return _refuse(describe(output.failure))
    return 0


@contextmanager
def watched_output() -> Iterator[Output]:
    """Puts an ``Output`` in the place of standard output, where that is a file and no program's object."""
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
        # ``Output`` keeps it.
        return


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    return 1
