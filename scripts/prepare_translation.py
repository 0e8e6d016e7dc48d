#!/usr/bin/env python3
"""Prepare a parallel corpus for translation: clean it, learn pieces, encode, fairseq-preprocess.

Examples:
  python scripts/prepare_translation.py synthetic --dest data-bin/synthetic-en-fr
  python scripts/prepare_translation.py multi30k --from-dir ~/multi30k --dest data-bin/multi30k-en-fr
  python scripts/prepare_translation.py wmt14-en-fr --dest data-bin/wmt14-en-fr
  python scripts/prepare_translation.py files --train-src a.en --train-tgt a.fr \\
      --valid-src v.en --valid-tgt v.fr --test-src t.en --test-tgt t.fr --vocab-size 8000

An interrupted run continues at the first unfinished stage when the same command is given again.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from rhhn_fairseq.cli import run
from rhhn_fairseq.data.common.download import default_download_dir
from rhhn_fairseq.data.parallel import corpora, synthetic, wmt14
from rhhn_fairseq.data.parallel.cleaning import CleaningConfig
from rhhn_fairseq.data.parallel.pieces import PiecesConfig
from rhhn_fairseq.data.parallel.prepare import prepare, report
from rhhn_fairseq.errors import UsageError


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as every other bad input is reported: one line, status 1."""

    def error(self, message):
        raise UsageError(message)


def parse_arguments(argv):
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = _Parser(add_help=False)
    common.add_argument("--dest", type=Path, metavar="DIR", help="where to write (default: data-bin/CORPUS)")
    common.add_argument("--force", action="store_true", help="replace a corpus prepared there before")
    common.add_argument(
        "--workers",
        type=int,
        default=usable_processors(),
        help="processes that encode and binarise (default: %(default)s)",
    )
    subparsers = parser.add_subparsers(dest="corpus", metavar="CORPUS", required=True)

    multi30k = subparsers.add_parser("multi30k", parents=[common], help="image captions, English to French")
    multi30k.add_argument(
        "--from-dir", type=Path, required=True, metavar="DIR", help="directory of train.en, train.en.gz, ..."
    )
    add_options(
        multi30k, CleaningConfig(**corpora.MULTI30K_CLEANING), PiecesConfig(**corpora.MULTI30K_PIECES)
    )

    wmt = subparsers.add_parser("wmt14-en-fr", parents=[common], help="the public archives of WMT 2014")
    wmt.add_argument(
        "--parts",
        nargs="+",
        default=list(wmt14.TRAINING),
        metavar="PART",
        help=f"what to train on, of {', '.join(wmt14.TRAINING)} (default: all)",
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
    add_options(wmt, CleaningConfig(), PiecesConfig())

    made = subparsers.add_parser("synthetic", parents=[common], help="numbers, dates, times and amounts")
    made.add_argument("--pairs", type=int, default=20_000, help="pairs to train on (default: %(default)s)")
    made.add_argument("--seed", type=int, default=1, help="seed of the pairs (default: %(default)s)")
    add_options(made, CleaningConfig(), PiecesConfig(**synthetic.PIECES))

    files = subparsers.add_parser("files", parents=[common], help="your own files")
    for split in corpora.SPLITS:
        for side in ("src", "tgt"):
            files.add_argument(
                f"--{split}-{side}", type=Path, nargs="+", metavar="FILE", help="plain, .gz or .zip"
            )
    files.add_argument("--source-lang", default="en", metavar="LANG", help="default: %(default)s")
    files.add_argument("--target-lang", default="fr", metavar="LANG", help="default: %(default)s")
    add_options(files, CleaningConfig(), PiecesConfig())
    return parser.parse_args(argv)


def usable_processors() -> int:
    # Not every system says which of its processors this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_options(parser, *defaults):
    """An option for every field of the configurations, with these values as defaults."""
    for config in defaults:
        for spec in dataclasses.fields(config):
            option = f"--{spec.name.replace('_', '-')}"
            text = spec.metadata["help"]
            if spec.type is bool:
                parser.add_argument(
                    option,
                    action=argparse.BooleanOptionalAction,
                    default=getattr(config, spec.name),
                    help=text,
                )
            else:
                parser.add_argument(
                    option,
                    type=spec.type,
                    default=getattr(config, spec.name),
                    choices=spec.metadata.get("choices"),
                    help=f"{text} (default: %(default)s)",
                )


def read_options(kind, arguments):
    return kind(**{spec.name: getattr(arguments, spec.name) for spec in dataclasses.fields(kind)})


def choose_corpus(arguments):
    if arguments.corpus == "multi30k":
        return corpora.multi30k(arguments.from_dir)
    if arguments.corpus == "wmt14-en-fr":
        verify = not arguments.no_verify
        return wmt14.wmt14(arguments.parts, arguments.from_dir, arguments.download_dir, verify)
    if arguments.corpus == "synthetic":
        return synthetic.synthetic(arguments.pairs, arguments.seed)
    paths = {
        f"{split}_{side}": getattr(arguments, f"{split}_{side}")
        for split in corpora.SPLITS
        for side in ("src", "tgt")
    }
    return corpora.files(paths, arguments.source_lang, arguments.target_lang)


def main(argv=None) -> None:
    arguments = parse_arguments(argv)
    cleaning = read_options(CleaningConfig, arguments)
    pieces = read_options(PiecesConfig, arguments)
    corpus = choose_corpus(arguments)
    languages = "-".join(corpus.languages)
    dest = arguments.dest or Path("data-bin") / f"{corpus.name.removesuffix(f'-{languages}')}-{languages}"
    try:
        manifest, reused = prepare(corpus, cleaning, pieces, dest, arguments.workers, arguments.force)
    except KeyboardInterrupt:
        print("interrupted; the same command continues at the first unfinished stage", file=sys.stderr)
        raise
    print(f"{'already prepared' if reused else 'prepared'}: {dest}")
    print(report(manifest))


if __name__ == "__main__":
    sys.exit(run(main))
