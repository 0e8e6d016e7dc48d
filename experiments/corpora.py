"""The corpora of the tables: how each is prepared, and what a training reads.

A corpus is prepared once, by the project's own programs, into a directory below ``--data``.
"""

import tempfile
from pathlib import Path

import numpy as np

from rhhn_fairseq.cli import prepare as cli
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.problems.images import T10K_SPLIT
from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.vocabulary import CHARACTERS, CharVocabulary
from rhhn_fairseq.errors import UsageError

# What ``rhhn prepare`` is given for a corpus; the others are generated, or read as they are.
# Ha et al. use the split of Graves 2013 of IAM-OnDB, which has no test set.
CORPORA = {
    "ptb": ("ptb",),
    "enwik8": ("enwik8",),
    "iam-graves": ("iam", "--protocol", "graves"),
    "wmt14": ("wmt14-en-fr",),
}
# The papers' form of a corpus that `rhhn prepare` also makes in others: by variant and by mode.
FORMS = {"ptb": ("raw", "text"), "enwik8": (None, "bytes")}


def prepare(name: str, data: Path, from_dir: Path | None) -> Path | None:
    """Prepares a corpus unless that is done; returns the directory that a training reads, if it reads any.

    Args:
        data: the corpus is written to its directory of the same name. from_dir: holds its files; None to
            download them if the corpus is public.

    Raises:
        UsageError: the files are missing or are not those of the corpus, or it was prepared in another form.
    """
    place = data / name
    if (place / "dict.txt").exists() or (place / "manifest.json").exists():
        _check_form(name, place)
        return place
    if name not in CORPORA:
        return from_dir
    source = [] if from_dir is None else ["--from-dir", str(from_dir)]
    corpus, *options = CORPORA[name]
    cli.main([corpus, *source, *options, "--dest", str(place)])
    return place


def _check_form(name: str, place: Path) -> None:
    """Raises UsageError if a directory holds the corpus in another form than the papers'."""
    if name not in FORMS:
        return
    manifest = CHARACTERS.read(place) or {"request": {}}
    request, (variant, mode) = manifest["request"], FORMS[name]
    given = (request.get("options") or {}).get("variant", variant), request.get("mode", mode)
    # Other text in its place serves to measure costs.
    if request.get("corpus") == name and given != FORMS[name]:
        raise UsageError(
            f"{place}: holds {manifest['variant']}, not the text of the table; name another --data"
        )


def prepare_share(source: Path, share: float) -> Path:
    """Prepares the first symbols of a prepared character corpus as a separate corpus beside it.

    Args:
        source: the whole corpus. share: of each split, in (0, 1).
    """
    place = source.with_name(f"{source.name}-x{share:g}")
    if (place / "dict.txt").exists():
        return place
    vocabulary = CharVocabulary.load(source)
    arguments = ["--dest", str(place), *(["--bytes"] if vocabulary.mode == "bytes" else [])]
    # Each process has its own, because several may start at the same time.
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as texts:
        for split in SPLITS:
            stream = open_stream(source / split, len(vocabulary))
            text = vocabulary.decode(np.asarray(stream[: max(1, int(share * len(stream)))]))
            path = Path(texts) / split
            path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
            arguments += [f"--{split}", str(path)]
        cli.main(["text", *arguments])
    return place


def task_options(name: str, place: Path | None) -> dict[str, object]:
    """Returns options of fairseq-train that follow from the corpus's files, besides the data directory."""
    if name != "mnist" or place is None:
        return {}
    complete = any(place.glob("train-images*"))
    return {"mnist_dir": str(place)} | ({} if complete else {"mnist_split": T10K_SPLIT})
