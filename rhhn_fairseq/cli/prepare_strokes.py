"""Prepare handwriting for the task handwriting: offsets of a pen, with their normalisation and their texts.

Examples:
  %(prog)s                                   # made-up words, nothing to download
  %(prog)s hershey --lines 5000 --seed 2 --dest data-bin/words
  %(prog)s iam --from-dir ~/iamondb --dest data-bin/iam
  %(prog)s stroke3 --input short_kanji.npz --dest data-bin/kanji
  %(prog)s stroke3 --input folder/ --split 80/10/10 --y-up --dest data-bin/mine
"""

import sys
from pathlib import Path

from rhhn_fairseq.cli.parsers import StrictParser, add_fields, make_parser, read_fields
from rhhn_fairseq.data.strokes.cleaning import CleaningConfig
from rhhn_fairseq.data.strokes.hershey import HersheyConfig, hershey
from rhhn_fairseq.data.strokes.iam import PROTOCOLS, iam
from rhhn_fairseq.data.strokes.normalisation import KINDS
from rhhn_fairseq.data.strokes.points import FIRST_ROWS
from rhhn_fairseq.data.strokes.prepare import prepare, report
from rhhn_fairseq.data.strokes.stroke3 import stroke3


def parse_arguments(argv):
    parser = make_parser("prepare", __doc__)
    common = StrictParser(add_help=False)
    common.add_argument("--dest", type=Path, metavar="DIR", help="where to write (default: data-bin/CORPUS)")
    common.add_argument("--force", action="store_true", help="replace a corpus prepared there before")
    common.add_argument(
        "--normalise",
        choices=KINDS,
        default="standard",
        help="normalise dx and dy separately by mean and deviation, by one deviation for both, or not at all",
    )
    common.add_argument(
        "--statistics-of", type=Path, metavar="DIR", help="take the normalisation of this prepared directory"
    )
    subparsers = parser.add_subparsers(
        dest="corpus", metavar="CORPUS", required=True, help="default: hershey"
    )

    made = subparsers.add_parser("hershey", parents=[common], help="words in the Hershey stroke fonts")
    made.add_argument(
        "--words", type=Path, metavar="FILE", help="words to write (default: frequent English ones)"
    )
    add_fields(made, HersheyConfig(), CleaningConfig())

    recorded = subparsers.add_parser("iam", parents=[common], help="IAM-OnDB")
    recorded.add_argument(
        "--from-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of its archives, or their contents",
    )
    recorded.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        default="task1",
        help="the benchmark's four sets, or Graves's, who trains on all but one validation set",
    )
    # Ha et al. drop shorter lines; Graves removes steps that are recording errors.
    add_fields(recorded, CleaningConfig(min_points=300, outliers="drop"))

    arrays = subparsers.add_parser("stroke3", parents=[common], help="arrays of (dx, dy, pen bit)")
    arrays.add_argument(
        "--input", type=Path, nargs="+", required=True, metavar="PATH", help=".npz, .npy, or a folder of .npy"
    )
    arrays.add_argument(
        "--split",
        metavar="P/P/P",
        default="90/5/5",
        help="percentages for an input without splits (default: %(default)s)",
    )
    arrays.add_argument("--seed", type=int, default=1, help="seed of that split (default: %(default)s)")
    arrays.add_argument(
        "--first-row",
        choices=FIRST_ROWS,
        default="drawn",
        help="whether a first offset other than zero draws from the origin, or moves to the first point",
    )
    arrays.add_argument("--y-up", action="store_true", help="y grows upwards in the input")
    add_fields(arrays, CleaningConfig())
    return parser.parse_args(with_corpus(argv))


def with_corpus(argv):
    """Returns the arguments, preceded by the corpus hershey if they name none."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        return ["hershey", *argv]
    return argv


def choose_corpus(arguments):
    if arguments.corpus == "hershey":
        return hershey(read_fields(HersheyConfig, arguments), arguments.words)
    if arguments.corpus == "iam":
        return iam(arguments.from_dir, arguments.protocol)
    return stroke3(arguments.input, arguments.split, arguments.first_row, arguments.y_up, arguments.seed)


def main(argv=None) -> None:
    arguments = parse_arguments(argv)
    dest = arguments.dest or Path("data-bin") / arguments.corpus
    try:
        manifest, reused = prepare(
            choose_corpus(arguments),
            dest,
            read_fields(CleaningConfig, arguments),
            arguments.normalise,
            arguments.statistics_of,
            arguments.force,
        )
    except KeyboardInterrupt:
        print("error: interrupted; nothing was prepared", file=sys.stderr)
        raise
    print(f"{'already prepared' if reused else 'prepared'}: {dest}")
    print(report(manifest))
