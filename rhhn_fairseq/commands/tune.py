"""Compares cells at equal parameters, equal time and an equal search for good options, on a prepared text.

Examples:
  %(prog)s data-bin/ptb lstm ln_hyperlstm hyperrhn --seconds 120 --trials 8
  %(prog)s data-bin/ptb rhn:rhn-depth=5 lstm:layers=2 --parameters 300000

Every trial is kept, failures included. The same command continues where it was stopped; you may add
systems and trials to it.
"""

import sys

from rhhn_fairseq.commands.parsers import make_parser


def main(argv=None) -> None:
    from rhhn_fairseq.tuning import program

    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser("tune", __doc__)
    program.add_options(parser)
    program.run(parser.parse_args(words), words)
