"""Mistyped names on the command line end in one line with the nearest valid ones."""

import argparse
import functools
import re
import sys

from rhhn_fairseq.adaptations.mistakes import nearest


def name_the_nearest() -> bool:
    """argparse prints all options of the program, about a hundred lines, before it says what is wrong.

    Where it knows the valid names, of an architecture or a task, it prints all of these as well.
    """
    from fairseq import options

    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(parser, *args, **kwargs):
        # The parser was made before the plugin was loaded, so this one instance is changed.
        parser.error = functools.partial(end_in_one_line, parser)
        return parse(parser, *args, **kwargs)

    options.parse_args_and_arch = parse_args_and_arch
    return True


def end_in_one_line(parser: argparse.ArgumentParser, message: str) -> None:
    """Prints `error: ...` and ends the program with argparse's own status, 2."""
    choice = re.match(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from", message)
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if choice:
        option = choice[1].split("/")[0]
        action = parser._option_string_actions.get(option)
        known = action.choices if action is not None and action.choices else ()
        message = f"{option} {choice[2]} is unknown, {nearest(choice[2], known) or 'see --help'}"
    elif unknown:
        hint = nearest(unknown[1], parser._option_string_actions) if unknown[1].startswith("-") else ""
        message = f"{message}: no such option here{', ' + hint if hint else ''}"
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)
