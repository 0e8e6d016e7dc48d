"""Translates raw text line by line: the output has as many lines as the input, in the same order.

Usage: %(prog)s --checkpoint checkpoints/lstm_gnmt_small/checkpoint_best.pt < text.en

Standard input is read in parts of --buffer-size lines, each of which is translated and written before the
next is read, so the text may be of any length. Where lines arrive slowly, a part is what has arrived.
Empty lines stay empty.
"""

import dataclasses
import json
import logging
import os
import re
import sys
from contextlib import contextmanager

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

# The most lines read before any is written; enough for batches of sentences of one length.
BUFFER_SIZE = 1024

# These end lines for some readers of JSON lines, although not by its definition.
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def main(argv=None) -> None:
    args = parse_arguments(argv)
    search_options = ("length_penalty", "coverage_penalty", "beam_size_threshold")
    task_options = {
        name: value
        for name in (*search_options, "source_lang", "target_lang")
        if (value := getattr(args, name)) is not None
    }
    if args.buffer_size is not None and args.buffer_size < 1:
        raise UsageError(f"--buffer-size {args.buffer_size} is too small, the smallest is 1")
    if args.nbest > 1 and not args.json:
        raise UsageError(f"--nbest {args.nbest} needs --json: plain text has one translation a line")

    import torch

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.cli.translation import SearchConfig, Translator
    from rhhn_fairseq.files import check_output
    from rhhn_fairseq.models.loading import load_translation_models

    fields = [field.name for field in dataclasses.fields(SearchConfig)]
    config = SearchConfig(**{name: getattr(args, name) for name in fields})
    checkpoints = [path for given in args.checkpoint for path in named_checkpoints(given)]
    check_output("--output", args.output, (args.input, *checkpoints))
    with opened_input(args.input) as (source, name), opened_output(args.output) as output:
        loaded = load_translation_models(checkpoints, args.data, args.sentencepiece_model, task_options)
        on_gpu = torch.cuda.is_available() and not args.cpu
        translator = Translator(loaded, config, "cuda" if on_gpu else "cpu")
        translate(translator, source, name, output, args)
    if translator.cut > 1:
        logging.getLogger(__name__).warning("%d lines were cut", translator.cut)


def parse_arguments(argv):
    parser = make_parser("translate", __doc__)
    add = parser.add_argument
    add(
        "--checkpoint",
        action="append",
        required=True,
        metavar="FILE",
        help="trained model; give it several times, or a.pt:b.pt, for an ensemble",
    )
    add("--data", metavar="DIR", help="directory of the dictionaries (default: that of the training)")
    add(
        "--sentencepiece-model",
        metavar="FILE",
        help="sentencepiece model (default: pieces.model in the data directory)",
    )
    add("--source-lang", metavar="LANG", help="source language (default: from the checkpoint or the data)")
    add("--target-lang", metavar="LANG", help="target language (default: from the checkpoint or the data)")
    add("--input", metavar="FILE", help="text to translate (default: standard input)")
    add("--output", metavar="FILE", help="file, written when all is translated (default: standard output)")
    add("--json", action="store_true", help="write JSON lines with scores, not text")
    add(
        "--errors",
        choices=("strict", "replace"),
        default="strict",
        help="how to treat input that is not UTF-8",
    )
    add("--beam", type=int, default=5, help="width of the beam (default: %(default)s)")
    add("--nbest", type=int, default=1, help="translations per line, needs --json (default: %(default)s)")
    add("--max-len-a", type=float, default=1.0, metavar="A", help="a translation has at most A n + B pieces")
    add(
        "--max-len-b",
        type=int,
        default=200,
        metavar="B",
        help="for n source pieces (default: A = 1, B = 200)",
    )
    add(
        "--lenpen", type=float, default=1.0, help="exponent of the length in the score (default: %(default)s)"
    )
    add("--length-penalty", metavar="NAME:ALPHA", help="fairseq, none or gnmt:ALPHA, as in gnmt_translation")
    add(
        "--coverage-penalty",
        type=float,
        metavar="BETA",
        help="weight of the coverage penalty, as in gnmt_translation",
    )
    add("--beam-size-threshold", type=float, metavar="T", help="pruning of the beam, as in gnmt_translation")
    add("--max-tokens", type=int, default=4000, help="source pieces in a batch (default: %(default)s)")
    add(
        "--max-source-pieces",
        type=int,
        metavar="N",
        help="cut longer lines (default: the model's limit, at most 1024)",
    )
    add(
        "--buffer-size",
        type=int,
        metavar="N",
        help=f"lines to read before writing (default: at most {BUFFER_SIZE}; 1 at a terminal)",
    )
    add("--cpu", action="store_true", help="run on the CPU even if there is a GPU")
    return parser.parse_args(argv)


def named_checkpoints(given: str) -> list[str]:
    """Returns the files of an ensemble, separated by commas or, as in fairseq, by colons."""
    if os.path.exists(given) or "://" in given:
        return [given]
    paths = [path for path in re.split("[,:]", given) if path]
    if not paths:
        raise UsageError(f"--checkpoint {given!r} names no file")
    return paths


@contextmanager
def opened_input(path):
    """Yields the text to translate as a binary file, and its name for messages."""
    from rhhn_fairseq.files import opened

    if path is None and sys.stdin is None:
        raise UsageError("standard input is closed; name the text with --input")
    if path is None:
        yield sys.stdin.buffer, "standard input"
    else:
        with opened(path) as file:
            yield file, path


@contextmanager
def opened_output(path):
    """Yields a function that writes bytes to a file, or to standard output with a flush."""
    from rhhn_fairseq.files import replace_file

    if path is not None:
        with replace_file(path) as file:
            yield file.write
        return
    yield write_through


def write_through(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def translate(translator, source, name, write, args) -> None:
    """Reads, translates and writes in batches; shows progress on standard error if the input is a file."""
    from tqdm import tqdm

    from rhhn_fairseq.files import count_lines, decode_batches

    size = args.buffer_size or (1 if source.isatty() else BUFFER_SIZE)
    # A pipe can be read only once.
    total = count_lines(args.input) if args.input and os.path.isfile(args.input) else None
    done = 0
    with tqdm(total=total, unit=" lines", disable=None if args.input else True) as progress:
        for batch in decode_batches(source, name, size, args.errors):
            translations = translator.translate(batch, first_line=done + 1, on_batch=progress.update)
            rows = (
                map(json_line, batch, translations) if args.json else (best[0].text for best in translations)
            )
            write("".join(f"{row}\n" for row in rows).encode("utf-8"))
            done += len(batch)


def json_line(source: str, translations) -> str:
    """Returns one line of --json."""
    row = {"source": source, "translations": [dataclasses.asdict(each) for each in translations]}
    return json.dumps(row, ensure_ascii=False).translate(LINE_ENDS)
