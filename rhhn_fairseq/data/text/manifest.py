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


def _problem(manifest: dict) -> str | None:
    if manifest["mode"] not in MODES:
        return f"mode is {manifest['mode']!r}, not one of {', '.join(MODES)}"
    return None


CHARACTERS = ManifestForm(
    corpus="a character corpus",
    kind=None,
    format=FORMAT,
    types={
        "mode": str,
        "newline_occurs": bool,
        "symbols": int,
        "variant": str,
        "request": dict,
        "files": dict,
        "splits": dict,
    },
    check=_problem,
)
