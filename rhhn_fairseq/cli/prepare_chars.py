"""Prepare a character corpus in fairseq's binary format.

Examples:
  %(prog)s stdlib --dest data-bin/stdlib
  %(prog)s ptb --from-dir ~/simple-examples --dest data-bin/ptb
  %(prog)s enwik8 --dest data-bin/enwik8
  %(prog)s text8 --from-dir ~/text8
  %(prog)s wikitext103 --from-dir ~/wikitext
  %(prog)s text --train a.txt b.txt --valid v.txt --test t.txt
  %(prog)s text --input book.txt --split 90/5/5 --dest data-bin/book
"""

import argparse
import sys
from pathlib import Path

from rhhn_fairseq.cli.parsers import StrictParser, make_parser
from rhhn_fairseq.data.common.destination import check_replaceable
from rhhn_fairseq.data.common.download import default_download_dir
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.text import corpora
from rhhn_fairseq.data.text.manifest import CHARACTERS
from rhhn_fairseq.data.text.prepare import prepare, report
from rhhn_fairseq.errors import UsageError


def parse_arguments(argv):
    parser = make_parser("prepare", __doc__)
    common = StrictParser(add_help=False)
    common.add_argument("--dest", type=Path, metavar="DIR", help="where to write (default: data-bin/CORPUS)")
    common.add_argument("--force", action="store_true", help="replace a corpus prepared there before")
    verified = StrictParser(add_help=False)
    verified.add_argument(
        "--no-verify",
        action="store_true",
        help="accept input whose size, checksum or counts are not the published ones",
    )
    public = StrictParser(add_help=False, parents=[verified])
    public.add_argument(
        "--from-dir", type=Path, metavar="DIR", help="take the files from here, not from the web"
    )
    local = StrictParser(add_help=False, parents=[verified])
    local.add_argument(
        "--from-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the file or files: plain, .gz, .zip, or in an archive",
    )
    public.add_argument(
        "--download-dir",
        type=Path,
        metavar="DIR",
        default=default_download_dir(),
        help="where downloads are kept (default: %(default)s)",
    )
    subparsers = parser.add_subparsers(dest="corpus", metavar="CORPUS", required=True)

    ptb = subparsers.add_parser("ptb", parents=[common, public], help="Penn Treebank")
    ptb.add_argument(
        "--variant",
        choices=tuple(corpora.PTB_VARIANTS),
        default="raw",
        help="raw (default): the word-level files as characters, as Ha and Suarez read them; char: without "
        "the outer spaces of lines, the text of ptb.char; mikolov-char: from the ptb.char files",
    )
    enwik8 = subparsers.add_parser("enwik8", parents=[common, public], help="100 MB of Wikipedia")
    enwik8.add_argument(
        "--bytes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="symbols are bytes (default), not Unicode characters",
    )
    subparsers.add_parser("text8", parents=[common, local], help="100 MB of Wikipedia in 27 symbols")
    wikitext = subparsers.add_parser("wikitext103", parents=[common, local], help="WikiText-103")
    wikitext.add_argument(
        "--variant",
        choices=tuple(corpora.WIKITEXT_VARIANTS),
        default="raw",
        help="raw (default): the text as it was; tokens: with <unk> for rare words",
    )
    wikitext.add_argument("--bytes", action="store_true", help="symbols are bytes, not characters")
    text = subparsers.add_parser("text", parents=[common], help="your own files")
    for split in SPLITS:
        text.add_argument(f"--{split}", type=Path, nargs="+", metavar="FILE", help="plain, .gz or .zip")
    text.add_argument("--input", type=Path, metavar="FILE", help="one file, cut by --split")
    text.add_argument("--split", metavar="P/P/P", help="percentages for --input, such as 90/5/5")
    text.add_argument("--bytes", action="store_true", help="symbols are bytes, not characters")
    text.add_argument(
        "--errors",
        choices=("strict", "replace"),
        default="strict",
        help="bytes that are not UTF-8 end the preparation (default), or are read as U+FFFD",
    )
    stdlib = subparsers.add_parser(
        "stdlib", parents=[common], help="the source of this Python's standard library"
    )
    stdlib.add_argument(
        "--size",
        type=int,
        default=2_000_000,
        help="training characters; valid and test have 5 %% of it each (default: %(default)s)",
    )
    return parser.parse_args(argv)


def choose_corpus(arguments):
    if arguments.corpus == "ptb":
        return corpora.ptb(arguments.variant, arguments.from_dir, arguments.download_dir)
    if arguments.corpus == "enwik8":
        return corpora.enwik8(arguments.bytes, arguments.from_dir, arguments.download_dir)
    if arguments.corpus == "text8":
        return corpora.text8(arguments.from_dir)
    if arguments.corpus == "wikitext103":
        return corpora.wikitext103(arguments.variant, arguments.bytes, arguments.from_dir)
    if arguments.corpus == "stdlib":
        return corpora.stdlib(arguments.size)
    if arguments.bytes and arguments.errors != "strict":
        raise UsageError(f"--errors {arguments.errors}: has no meaning with --bytes, which takes every byte")
    files = {split: getattr(arguments, split) for split in SPLITS}
    if arguments.input is None and arguments.split is None:
        return corpora.text_files(files, arguments.bytes, arguments.errors)
    if arguments.input is None or arguments.split is None or any(files.values()):
        raise UsageError("pass either --input with --split, or --train, --valid and --test")
    return corpora.text_split(arguments.input, arguments.split, arguments.bytes, arguments.errors)


def main(argv=None) -> None:
    arguments = parse_arguments(argv)
    dest = arguments.dest or Path("data-bin") / arguments.corpus
    verify = not getattr(arguments, "no_verify", False)
    # Before hours of downloading.
    check_replaceable(dest, arguments.force, CHARACTERS)
    try:
        manifest, reused = prepare(choose_corpus(arguments), dest, arguments.force, verify)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was prepared", file=sys.stderr)
        raise
    print(f"{'already prepared' if reused else 'prepared'}: {dest}")
    print(report(manifest))
