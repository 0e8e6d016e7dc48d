"""Command lines: a parser that knows what its command is called, and options made of a configuration."""

import argparse
import dataclasses

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import usage


class StrictParser(argparse.ArgumentParser):
    """Reports a bad command line as every other bad input is reported: one line, status 1."""

    def error(self, message):
        raise UsageError(message)


def make_parser(
    script: str, text: str, kind=argparse.ArgumentParser, subcommand: str | None = None, **options
) -> argparse.ArgumentParser:
    """The parser of a command.

    Args:
        script: the file in ``scripts/`` without ``.py``. text: what the command does in one paragraph, then
            its examples and notes, with ``%(prog)s`` for its name. kind: the class.
        subcommand: what follows the script's name where one script has several. options: passed on.
    """
    description, _, rest = text.partition("\n\n")
    return kind(
        prog=usage(script) if subcommand is None else f"{usage(script)} {subcommand}",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def add_fields(parser, *defaults) -> None:
    """Adds an option for every field of the configurations, with these values as defaults."""
    for config in defaults:
        for spec in dataclasses.fields(config):
            option = f"--{spec.name.replace('_', '-')}"
            text, default = spec.metadata["help"], getattr(config, spec.name)
            if spec.type is bool:
                switch = argparse.BooleanOptionalAction
                parser.add_argument(option, action=switch, default=default, help=text)
            else:
                choices = spec.metadata.get("choices")
                help = f"{text} (default: %(default)s)"
                parser.add_argument(option, type=spec.type, default=default, choices=choices, help=help)


def read_fields(kind, arguments):
    """The configuration of this class that the arguments describe."""
    return kind(**{spec.name: getattr(arguments, spec.name) for spec in dataclasses.fields(kind)})
