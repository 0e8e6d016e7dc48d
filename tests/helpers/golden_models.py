"""The golden checkpoints in ``tests/golden``: what they are of, and the data directories they name.

A family has two files. ``NAME.pt`` is a checkpoint of fairseq-train. ``NAME.logits.pt`` holds a batch and the
float32 logits that the model gave for it in evaluation. They were made at commit 9966edc, before cells and
kernels were rebuilt, by 20 updates of fairseq-train each: what was saved then still loads and means the same.
The script that made them, tests/golden/make.py, is in the history of the repository.
"""

from pathlib import Path

from helpers import tiny_char_lm, tiny_handwriting, tiny_translation

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.pt") if not path.stem.endswith(".logits"))


def checkpoint(name: str) -> Path:
    return GOLDEN / f"{name}.pt"


def expected(name: str) -> Path:
    return GOLDEN / f"{name}.logits.pt"


def kind_of(name: str) -> str:
    """The kind of data that a family reads: char_lm, gnmt, handwriting or classifier."""
    return name.split("-")[0]


def write_dictionaries(folder: Path) -> Path:
    """The dictionaries of a translation corpus, words in place of pieces."""
    folder.mkdir(parents=True)
    for language, words in (("en", tiny_translation.ENGLISH), ("fr", tiny_translation.FRENCH)):
        (folder / f"dict.{language}.txt").write_text("".join(f"{word} 1\n" for word in words))
    return folder


def data_directory(kind: str, folder: Path) -> str | None:
    """Makes the directory from which ``kind`` reads its vocabulary; None where it needs no data."""
    if kind == "char_lm":
        return tiny_char_lm.write_corpus(folder)
    if kind == "gnmt":
        return str(write_dictionaries(folder / "data"))
    if kind == "handwriting":
        return str(tiny_handwriting.prepare_words(folder / "data"))
    return None


def logits_of(output):
    """The logits [B, T, ·] or [B, ·] in what a model returns."""
    return output[0] if isinstance(output, tuple) else output
