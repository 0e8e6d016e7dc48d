"""Checks the names of options, tasks, architectures and losses: which exist, and which go together.

An unknown name ends in a one-line error with the nearest valid names. Without the check, a wrong combination
fails only where one component does not fit another: a missing attribute, an unexpected argument, or a loss
computed against something that is not a target.
"""

import argparse
import functools
import re
import sys
from collections.abc import Collection

from rhhn_fairseq.errors import UsageError, nearest, printable

# Tasks whose batches only their own models can read, with the base class of these and the valid losses.
PARTNERS = {
    "char_lm": ("CharLM", ("char_cross_entropy", "cross_entropy")),
    "synthetic": ("Classifier", ("problem_loss",)),
    "handwriting": ("Handwriting", ("mixture_density",)),
}
TRANSLATION = "GNMT"
TRANSLATION_LOSSES = ("label_smoothed_cross_entropy", "cross_entropy", "chunked_cross_entropy")
PACKAGE = __name__.partition(".")[0]

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

# Of these figures the highest is the best, of all others the lowest.
HIGHER_IS_BETTER = ("accuracy", "bleu")


def require_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raises UsageError unless a task or model is named and the name exists."""
    if not name:
        raise UsageError(f"the configuration names no {kind}: its {kind}._name is missing")
    if name not in known:
        raise UsageError(f"there is no {kind} {name!r}: {nearest(name, known) or 'see --help'}")


def check_combination(task: str | None, arch: str | None = None, criterion: str | None = None) -> None:
    """Raises UsageError for existing names that do not go together; None is not checked.

    A subclass fits wherever its base class does. Other classes of other packages are checked only where
    their task, architecture or criterion is one of these.
    """
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.translation import TranslationTask

    task_class, loss = TASK_REGISTRY.get(task), CRITERION_REGISTRY.get(criterion)
    home = next((name for name in PARTNERS if _is_a(task_class, TASK_REGISTRY[name])), None)
    own, losses = PARTNERS.get(home, (None, ()))
    fits = any(_is_a(loss, CRITERION_REGISTRY[name]) for name in losses)
    if losses and loss is not None and not fits and _package(loss) in ("fairseq", PACKAGE):
        raise UsageError(f"--task {task} needs --criterion {losses[0]}, not {criterion}")
    for other, (_, fitting) in PARTNERS.items():
        if task and home != other and _is_a(loss, CRITERION_REGISTRY[fitting[0]]):
            raise UsageError(f"--criterion {criterion} needs --task {other}, not {task}")
    model = ARCH_MODEL_REGISTRY.get(arch) or MODEL_REGISTRY.get(arch)
    if task is None or model is None:
        return
    kinds = {kind.__name__ for kind in model.__mro__ if _package(kind) == PACKAGE}
    if own and own not in kinds:
        raise UsageError(f"--task {task} needs a {own} architecture, and {arch} is none")
    for other, (kind, _) in PARTNERS.items():
        if kind in kinds and home != other:
            raise UsageError(f"--arch {arch} needs --task {other}, not {task}")
    if TRANSLATION not in kinds:
        return
    if not _is_a(task_class, TranslationTask):
        raise UsageError(f"--arch {arch} needs --task gnmt_translation or translation, not {task}")
    fits = any(_is_a(loss, CRITERION_REGISTRY[name]) for name in TRANSLATION_LOSSES)
    if loss is not None and not fits and _package(loss) in ("fairseq", PACKAGE):
        raise UsageError(f"--arch {arch} needs --criterion {TRANSLATION_LOSSES[0]}, not {criterion}")


def _is_a(kind: type | None, base: type) -> bool:
    return kind is not None and issubclass(kind, base)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


# Figures of translation that an option adds.
OPTIONAL_FIGURES = {"bleu": "--eval-bleu", "accuracy": "--report-accuracy"}


def check_best_metric(metric: str | None, criterion: str | None, optional: Collection[str]) -> None:
    """Raises UsageError for a --best-checkpoint-metric that no validation with a criterion logs.

    Args:
        criterion: its name; those that are not in FIGURES are not checked.
        optional: those of OPTIONAL_FIGURES whose option is given.
    """
    known = FIGURES.get(criterion, ())
    if not metric or not known:
        return
    translates = known is TRANSLATION_FIGURES or criterion == "cross_entropy"
    missing = [figure for figure in OPTIONAL_FIGURES if translates and figure not in optional]
    if metric in missing and metric in known:
        raise UsageError(f"--best-checkpoint-metric {metric} needs {OPTIONAL_FIGURES[metric]}")
    if metric not in known:
        figures = ", ".join(figure for figure in known if figure not in missing)
        raise UsageError(
            f"--best-checkpoint-metric {metric}: --criterion {criterion} logs no such figure, choose from "
            f"{figures}"
        )


def name_the_nearest(parser: argparse.ArgumentParser) -> None:
    """argparse prints all options of the program, about a hundred lines, before the error.

    If it knows the valid names, as for an architecture or a task, it prints all of these as well. The parser
    was created before the plugin was loaded, so this one instance is changed.
    """
    parser.error = functools.partial(end_in_one_line, parser)
    # argparse takes -1e-4 for an option.
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)


def end_in_one_line(parser: argparse.ArgumentParser, message: str) -> None:
    """Prints `error: ...` and ends the program with argparse's own status, 2."""
    print(f"error: {printable(explain(parser, message))}", file=sys.stderr)
    raise SystemExit(2)


def explain(parser: argparse.ArgumentParser, message: str) -> str:
    """Returns argparse's message in one line, with the nearest valid names in place of all of them."""
    # "???" stands for a value that fairseq has no default for.
    missing = re.match(r"argument (\S+): invalid \w+ value: '\?\?\?'", message)
    choice = re.match(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from", message)
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if choice:
        option = choice[1].split("/")[0]
        positional = (action for action in parser._actions if option in (action.metavar, action.dest))
        action = parser._option_string_actions.get(option) or next(positional, None)
        known = action.choices if action is not None and action.choices else ()
        message = f"{option} {choice[2]} is unknown, {nearest(choice[2], known) or 'see --help'}"
    elif unknown:
        option = unknown[1].partition("=")[0]
        if option.startswith("-"):
            hint = nearest(option, parser._option_string_actions)
            message = f"{message}: no such option here{', ' + hint if hint else ''}"
        else:
            message = f"{message}: {_reason_for_rest(parser)}"
    elif missing:
        message = f"{missing[1]} is missing: it has no default"
    elif message == "the following arguments are required: data":
        message = "the data directory is missing: give one that rhhn prepare wrote, such as data-bin/ptb"
    return " ".join(message.split())


def _reason_for_rest(parser: argparse.ArgumentParser) -> str:
    """Returns why argparse could not use an argument that is not an option."""
    names = (action for action in parser._actions if not action.option_strings)
    several = next((action for action in names if action.nargs in ("*", "+")), None)
    if several is None:
        return "more than this command takes; a text with spaces needs quotes"
    return f"give every {several.metavar or several.dest} before the options"
