"""``rhhn``: one program for all commands. A command's module is imported when it is called."""

import importlib
import os
import sys
from types import SimpleNamespace

from rhhn_fairseq import __version__
from rhhn_fairseq.cli.running import run
from rhhn_fairseq.compat.names import complete_name
from rhhn_fairseq.errors import UsageError, nearest
from rhhn_fairseq.programs import exit_status

# What each does, in a few words. A command of FAIRSEQ is a program of fairseq's, any other a module in cli.
COMMANDS = {
    "quickstart": "a first run on one screen: train, compare, sample",
    "prepare": "prepare a corpus: text, pairs of sentences or handwriting",
    "train": "train a model (fairseq-train)",
    "hydra-train": "train with a configuration file (fairseq-hydra-train)",
    "eval-lm": "bits per character of a text (fairseq-eval-lm)",
    "validate": "loss and metrics on a subset (fairseq-validate)",
    "generate": "translate a prepared test set (fairseq-generate)",
    "sample": "sample text from a character language model",
    "score-text": "bits per character of a text file",
    "translate": "translate text, line by line",
    "write": "sample handwriting, as SVG and PNG",
    "demo": "a page that shows text and handwriting as a model generates them",
    "score": "BLEU and chrF of translations",
    "plot": "plot training curves, weights, gradients and attention",
    "average": "average the weights of checkpoints",
    "convert": "convert checkpoints to safetensors and back",
    "describe": "layers, shapes and parameter count of an architecture",
}
FAIRSEQ = ("train", "hydra-train", "eval-lm", "validate", "generate")


def main() -> int:
    """Runs the program and returns its exit status."""
    arguments, directory = sys.argv[1:] or words_before_tab(), None
    if arguments and arguments[0].startswith("--user-dir="):
        arguments = [*arguments[0].split("=", 1), *arguments[1:]]
    if arguments[:1] == ["--user-dir"] and any(arguments[1:2]):
        directory, arguments = arguments[1], arguments[2:]
    if arguments and arguments[0] in FAIRSEQ:
        # These control their own output and end as fairseq's programs do.
        own = [] if directory is None else ["--user-dir", directory]
        if own and arguments[0] == "hydra-train":
            quoted = directory.replace("'", r"\'")
            own = [f"common.user_dir='{quoted}'"]
        return run_fairseq(arguments[0], [*arguments[1:], *own])
    return run(lambda: dispatch(arguments, directory))


def words_before_tab() -> list[str]:
    """Returns the whole words of the line in a terminal that asks what the Tab key gives, none without one.

    A terminal asks after ``eval "$(register-python-argcomplete rhhn)"``.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return []
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:-1]
    complete_name(words, COMMANDS)
    return words


def run_fairseq(name: str, argv: list[str]) -> int:
    """Runs ``fairseq-NAME`` with the plugin loaded, whether or not ``--user-dir`` is given."""
    try:
        # fairseq, Hydra and the workers that they start read the command line from here.
        sys.argv = [f"fairseq-{name}", *argv]
        # The program is imported first: it sets up the log, which the plugin then shortens.
        program = importlib.import_module(f"fairseq_cli.{name.replace('-', '_')}")
        # Registers the tasks and models, and installs the handling of errors in one line.
        importlib.import_module("rhhn_fairseq.plugin")
        program.cli_main()
    except KeyboardInterrupt as interrupt:
        return exit_status(interrupt)
    return 0


def dispatch(arguments: list[str], user_dir: str | None = None) -> None:
    """Calls the command that is named first, or prints an overview.

    Args:
        user_dir: a directory whose cells, models and tasks the command knows, as fairseq's ``--user-dir``.

    Raises:
        UsageError: no such command, or no such directory.
    """
    if user_dir is not None:
        importlib.import_module("rhhn_fairseq.plugin")
        utils = importlib.import_module("fairseq.utils")
        utils.import_user_module(SimpleNamespace(user_dir=user_dir))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
    elif arguments[0] == "--version":
        print(f"rhhn_fairseq {__version__}")
    elif arguments[0] in COMMANDS:
        load(arguments[0]).main(arguments[1:])
    elif arguments[0].partition("=")[0] == "--user-dir":
        raise UsageError("--user-dir is empty, name a directory before the command")
    else:
        hint = nearest(arguments[0], COMMANDS)
        raise UsageError(f"rhhn {arguments[0]}: no such command, {hint or 'see rhhn --help'}")


def load(name: str):
    """Imports the module of a command that is no program of fairseq's."""
    return importlib.import_module(f"rhhn_fairseq.cli.{name.replace('-', '_')}")


def overview() -> str:
    """Returns a list of all commands, one per line."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "Recurrent networks whose weights change as they read.",
            "",
            "usage: rhhn COMMAND ...    (rhhn COMMAND --help: its options)",
            "       rhhn --user-dir DIR COMMAND ...    (with cells, models and tasks of your own)",
            "",
            *(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()),
        ]
    )
