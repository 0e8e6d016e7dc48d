"""Command lines: parsers with the name of their command, and options derived from a configuration."""

import argparse
import dataclasses
import sys
from itertools import takewhile

from rhhn_fairseq.compat.names import complete, explain
from rhhn_fairseq.errors import UsageError


class StrictParser(argparse.ArgumentParser):
    """Parser that reports a bad command line like all other bad input: one line, status 1."""

    def parse_args(self, args=None, namespace=None):
        complete(self, skip=len(self.prog.split()) - 1)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args=None, namespace=None):
        self._given = sys.argv[1:] if args is None else list(args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # A subcommand's parser would leave this to the command's, which does not know its options.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message):
        if message.startswith("the following arguments are required"):
            # A misspelt option is why another one is missing; argparse does not get to name it.
            words = takewhile(lambda word: word != "--", self._given)
            unknown = next(filter(self._is_unknown, words), None)
            message = message if unknown is None else f"unrecognized arguments: {unknown}"
        raise UsageError(explain(self, message))

    def _is_unknown(self, word: str) -> bool:
        option = word.partition("=")[0]
        known = self._option_string_actions
        return option.startswith("--") and not any(name.startswith(option) for name in known)


def make_parser(name: str, text: str, **options) -> StrictParser:
    """Returns the parser of a command.

    Args:
        name: what follows ``rhhn``. text: one paragraph on what the command does, then examples and notes,
            with ``%(prog)s`` for its name. options: passed on to the parser.
    """
    description, _, rest = text.partition("\n\n")
    return StrictParser(
        prog=f"rhhn {name}",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def add_fields(parser, *defaults) -> None:
    """Adds an option for every field of the configurations, with their values as defaults."""
    for config in defaults:
        for spec in dataclasses.fields(config):
            option = f"--{spec.name.replace('_', '-')}"
            text, default = spec.metadata["help"], getattr(config, spec.name)
            kind = type(default)
            if kind is bool:
                switch = argparse.BooleanOptionalAction
                parser.add_argument(option, action=switch, default=default, help=text)
            elif kind is tuple:
                shown = ",".join(default) or "none"
                parser.add_argument(option, type=_names, default=default, help=f"{text} (default: {shown})")
            else:
                choices = spec.metadata.get("choices")
                help = f"{text} (default: %(default)s)"
                parser.add_argument(option, type=kind, default=default, choices=choices, help=help)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def read_fields(kind, arguments):
    """Returns the configuration of class ``kind`` that the arguments describe."""
    return kind(**{spec.name: getattr(arguments, spec.name) for spec in dataclasses.fields(kind)})
