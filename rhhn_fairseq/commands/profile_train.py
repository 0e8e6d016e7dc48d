"""Shows where the time of an update of fairseq-train goes, part by part.

Usage: %(prog)s [--updates 20] [--warm-up 5] [--json FILE] -- ARGUMENTS

ARGUMENTS are those of fairseq-train. Trains with them for that many updates in this process; nothing is saved
or validated.
"""

import sys

from rhhn_fairseq.commands.parsers import add_fields, make_parser, read_fields
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.lines import check_output
from rhhn_fairseq.programs import usage


def main(argv=None) -> None:
    from rhhn_fairseq.bench import report as reports
    from rhhn_fairseq.bench import train_profile

    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser("profile_train", __doc__, usage="%(prog)s [options] -- ARGUMENTS OF fairseq-train")
    add_fields(parser, train_profile.Config())
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("arguments", nargs="+", help="what fairseq-train would get, after --")
    if not {"--", "-h", "--help"} & set(argv):
        raise UsageError(
            f"{usage('profile_train')}: the arguments of fairseq-train are missing, give them after --"
        )
    args = parser.parse_args(argv)
    check_output("--json", args.json)
    report = train_profile.run(read_fields(train_profile.Config, args), args.arguments)
    print(reports.render(report, train_profile.COLUMNS))
    if args.json is not None:
        reports.write_json(report, args.json)
