"""How a program of fairseq reads its command line: one function, its steps in order."""

from argparse import Namespace

from rhhn_fairseq.compat import full_help, in_place_of, names, ranges, recipes, refusals, stored_task


def read_command_line() -> bool:
    """``parse_args_and_arch`` parses twice, and calls ``modify_parser`` before each pass."""
    from fairseq import options

    @in_place_of(options, "parse_args_and_arch")
    def parse_args_and_arch(
        inner, parser, input_args=None, parse_known=False, suppress_defaults=False, modify_parser=None
    ):
        names.name_the_nearest(parser)
        modify = full_help.postponed(parser, input_args, modify_parser)
        if not suppress_defaults:
            modify = stored_task.taken_from_checkpoint(parser, input_args, modify)
            modify = recipes.filled_in(parser, input_args, modify)
        parsed = inner(parser, input_args, parse_known, suppress_defaults, modify)
        recipes.announce_filled(modify)
        if isinstance(parsed, Namespace) and not suppress_defaults:
            refusals.check(parsed)
        ranges.check_command_line(parsed[0] if isinstance(parsed, tuple) else parsed)
        return parsed

    return True
