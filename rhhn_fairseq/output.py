"""Standard output that may fail: closed, full, or a pipe whose reader has left."""

import io
import logging
import signal
import sys

CLOSED = "standard output is closed; send what is not wanted to /dev/null"


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


def describe(failure: OSError) -> str:
    """The line that says why nothing could be written."""
    return f"standard output: cannot be written ({failure.strerror})"


def open_on(stdout, output: Output, line_buffering: bool) -> io.TextIOWrapper:
    """A text stream on ``output`` with the encoding of ``stdout``, whose place it takes."""
    stdout.flush()
    # What a terminal cannot show must not end a good run in a traceback.
    return io.TextIOWrapper(
        io.BufferedWriter(output), stdout.encoding, "backslashreplace", line_buffering=line_buffering
    )


class ProgramOutput(Output):
    """Ends the program with the first write that fails, whatever lies between it and the top.

    A reader that leaves early ends it silently, with the status of a program that SIGPIPE has killed.
    """

    def write(self, content):
        try:
            return super().write(content)
        except BrokenPipeError:
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as failure:
            raise SystemExit(f"error: {describe(failure)}") from None


def end_with_failing_output() -> bool:
    """Puts a ``ProgramOutput`` in the place of standard output, in one of fairseq's programs.

    Without it a full disk behind standard output ends in tracebacks, one for each line that is logged, and a
    closed one in a program that computes for nobody and ends with status 0. Every line is written at once, so
    that none is left for the time after the program's end. A notebook's output is left alone.
    """
    stdout = sys.stdout
    if "fairseq_cli" not in sys.modules or stdout is not sys.__stdout__:
        return False
    if stdout is None:
        raise SystemExit(f"error: {CLOSED}")
    sys.stdout = open_on(stdout, ProgramOutput(stdout.fileno(), "wb", closefd=False), line_buffering=True)
    # fairseq sets its log up before it imports anything else.
    for handler in logging.getLogger().handlers:
        if getattr(handler, "stream", None) is stdout:
            handler.setStream(sys.stdout)
    return True
