"""fairseq's own programs with the plugin loaded, whether or not ``--user-dir`` is given."""

import importlib
import sys


def main(name: str, argv: list[str]) -> int:
    """Runs ``fairseq-NAME``.

    Args:
        name: of a program, as train or eval-lm. argv: its command line.
    """
    # fairseq and Hydra read the command line themselves, and the workers they start find it there.
    sys.argv = [f"fairseq-{name}", *argv]
    # The program comes first: it sets up the log, which the plugin then keeps short.
    program = importlib.import_module(f"fairseq_cli.{name.replace('-', '_')}")
    # Registers the tasks and models, and installs what ends mistakes in one line.
    importlib.import_module("rhhn_fairseq.plugin")
    program.cli_main()
    return 0
