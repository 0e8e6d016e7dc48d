"""``--help`` lists the options of the architecture, task, criterion, optimizer and scheduler, too."""

import argparse
import sys

HELP = {"-h", "--help"}


def postponed(parser: argparse.ArgumentParser, arguments, then):
    """``fairseq-train --arch NAME --help`` lists no option of the model, the task or the criterion.

    fairseq parses a command line twice, first to find these components, then with their options. It answers
    ``--help`` at the first pass. Here the answer waits for the second, whose defaults are those of the
    architecture's recipe. Without ``--arch`` (in other programs ``--task``) the components are not known, and
    the answer is fairseq's. Returns what to call before each pass; that calls ``then``.
    """
    words = set(sys.argv[1:] if arguments is None else map(str, arguments))
    return _Postponed(then) if HELP & words and _names_components(parser, words) else then


def _names_components(parser: argparse.ArgumentParser, words: set[str]) -> bool:
    """Whether a command line names what decides which options there are: the architecture, or the task."""
    trains = any(action.dest == "max_update" for action in parser._actions)
    option = "--arch" if trains else "--task"
    return any(word.partition("=")[0] == option or (trains and word.startswith("-a")) for word in words)


class _Postponed:
    """Takes ``--help`` from a parser before the first pass and gives it back before the second."""

    def __init__(self, then):
        self.then, self.kept = then, None

    def __call__(self, parser: argparse.ArgumentParser) -> None:
        if self.then is not None:
            self.then(parser)
        known = parser._option_string_actions
        if self.kept is None:
            self.kept = {word: known.pop(word) for word in HELP & known.keys()}
        else:
            known.update(self.kept)
