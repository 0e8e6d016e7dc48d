"""``manifest.json`` of a prepared character corpus, and which files such a directory has."""

from rhhn_fairseq.data.common.manifest import SPLITS, ManifestForm

DICTIONARY_NAME = "dict.txt"
MODES = ("text", "bytes")
FORMAT = 1

DATA_FILES = (
    DICTIONARY_NAME,
    *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")),
)


def is_data_file(name: str) -> bool:
    """Whether a prepared character corpus has a file of this name besides its manifest."""
    return name in DATA_FILES


CHARACTERS = ManifestForm("a character corpus", kind=None, format=FORMAT)
