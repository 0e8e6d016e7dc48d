"""Handles failures of standard output: it is closed, its disk is full, or the reader of the pipe has left."""

import io
import logging
import signal
import sys

CLOSED = "standard output is closed; send what is not wanted to /dev/null"


class Output(io.FileIO):
    """Standard output that keeps the error of the first failed write and discards everything after it.

    Otherwise Python would retry the buffered content at exit and print several lines of errors.
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


def describe(failure: OSError) -> str:
    """Returns a line that says why nothing could be written."""
    return f"standard output: cannot be written ({failure.strerror})"


def open_on(stdout, output: Output, line_buffering: bool) -> io.TextIOWrapper:
    """Returns a text stream on ``output`` with the encoding of ``stdout``, which it replaces."""
    stdout.flush()
    # Characters that a terminal cannot show must not end a good run in a traceback.
    return io.TextIOWrapper(
        io.BufferedWriter(output), stdout.encoding, "backslashreplace", line_buffering=line_buffering
    )


class ProgramOutput(Output):
    """Ends the program at the first write that fails, however deep in the program it happens.

    If the reader leaves early, the program ends silently with the status of one killed by SIGPIPE.
    """

    def write(self, content):
        try:
            return super().write(content)
        except BrokenPipeError:
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as failure:
            raise SystemExit(f"error: {describe(failure)}") from None


def end_with_failing_output() -> bool:
    """Replaces standard output with a ``ProgramOutput`` in fairseq's programs.

    Without it a full disk behind standard output causes a traceback for each logged line, and with standard
    output closed the program computes in vain and ends with status 0. Every line is written at once, so that
    none is left when the program ends. A notebook's output is not changed.
    """
    stdout = sys.stdout
    if "fairseq_cli" not in sys.modules or stdout is not sys.__stdout__:
        return False
    if stdout is None:
        raise SystemExit(f"error: {CLOSED}")
    sys.stdout = open_on(stdout, ProgramOutput(stdout.fileno(), "wb", closefd=False), line_buffering=True)
    # fairseq sets up its log before it imports anything else.
    for handler in logging.getLogger().handlers:
        if getattr(handler, "stream", None) is stdout:
            handler.setStream(sys.stdout)
    return True
