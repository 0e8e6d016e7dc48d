"""What the project's commands share: quiet start, one-line errors, and an output that may fail."""

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rhhn_fairseq.adaptations.one_line import usage_message, wants_traceback
from rhhn_fairseq.errors import UsageError
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
        return _refuse("standard output is closed; send what is not wanted to /dev/null")
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
            return _refuse(f"standard output: cannot be written ({output.failure.strerror})")
    return 0


class Output(io.FileIO):
    """Standard output that keeps the error of the first write that failed, and then forgets all others.

    What is still in a buffer would otherwise be tried again when Python ends, and fail in several lines.
    """

    failure: OSError | None = None

    def write(self, content):
        if self.failure is not None:
            return memoryview(content).nbytes
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def watched_output() -> Iterator[Output]:
    """Puts an ``Output`` in the place of standard output, where that is a file and no program's object."""
    stdout = sys.stdout
    try:
        output = Output(stdout.fileno(), "wb", closefd=False)
    except (AttributeError, OSError, ValueError):
        yield Output(os.devnull, "wb")
        return
    stdout.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output),
        stdout.encoding,
        # What a terminal cannot show must not end a good run in a traceback.
        "backslashreplace",
        line_buffering=stdout.line_buffering or stdout.write_through,
    )
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
