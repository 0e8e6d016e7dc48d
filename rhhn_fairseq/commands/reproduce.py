"""Reproduces rows of the papers' tables: prepares, trains, evaluates, records, and renders a page.

Examples:
  %(prog)s --list
  %(prog)s ha-ptb ln_hyperlstm_ptb lstm_ptb --epochs 25 --from-dir ~/ptb
  %(prog)s su-ptb --scale 0.1 --seeds 1 2 3
  %(prog)s su-ptb hyperrhn_ptb --adopt train.log checkpoints/hyperrhn_ptb
  %(prog)s --queue tonight.txt

A line of a queue is what would follow the command, such as ``ha-ptb lstm_ptb --epochs 25``. The same command
resumes an interrupted run from its last checkpoint. Options of fairseq-train may follow ``--``.
"""

import sys

from rhhn_fairseq.commands.parsers import make_parser


def main(argv=None) -> None:
    from rhhn_fairseq.reproduce import program

    words = list(sys.argv[1:] if argv is None else argv)
    program.run(words, make_parser("reproduce", __doc__))
