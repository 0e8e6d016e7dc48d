"""Fixes for fairseq's log: one wrongly formatted record, an early root logger, known warnings."""

import logging
import os
import sys
import warnings

from rhhn_fairseq.compat import in_place_of

# (category, beginning of the message, module that warns). All of them are caused by the code of fairseq or of
# this package, appear in every run on the CPU or a GPU, and call for no action by the user.
KNOWN_WARNINGS = (
    (FutureWarning, r"`torch\.cuda\.amp\.(autocast|GradScaler)\(args", r"fairseq\..*"),
    # ops/backends/torch_nn.py passes the cell's separate tensors to cuDNN's LSTM and GRU.
    (UserWarning, r"RNN module weights are not part of single contiguous chunk", r"rhhn_fairseq\..*"),
    (UserWarning, r"amp_C fused kernels unavailable", r"fairseq\..*"),
    # A damaged checkpoint; the error that follows says more.
    (UserWarning, r"Detected pickle protocol", r"torch\._weights_only_unpickler"),
    (FutureWarning, r"`broadcast_buffers` is deprecated", r"(rhhn_)?fairseq\..*"),
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator", r"torch\.utils\.data\..*"),
    (UserWarning, r"hydra\.experimental\.\w+\(\) is no longer experimental", r"hydra\.experimental\..*"),
    (
        UserWarning,
        r"\s*The version_base parameter is not specified",
        # ``python -m fairseq_cli.hydra_train`` warns as __main__.
        r"(hydra\.experimental|fairseq_cli)\..*|__main__",
    ),
    (UserWarning, r"In 'config': Usage of deprecated keyword in package header", r"hydra\..*"),
    (UserWarning, r"\s*'[^']+' is validated against ConfigStore schema with the same name", ""),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated", r"hydra\..*"),
)


def repair_inf_score_record() -> bool:
    """fairseq-eval-lm passes `logger.info` a value but no placeholder for it in the message.

    Each sample with an infinite score then prints a "--- Logging error ---" traceback instead of
    the tokens that are left out. A filter on that logger appends the value to the message.
    """
    logger = logging.getLogger("fairseq_cli.eval_lm")
    logger.addFilter(_append_stray_arguments)
    return True


def _append_stray_arguments(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, str) and "%" not in record.msg and isinstance(record.args, tuple):
        record.msg = " ".join([record.msg, *(" ".join(str(arg).split()) for arg in record.args)])
        record.args = ()
    return True


def silence_known_warnings() -> bool:
    """About fifteen lines of deprecation warnings precede the first line of every run.

    Only the warnings in KNOWN_WARNINGS are silenced, by category, text and module.
    """
    for category, message, module in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    return True


def leave_a_full_log_file() -> bool:
    """A disk that is full under --log-file causes a traceback for each line that is logged.

    Training goes on without that file, and one line says so. Only in fairseq's programs.
    """
    if "fairseq_cli" not in sys.modules:
        return False
    left = set()

    @in_place_of(logging.FileHandler, "handleError")
    def leave(handle_error, self, record):
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            handle_error(self, record)
            return
        # fairseq opens the file again for each epoch.
        self.setLevel(logging.CRITICAL + 1)
        if self.baseFilename not in left:
            left.add(self.baseFilename)
            print(
                f"{self.baseFilename}: cannot be written ({error.strerror}); no more is logged there",
                file=sys.stderr,
            )

    return True


def restore_root_logger() -> bool:
    """A model that fairseq imports (wav2vec2_classification) configures the root logger at level DEBUG.

    The first configuration wins, so fairseq-eval-lm and fairseq-generate, which set up logging after that
    import, print the debug lines of every library, without the time. In these programs, a root logger in
    exactly that state is given the level and the format that they ask for.
    """
    if "fairseq_cli" not in sys.modules:
        return False
    root = logging.getLogger()
    bare = [handler for handler in root.handlers if _format(handler) == logging.BASIC_FORMAT]
    if root.level != logging.DEBUG or root.handlers != bare or len(bare) != 1:
        return False
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    bare[0].setFormatter(
        logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    return True


def _format(handler: logging.Handler) -> str | None:
    return None if handler.formatter is None else handler.formatter._fmt
