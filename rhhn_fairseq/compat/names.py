"""Names of options and architectures, with the nearest valid ones, and figures that no validation logs."""

import argparse
import os
import re
import sys
from collections.abc import Collection

from rhhn_fairseq.errors import UsageError, nearest, printable

# What a validation logs, by criterion. fairseq asks for the best checkpoint's figure only after an epoch.
TRANSLATION_FIGURES = ("loss", "nll_loss", "ppl", "accuracy", "bleu")
FIGURES = {
    "char_cross_entropy": ("loss", "bpc", "ppl", "accuracy"),
    "cross_entropy": ("loss", "nll_loss", "ppl", "bleu"),
    "chunked_cross_entropy": TRANSLATION_FIGURES,
    "label_smoothed_cross_entropy": TRANSLATION_FIGURES,
    "mixture_density": ("loss", "nats_seq", "nats_point", "pen_nats", "pen_errors"),
    "problem_loss": ("loss", "accuracy", "mse"),
}

# Others of fairseq's log figures of their own.
KNOWN_TASKS = ("char_lm", "gnmt_translation", "handwriting", "language_modeling", "synthetic", "translation")

# Of these figures the highest is the best, of all others the lowest.
HIGHER_IS_BETTER = ("accuracy", "bleu")

# Figures of translation that an option adds.
OPTIONAL_FIGURES = {"bleu": "--eval-bleu", "accuracy": "--report-accuracy"}


def check_best_metric(
    metric: str | None, task: str | None, criterion: str | None, optional: Collection[str]
) -> None:
    """Raises UsageError for a --best-checkpoint-metric that no validation with a criterion logs.

    Args:
        task, criterion: their names; those that are not in KNOWN_TASKS and FIGURES are not checked.
        optional: those of OPTIONAL_FIGURES whose option is given.
    """
    known = FIGURES.get(criterion, ()) if task in KNOWN_TASKS else ()
    if not metric or not known:
        return
    translates = known is TRANSLATION_FIGURES or criterion == "cross_entropy"
    missing = [figure for figure in OPTIONAL_FIGURES if translates and figure not in optional]
    if metric not in known or metric in missing:
        needed = {name: f" ({OPTIONAL_FIGURES[name]})" for name in missing}
        figures = ", ".join(name + needed.get(name, "") for name in known)
        raise UsageError(
            f"--best-checkpoint-metric {metric}: --criterion {criterion} logs no such figure, choose from "
            f"{figures}"
        )


def complete(parser: argparse.ArgumentParser, skip: int) -> None:
    """Answers the Tab key in a terminal that asks for it, and ends the program; else does nothing.

    Args:
        skip: how many words after the program's name are not the parser's.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        os.environ["_ARGCOMPLETE"] = str(1 + skip)
        argcomplete.autocomplete(parser)


def complete_name(given: list[str], known: Collection[str], skip: int = 0) -> None:
    """Completes the word that must be one of ``known``, if the line has none there; see ``complete``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("name", choices=known)
    if not given:
        complete(parser, skip)


def end_in_one_line(parser: argparse.ArgumentParser, message: str) -> None:
    """Prints `error: ...` and ends the program with argparse's own status, 2."""
    print(f"error: {printable(explain(parser, message))}", file=sys.stderr)
    raise SystemExit(2)


def explain(parser: argparse.ArgumentParser, message: str) -> str:
    """Returns argparse's message in one line, with the nearest valid names in place of all of them."""
    choice = re.match(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from", message)
    unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
    if choice:
        option = choice[1].split("/")[0]
        positional = (action for action in parser._actions if option in (action.metavar, action.dest))
        action = parser._option_string_actions.get(option) or next(positional, None)
        known = action.choices if action is not None and action.choices else ()
        message = f"{option} {choice[2]} is unknown, {nearest(choice[2], known) or 'see --help'}"
    elif unknown:
        hint = nearest(unknown[1], parser._option_string_actions)
        message = f"{message}: no such option here{', ' + hint if hint else ''}"
    return " ".join(message.split())
