"""Brings the plugin into fairseq's programs where the package is installed: they need no --user-dir.

``rhhn_fairseq_autoload.pth`` imports this module whenever Python starts. That imports ``sys`` and ``os`` and
leaves a finder behind, which waits for the import of fairseq. Only in fairseq's own programs will it then
import ``rhhn_fairseq``. RHHN_AUTOLOAD=0 switches it off.
"""

import os
import sys

PACKAGE = "rhhn_fairseq"


class ProgramFinder:
    """Imports the package when one of fairseq's programs is about to import fairseq."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "fairseq":
            return None
        sys.meta_path.remove(self)
        if not runs_fairseq(sys.argv):
            return None
        import importlib.util

        directory = user_dir(sys.argv)
        if directory is not None and os.path.basename(os.path.normpath(directory)) != PACKAGE:
            if exists(directory, beside=importlib.util.find_spec(fullname)):
                # The user has modules of their own in its place.
                return None
            # The package reports the missing directory in one line.
        elif directory is not None and os.path.isdir(directory):
            # As fairseq does: the copy that is named is the one to import.
            sys.path.insert(0, os.path.dirname(os.path.abspath(directory)))
        __import__(PACKAGE)
        # Before fairseq logs its first line, which it does while it is imported.
        importlib.import_module(f"{PACKAGE}.programs").end_with_failing_output()
        # Now the package's own finder follows the import of fairseq.
        return importlib.util.find_spec(fullname)


def runs_fairseq(arguments: list[str]) -> bool:
    """Whether this process is ``fairseq-train``, ``python -m fairseq_cli.train`` or the like."""
    program = os.path.abspath(arguments[0]) if arguments else ""
    return (
        os.path.basename(program).startswith("fairseq-")
        or os.path.basename(os.path.dirname(program)) == "fairseq_cli"
    )


def user_dir(arguments: list[str]) -> str | None:
    """The user directory that the command line names, None without one.

    Under Hydra a file may name it, so there a directory with the package's name is taken for it.
    """
    named = PACKAGE if "hydra" in os.path.basename(arguments[0]) else None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--user-dir":
            named = following
        elif argument.lstrip("+").startswith(("--user-dir=", "common.user_dir=")):
            named = argument.split("=", 1)[1]
    return named


def exists(directory: str, beside) -> bool:
    """Whether fairseq finds a user directory: here, in the package of the spec `beside`, or beside it."""
    places = ["."]
    if beside is not None and beside.origin:
        package = os.path.dirname(beside.origin)
        places += [package, os.path.dirname(package)]
    return any(os.path.isdir(os.path.join(place, directory)) for place in places)


def install() -> None:
    """Leaves the finder behind, once."""
    known = any(type(finder).__name__ == ProgramFinder.__name__ for finder in sys.meta_path)
    if os.environ.get("RHHN_AUTOLOAD") != "0" and not known:
        sys.meta_path.insert(0, ProgramFinder())
