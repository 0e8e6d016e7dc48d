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

# The name of a corpus for ``rhhn prepare``, None if nothing is prepared, and options.
CORPORA: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "ptb": ("ptb", ()),
    "enwik8": ("enwik8", ()),
    # Ha et al. use the split of Graves 2013, which has no test set.
    "iam-graves": ("iam", ("--protocol", "graves")),
    "wmt14": ("wmt14-en-fr", ()),
    "mnist": (None, ()),
    "none": (None, ()),
}
# The user must say where their files are.
LOCAL = ("iam-graves", "mnist")

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
    prepared, options = CORPORA[name]
    place = data / name
    done = prepared and ((place / "dict.txt").exists() or (place / "manifest.json").exists())
    if name in LOCAL and from_dir is None and not done:
        raise UsageError(
            f"--from-dir is not given: {name} cannot be downloaded, name the directory with its files"
        )
    if prepared is None:
        return from_dir
    if done:
        if name in FORMS:
            _check_form(name, place)
        return place
    source = [] if from_dir is None else ["--from-dir", str(from_dir)]
    cli.main([prepared, *source, *options, "--dest", str(place)])
    return place


def _check_form(name: str, place: Path) -> None:
    """Raises UsageError if a directory holds the corpus in another form than the papers'."""
    manifest = CHARACTERS.read(place) or {"request": {}}
    request, (variant, mode) = manifest["request"], FORMS[name]
    options = request.get("options") or {}
    same = options.get("variant", variant) == variant and request.get("mode", mode) == mode
    # Other text in its place serves to measure costs.
    if request.get("corpus") == name and not same:
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
