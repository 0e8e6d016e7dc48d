"""``rhhn prepare CORPUS``: prepares a corpus of any kind."""

import importlib

from rhhn_fairseq.compat.names import nearest
from rhhn_fairseq.errors import UsageError

# Corpora in the order of the systems, each with its command and what it is.
CORPORA = {
    "prepare_chars": {
        "ptb": "Penn Treebank, characters",
        "enwik8": "100 MB of Wikipedia, bytes",
        "text8": "100 MB of Wikipedia in 27 symbols",
        "wikitext103": "WikiText-103, characters",
        "text": "your own text files",
        "stdlib": "the source of this Python's standard library",
    },
    "prepare_translation": {
        "multi30k": "image captions, English to French",
        "wmt14-en-fr": "WMT 2014, English to French",
        "synthetic": "numbers, dates, times and amounts, made here",
        "files": "your own pairs of files",
    },
    "prepare_strokes": {
        "hershey": "words in the Hershey stroke fonts, made here",
        "iam": "IAM-OnDB, recorded handwriting",
        "stroke3": "your own drawings: arrays of (dx, dy, pen bit)",
        "strokes": "the same as hershey; or strokes CORPUS, one of these three",
    },
}
TITLES = {
    "prepare_chars": "For character language models",
    "prepare_translation": "For translation",
    "prepare_strokes": "For handwriting",
}


def main(argv: list[str]) -> None:
    """Passes the arguments to the command that prepares the corpus.

    Raises:
        UsageError: no corpus is named, or no command knows it.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(overview())
        return
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"rhhn prepare: name the corpus first, one of {', '.join(known())}")
    for module, corpora in CORPORA.items():
        if argv[0] in corpora:
            arguments = argv[1:] if argv[0] == "strokes" else argv
            importlib.import_module(f"rhhn_fairseq.cli.{module}").main(arguments)
            return
    hint = nearest(argv[0], known()) or f"choose from {', '.join(known())}"
    raise UsageError(f"rhhn prepare {argv[0]}: no such corpus, {hint}")


def known() -> list[str]:
    """Returns the names of all corpora."""
    return [name for corpora in CORPORA.values() for name in corpora]


def overview() -> str:
    """Returns a list of all corpora, one per line."""
    width = max(map(len, known()))
    rows = ["usage: rhhn prepare CORPUS ...    (rhhn prepare CORPUS --help: its options)"]
    for module, corpora in CORPORA.items():
        rows += ["", f"{TITLES[module]}:"]
        rows += [f"  {name:{width}}  {text}" for name, text in corpora.items()]
    return "\n".join(rows)
