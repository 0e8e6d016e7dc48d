"""``rhhn``: one program for all commands. A command's module is imported when it is called."""

import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace

from rhhn_fairseq import __version__
from rhhn_fairseq.cli.running import run
from rhhn_fairseq.errors import UsageError, nearest


@dataclass(frozen=True)
class Command:
    """One line of ``rhhn --help``.

    Attributes:
        module: in ``rhhn_fairseq.cli``. help: what it does, in a few words.
    """

    module: str
    help: str


COMMANDS = {
    "quickstart": Command("quickstart", "a first run on one screen: train, compare, sample"),
    "prepare": Command("prepare", "prepare a corpus: text, pairs of sentences or handwriting"),
    "train": Command("fairseq_programs", "train a model (fairseq-train)"),
    "hydra-train": Command("fairseq_programs", "train with a configuration file (fairseq-hydra-train)"),
    "eval-lm": Command("fairseq_programs", "bits per character of a text (fairseq-eval-lm)"),
    "validate": Command("fairseq_programs", "loss and metrics on a subset (fairseq-validate)"),
    "generate": Command("fairseq_programs", "translate a prepared test set (fairseq-generate)"),
    "sample": Command("sample", "sample text from a character language model"),
    "translate": Command("translate", "translate text, line by line"),
    "write": Command("write", "sample handwriting, as SVG and PNG"),
    "demo": Command("demo", "a page that shows text and handwriting as a model generates them"),
    "score": Command("score_bleu", "BLEU and chrF of translations"),
    "plot": Command("plot", "plot training curves, weights, gradients and attention"),
    "ngram": Command("baseline_ngram", "n-grams with Kneser-Ney smoothing, as a baseline"),
    "average": Command("average_checkpoints", "average the weights of checkpoints"),
    "convert": Command("convert_checkpoint", "convert checkpoints to safetensors and back"),
    "describe": Command("describe", "layers, shapes and parameter count of an architecture"),
}


def main() -> int:
    """Runs the program and returns its exit status."""
    arguments, directory = sys.argv[1:], None
    if arguments and arguments[0].startswith("--user-dir="):
        arguments = [*arguments[0].split("=", 1), *arguments[1:]]
    if arguments[:1] == ["--user-dir"] and any(arguments[1:2]):
        directory, arguments = arguments[1], arguments[2:]
    if arguments and arguments[0] in COMMANDS and COMMANDS[arguments[0]].module == "fairseq_programs":
        # These control their own output and end as fairseq's programs do.
        own = [] if directory is None else user_dir_words(arguments[0], directory)
        return load(arguments[0]).main(arguments[0], [*arguments[1:], *own])
    return run(lambda: dispatch(arguments, directory))


def dispatch(arguments: list[str], user_dir: str | None = None) -> None:
    """Calls the command that is named first, or prints an overview.

    Args:
        user_dir: a directory whose cells, models and tasks the command knows, as fairseq's ``--user-dir``.

    Raises:
        UsageError: no such command, or no such directory.
    """
    if user_dir is not None:
        import_user_dir(user_dir)
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


def user_dir_words(name: str, path: str) -> list[str]:
    """Returns how the command line of a program of fairseq names a user directory."""
    if name != "hydra-train":
        return ["--user-dir", path]
    quoted = path.replace("'", r"\'")
    return [f"common.user_dir='{quoted}'"]


def import_user_dir(path: str) -> None:
    """Imports the package at ``path`` as fairseq's programs do; UsageError if it does not exist."""
    importlib.import_module("rhhn_fairseq.plugin")
    utils = importlib.import_module("fairseq.utils")
    utils.import_user_module(SimpleNamespace(user_dir=path))


def load(name: str):
    """Imports the module of a command."""
    return importlib.import_module(f"rhhn_fairseq.cli.{COMMANDS[name].module}")


def overview() -> str:
    """Returns a list of all commands, one per line."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {entry.help}" for name, entry in COMMANDS.items()]
    return "\n".join(
        [
            "Recurrent networks whose weights change as they read.",
            "",
            "usage: rhhn COMMAND ...    (rhhn COMMAND --help: its options)",
            "       rhhn --user-dir DIR COMMAND ...    (with cells, models and tasks of your own)",
            "",
            *rows,
        ]
    )
