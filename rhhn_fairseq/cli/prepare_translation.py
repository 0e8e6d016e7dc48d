"""Prepare a parallel corpus for translation: clean it, learn pieces, encode and binarise it.

Examples:
  %(prog)s synthetic --dest data-bin/synthetic-en-fr
  %(prog)s multi30k --from-dir ~/multi30k --dest data-bin/multi30k-en-fr
  %(prog)s wmt14-en-fr --dest data-bin/wmt14-en-fr
  %(prog)s files --train-src a.en --train-tgt a.fr \\
      --valid-src v.en --valid-tgt v.fr --test-src t.en --test-tgt t.fr --vocab-size 8000

An interrupted run continues at the first unfinished stage when the same command is given again.
"""

import os
import sys
from pathlib import Path

from rhhn_fairseq.cli.parsers import StrictParser, add_fields, make_parser, read_fields
from rhhn_fairseq.data.common.download import default_download_dir
from rhhn_fairseq.data.parallel import corpora, wmt14
from rhhn_fairseq.data.parallel.pieces import PiecesConfig
from rhhn_fairseq.data.parallel.prepare import check_options, prepare, report
from rhhn_fairseq.data.parallel.texts import CleaningConfig


def parse_arguments(argv):
    parser = make_parser("prepare", __doc__)
    common = StrictParser(add_help=False)
    place = "where to write (default: data-bin/CORPUS-SOURCE-TARGET)"
    common.add_argument("--dest", type=Path, metavar="DIR", help=place)
    common.add_argument("--force", action="store_true", help="replace a corpus prepared there before")
    common.add_argument(
        "--workers",
        type=int,
        default=usable_processors(),
        help="threads that encode (default: %(default)s)",
    )
    subparsers = parser.add_subparsers(dest="corpus", metavar="CORPUS", required=True)

    multi30k = subparsers.add_parser("multi30k", parents=[common], help="image captions, English to French")
    multi30k.add_argument(
        "--from-dir", type=Path, required=True, metavar="DIR", help="directory of train.en, train.en.gz, ..."
    )
    add_fields(multi30k, CleaningConfig(**corpora.MULTI30K_CLEANING), PiecesConfig(**corpora.MULTI30K_PIECES))

    wmt = subparsers.add_parser("wmt14-en-fr", parents=[common], help="the public archives of WMT 2014")
    wmt.add_argument(
        "--parts",
        nargs="+",
        default=list(wmt14.TRAINING),
        metavar="PART",
        help=f"parts to train on, of {', '.join(wmt14.TRAINING)} (default: all)",
    )
    wmt.add_argument("--from-dir", type=Path, metavar="DIR", help="take the archives from here")
    wmt.add_argument(
        "--download-dir",
        type=Path,
        metavar="DIR",
        default=default_download_dir() / "wmt14",
        help="where downloads are kept (default: %(default)s)",
    )
    wmt.add_argument("--no-verify", action="store_true", help="accept archives with other checksums")
    add_fields(wmt, CleaningConfig(), PiecesConfig())

    made = subparsers.add_parser("synthetic", parents=[common], help="numbers, dates, times and amounts")
    made.add_argument("--pairs", type=int, default=20_000, help="pairs to train on (default: %(default)s)")
    made.add_argument("--seed", type=int, default=1, help="seed of the pairs (default: %(default)s)")
    add_fields(made, CleaningConfig(), PiecesConfig(**corpora.SYNTHETIC_PIECES))

    files = subparsers.add_parser("files", parents=[common], help="your own files")
    for split in corpora.SPLITS:
        for side in ("src", "tgt"):
            files.add_argument(
                f"--{split}-{side}", type=Path, nargs="+", metavar="FILE", help="plain, .gz or .zip"
            )
    files.add_argument(
        "--source-lang", default="en", metavar="LANG", help="source language (default: %(default)s)"
    )
    files.add_argument(
        "--target-lang", default="fr", metavar="LANG", help="target language (default: %(default)s)"
    )
    add_fields(files, CleaningConfig(), PiecesConfig())
    return parser.parse_args(argv)


def usable_processors() -> int:
    # Not every system can tell which processors this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_corpus(arguments):
    if arguments.corpus == "multi30k":
        return corpora.multi30k(arguments.from_dir)
    if arguments.corpus == "wmt14-en-fr":
        verify = not arguments.no_verify
        return wmt14.wmt14(arguments.parts, arguments.from_dir, arguments.download_dir, verify)
    if arguments.corpus == "synthetic":
        # Needs packages that the other corpora do not.
        from rhhn_fairseq.data.parallel import synthetic

        return synthetic.synthetic(arguments.pairs, arguments.seed)
    paths = {
        f"{split}_{side}": getattr(arguments, f"{split}_{side}")
        for split in corpora.SPLITS
        for side in ("src", "tgt")
    }
    return corpora.files(paths, arguments.source_lang, arguments.target_lang)


def main(argv=None) -> None:
    arguments = parse_arguments(argv)
    cleaning = read_fields(CleaningConfig, arguments)
    pieces = read_fields(PiecesConfig, arguments)
    languages = f"{getattr(arguments, 'source_lang', 'en')}-{getattr(arguments, 'target_lang', 'fr')}"
    name = arguments.corpus.removesuffix(f"-{languages}")
    dest = arguments.dest or Path("data-bin") / f"{name}-{languages}"
    # Before hours of downloading.
    check_options(dest, arguments.workers, arguments.force)
    corpus = choose_corpus(arguments)
    try:
        manifest, reused = prepare(corpus, dest, cleaning, pieces, arguments.workers, arguments.force)
    except KeyboardInterrupt:
        print("interrupted; the same command continues at the first unfinished stage", file=sys.stderr)
        raise
    print(f"{'already prepared' if reused else 'prepared'}: {dest}")
    print(report(manifest))
