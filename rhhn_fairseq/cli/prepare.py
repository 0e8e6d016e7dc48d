"""``rhhn prepare CORPUS``: prepares a corpus of any kind."""

import argparse
import os
import sys
from pathlib import Path

from rhhn_fairseq.cli.parsers import add_fields, make_parser, read_fields
from rhhn_fairseq.compat.names import complete_name
from rhhn_fairseq.errors import UsageError, nearest

SPLITS = ("train", "valid", "test")


def main(argv: list[str]) -> None:
    """Prepares the corpus that the first argument names.

    Raises:
        UsageError: no corpus is named, or there is none of this name.
    """
    known = [name for _, corpora in KINDS.values() for name in corpora]
    complete_name(argv, known, skip=1)
    if argv and argv[0] in ("-h", "--help"):
        print(overview())
        return
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"rhhn prepare: name the corpus first, one of {', '.join(known)}")
    name, rest = argv[0], argv[1:]
    for prepare, corpora in KINDS.values():
        if name in corpora:
            options, _ = corpora[name]
            parser = make_parser(f"prepare {name}", f"Prepares a corpus: {corpora[name][1]}.")
            place = "data-bin/CORPUS-SOURCE-TARGET" if prepare is translation else f"data-bin/{name}"
            text = f"where to write (default: {place})"
            parser.add_argument("--dest", type=Path, metavar="DIR", help=text)
            text = "replace a corpus prepared there before"
            parser.add_argument("--force", action="store_true", help=text)
            prepare(parser, options, name, rest)
            return
    hint = nearest(name, known) or f"choose from {', '.join(known)}"
    raise UsageError(f"rhhn prepare {name}: no such corpus, {hint}")


def overview() -> str:
    """Returns a list of all corpora, one per line."""
    width = max(len(name) for _, corpora in KINDS.values() for name in corpora)
    rows = ["usage: rhhn prepare CORPUS ...    (rhhn prepare CORPUS --help: its options)"]
    for title, (_, corpora) in KINDS.items():
        rows += ["", f"{title}:"]
        rows += [f"  {name:{width}}  {text}" for name, (_, text) in corpora.items()]
    return "\n".join(rows)


def _run(prepare, report, dest: Path, interrupted="error: interrupted; nothing was prepared") -> None:
    """Prepares a corpus and prints what was made."""
    try:
        manifest, reused = prepare()
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise
    print(f"{'already prepared' if reused else 'prepared'}: {dest}")
    print(report(manifest))


def _add_from_dir(parser, text: str, downloads: str | None = None) -> None:
    """Adds --from-dir, and unless it is required --download-dir, by default ``downloads`` of the cache."""
    from rhhn_fairseq.data.common.download import default_download_dir

    required = downloads is None
    parser.add_argument("--from-dir", type=Path, required=required, metavar="DIR", help=text)
    if not required:
        default = default_download_dir() / downloads
        text = "where downloads are kept (default: %(default)s)"
        parser.add_argument("--download-dir", type=Path, metavar="DIR", default=default, help=text)


def _add_no_verify(parser, what: str) -> None:
    text = f"accept {what} whose size, checksum or counts are not the published ones"
    parser.add_argument("--no-verify", action="store_true", help=text)


# Characters. The functions of corpora add their options, and return what makes the corpus of the arguments.


def characters(parser, options, name: str, argv: list[str]) -> None:
    """Prepares a text for character language models."""
    from rhhn_fairseq.data.common.destination import check_replaceable
    from rhhn_fairseq.data.text import corpora
    from rhhn_fairseq.data.text.prepare import CHARACTERS, prepare, report

    make = options(parser, corpora)
    args = parser.parse_args(argv)
    dest, verify = args.dest or Path("data-bin") / name, not getattr(args, "no_verify", False)
    # Before hours of downloading.
    check_replaceable(dest, args.force, CHARACTERS)
    _run(lambda: prepare(make(args), dest, args.force, verify), report, dest)


def _add_public(parser) -> None:
    _add_no_verify(parser, "input")
    _add_from_dir(parser, "take the files from here, not from the web", "")


def _add_local(parser) -> None:
    _add_no_verify(parser, "input")
    _add_from_dir(parser, "directory of the file or files: plain, .gz, .zip, or in an archive")


def _ptb(parser, corpora):
    _add_public(parser)
    text = (
        "raw (default): the word-level files as characters, as Ha and Suarez read them; char: without "
        "the outer spaces of lines, the text of ptb.char; mikolov-char: from the ptb.char files"
    )
    parser.add_argument("--variant", choices=tuple(corpora.PTB_VARIANTS), default="raw", help=text)
    return lambda args: corpora.ptb(args.variant, args.from_dir, args.download_dir)


def _enwik8(parser, corpora):
    _add_public(parser)
    text = "symbols are bytes (default), not Unicode characters"
    parser.add_argument("--bytes", action=argparse.BooleanOptionalAction, default=True, help=text)
    return lambda args: corpora.enwik8(args.bytes, args.from_dir, args.download_dir)


def _text8(parser, corpora):
    _add_local(parser)
    return lambda args: corpora.text8(args.from_dir)


def _wikitext(parser, corpora):
    _add_local(parser)
    text = "raw (default): the text as it was; tokens: with <unk> for rare words"
    parser.add_argument("--variant", choices=tuple(corpora.WIKITEXT_VARIANTS), default="raw", help=text)
    parser.add_argument("--bytes", action="store_true", help="symbols are bytes, not characters")
    return lambda args: corpora.wikitext103(args.variant, args.bytes, args.from_dir)


def _text(parser, corpora):
    add = parser.add_argument
    for split in SPLITS:
        add(f"--{split}", type=Path, nargs="+", metavar="FILE", help="plain, .gz or .zip")
    add("--input", type=Path, metavar="FILE", help="one file, cut by --split")
    add("--split", metavar="P/P/P", help="percentages for --input, such as 90/5/5")
    add("--bytes", action="store_true", help="symbols are bytes, not characters")
    text = "bytes that are not UTF-8 end the preparation (default), or are read as U+FFFD"
    add("--errors", choices=("strict", "replace"), default="strict", help=text)

    def make(args):
        if args.bytes and args.errors != "strict":
            raise UsageError(f"--errors {args.errors}: has no meaning with --bytes, which takes every byte")
        files = {split: getattr(args, split) for split in SPLITS}
        if args.input is None and args.split is None:
            return corpora.text_files(files, args.bytes, args.errors)
        if args.input is None or args.split is None or any(files.values()):
            raise UsageError("pass either --input with --split, or --train, --valid and --test")
        return corpora.text_split(args.input, args.split, args.bytes, args.errors)

    return make


def _stdlib(parser, corpora):
    text = "training characters; valid and test have 5 %% of it each (default: %(default)s)"
    parser.add_argument("--size", type=int, default=2_000_000, help=text)
    return lambda args: corpora.stdlib(args.size)


# Translation.


def translation(parser, options, name: str, argv: list[str]) -> None:
    """Prepares a parallel corpus: clean it, learn pieces, encode and binarise it."""
    from rhhn_fairseq.data.parallel import corpora
    from rhhn_fairseq.data.parallel.pieces import PiecesConfig
    from rhhn_fairseq.data.parallel.prepare import check_options, prepare, report
    from rhhn_fairseq.data.parallel.texts import CleaningConfig

    # Not every system can tell which processors this process may use.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = "threads that encode (default: %(default)s)"
    parser.add_argument("--workers", type=int, default=usable, help=text)
    make = options(parser, corpora, CleaningConfig, PiecesConfig)
    args = parser.parse_args(argv)
    cleaning, pieces = read_fields(CleaningConfig, args), read_fields(PiecesConfig, args)
    languages = f"{getattr(args, 'source_lang', 'en')}-{getattr(args, 'target_lang', 'fr')}"
    dest = args.dest or Path("data-bin") / f"{name.removesuffix(f'-{languages}')}-{languages}"
    # Before hours of downloading.
    check_options(dest, args.workers, args.force)
    arguments = (dest, cleaning, pieces, args.workers, args.force)
    continues = "interrupted; the same command continues at the first unfinished stage"
    _run(lambda: prepare(make(args), *arguments), report, dest, continues)


def _multi30k(parser, corpora, cleaning, pieces):
    _add_from_dir(parser, "directory of train.en, train.en.gz, ...")
    add_fields(parser, cleaning(**corpora.MULTI30K_CLEANING), pieces(**corpora.MULTI30K_PIECES))
    return lambda args: corpora.multi30k(args.from_dir)


def _wmt14(parser, corpora, cleaning, pieces):
    from rhhn_fairseq.data.parallel import wmt14

    text = f"parts to train on, of {', '.join(wmt14.TRAINING)} (default: all)"
    parser.add_argument("--parts", nargs="+", default=list(wmt14.TRAINING), metavar="PART", help=text)
    _add_from_dir(parser, "take the archives from here", "wmt14")
    _add_no_verify(parser, "archives")
    add_fields(parser, cleaning(), pieces())
    return lambda args: wmt14.wmt14(args.parts, args.from_dir, args.download_dir, not args.no_verify)


def _synthetic(parser, corpora, cleaning, pieces):
    text = "pairs to train on (default: %(default)s)"
    parser.add_argument("--pairs", type=int, default=20_000, help=text)
    parser.add_argument("--seed", type=int, default=1, help="seed of the pairs (default: %(default)s)")
    add_fields(parser, cleaning(), pieces(**corpora.SYNTHETIC_PIECES))

    def make(args):
        # Needs packages that the other corpora do not.
        from rhhn_fairseq.data.parallel import synthetic

        return synthetic.synthetic(args.pairs, args.seed)

    return make


def _pairs(parser, corpora, cleaning, pieces):
    names = [f"{split}-{side}" for split in SPLITS for side in ("src", "tgt")]
    for name in names:
        parser.add_argument(f"--{name}", type=Path, nargs="+", metavar="FILE", help="plain, .gz or .zip")
    for side, language in (("source", "en"), ("target", "fr")):
        text = f"{side} language (default: %(default)s)"
        parser.add_argument(f"--{side}-lang", default=language, metavar="LANG", help=text)
    add_fields(parser, cleaning(), pieces())
    names = [name.replace("-", "_") for name in names]
    return lambda args: corpora.files(
        {name: getattr(args, name) for name in names}, args.source_lang, args.target_lang
    )


# Handwriting.


def handwriting(parser, options, name: str, argv: list[str]) -> None:
    """Prepares handwriting: offsets of a pen, with their normalisation and their texts."""
    from rhhn_fairseq.data.strokes.cleaning import CleaningConfig
    from rhhn_fairseq.data.strokes.normalisation import KINDS as NORMALISATIONS
    from rhhn_fairseq.data.strokes.prepare import prepare, report

    text = "normalise dx and dy separately by mean and deviation, by one deviation for both, or not at all"
    parser.add_argument("--normalise", choices=NORMALISATIONS, help=f"{text} (default: standard)")
    text = "take the normalisation of this prepared directory"
    parser.add_argument("--statistics-of", type=Path, metavar="DIR", help=text)
    make = options(parser, CleaningConfig)
    args = parser.parse_args(argv)
    if args.normalise and args.statistics_of:
        raise UsageError("--normalise has no effect beside --statistics-of, leave one of them out")
    dest, cleaning = args.dest or Path("data-bin") / name, read_fields(CleaningConfig, args)
    arguments = (dest, cleaning, args.normalise or "standard", args.statistics_of, args.force)
    _run(lambda: prepare(make(args), *arguments), report, dest)


def _hershey(parser, cleaning):
    from rhhn_fairseq.data.strokes.hershey import HersheyConfig, hershey

    text = "words to write (default: frequent English ones)"
    parser.add_argument("--words", type=Path, metavar="FILE", help=text)
    add_fields(parser, HersheyConfig(), cleaning())
    return lambda args: hershey(read_fields(HersheyConfig, args), args.words)


def _iam(parser, cleaning):
    from rhhn_fairseq.data.strokes.iam import PROTOCOLS, iam

    _add_from_dir(parser, "directory of its archives, or their contents")
    text = "the benchmark's four sets, or Graves's, who trains on all but one validation set"
    parser.add_argument("--protocol", choices=PROTOCOLS, default="task1", help=text)
    # Ha et al. drop shorter lines; Graves removes steps that are recording errors.
    add_fields(parser, cleaning(min_points=300, outliers="drop"))
    return lambda args: iam(args.from_dir, args.protocol)


def _stroke3(parser, cleaning):
    from rhhn_fairseq.data.strokes.points import FIRST_ROWS
    from rhhn_fairseq.data.strokes.stroke3 import stroke3

    add, text = parser.add_argument, ".npz, .npy, .svg, or a folder of .npy or .svg"
    add("--input", type=Path, nargs="+", required=True, metavar="PATH", help=text)
    text = "percentages for an input without splits (default: %(default)s)"
    add("--split", metavar="P/P/P", default="90/5/5", help=text)
    add("--seed", type=int, default=1, help="seed of that split (default: %(default)s)")
    text = "whether a first offset other than zero draws from the origin, or moves to the first point"
    add("--first-row", choices=FIRST_ROWS, default="drawn", help=text)
    add("--y-up", action="store_true", help="y grows upwards in the input")
    add_fields(parser, cleaning())
    return lambda args: stroke3(args.input, args.split, args.first_row, args.y_up, args.seed)


KINDS = {
    "For character language models": (
        characters,
        {
            "ptb": (_ptb, "Penn Treebank, characters"),
            "enwik8": (_enwik8, "100 MB of Wikipedia, bytes"),
            "text8": (_text8, "100 MB of Wikipedia in 27 symbols"),
            "wikitext103": (_wikitext, "WikiText-103, characters"),
            "text": (_text, "your own text files"),
            "stdlib": (_stdlib, "the source of this Python's standard library"),
        },
    ),
    "For translation": (
        translation,
        {
            "multi30k": (_multi30k, "image captions, English to French"),
            "wmt14-en-fr": (_wmt14, "WMT 2014, English to French"),
            "synthetic": (_synthetic, "numbers, dates, times and amounts, made here"),
            "files": (_pairs, "your own pairs of files"),
        },
    ),
    "For handwriting": (
        handwriting,
        {
            "hershey": (_hershey, "words in the Hershey stroke fonts, made here"),
            "iam": (_iam, "IAM-OnDB, recorded handwriting"),
            "stroke3": (_stroke3, "your own drawings: SVG, or arrays of (dx, dy, pen bit)"),
        },
    ),
}
