"""Names of the project's commands, for messages that mention one."""

import os
import sys

# Each script in scripts/ and the subcommand of ``rhhn`` that does the same.
SUBCOMMANDS = {
    "average_checkpoints": "average",
    "baseline_ngram": "ngram",
    "convert_checkpoint": "convert",
    "demo": "demo",
    "describe": "describe",
    "plot": "plot",
    "prepare_chars": "prepare",
    "prepare_strokes": "prepare",
    "prepare_translation": "prepare",
    "quickstart": "quickstart",
    "sample": "sample",
    "score_bleu": "score",
    "translate": "translate",
    "write": "write",
}


def command(script: str) -> str:
    """Returns the command that does the work of ``scripts/SCRIPT.py``, as the user can call it.

    Under ``rhhn`` that is the subcommand. Under a script of the project, and in other programs that run in
    the repository, it is the script. Everywhere else it is the subcommand.
    """
    if not runs_rhhn():
        folder, name = os.path.split(sys.argv[0] if sys.argv else "")
        is_script = name.removesuffix(".py") in SUBCOMMANDS
        path = os.path.join(folder if is_script else "scripts", f"{script}.py")
        if os.path.isfile(path):
            return path
    return f"rhhn {SUBCOMMANDS[script]}"


def usage(script: str) -> str:
    """Returns ``command`` preceded by the interpreter if it is a script."""
    name = command(script)
    return f"python {name}" if name.endswith(".py") else name


def runs_rhhn() -> bool:
    """Returns whether this process is ``rhhn`` or ``python -m rhhn_fairseq``."""
    folder, name = os.path.split(os.path.abspath(sys.argv[0] if sys.argv else ""))
    if name == "__main__.py":
        return os.path.basename(folder) == "rhhn_fairseq"
    return name.removesuffix(".exe") == "rhhn"
