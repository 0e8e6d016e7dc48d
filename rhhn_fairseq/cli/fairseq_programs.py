"""fairseq's own programs with the plugin loaded, whether or not ``--user-dir`` is given."""

import importlib
import sys

from rhhn_fairseq.programs import exit_status


def main(name: str, argv: list[str]) -> int:
    """Runs ``fairseq-NAME``.

    Args:
        name: of a program, such as train or eval-lm. argv: its arguments.
    """
    try:
        return _run(name, argv)
    except KeyboardInterrupt as interrupt:
        return exit_status(interrupt)


def _run(name: str, argv: list[str]) -> int:
    # fairseq, Hydra and the workers that they start read the command line from here.
    sys.argv = [f"fairseq-{name}", *argv]
    # The program is imported first: it sets up the log, which the plugin then shortens.
    program = importlib.import_module(f"fairseq_cli.{name.replace('-', '_')}")
    # Registers the tasks and models, and installs the handling of errors in one line.
    importlib.import_module("rhhn_fairseq.plugin")
    program.cli_main()
    return 0
