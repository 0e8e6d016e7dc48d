"""``manifest.json`` of a prepared character corpus, and which files such a directory has."""

import re

from rhhn_fairseq.data.common.manifest import SPLITS, ManifestForm

DICTIONARY_NAME = "dict.txt"
MODES = ("text", "bytes")

DATA_FILES = (DICTIONARY_NAME, *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")))

CHARACTERS = ManifestForm(
    "a character corpus",
    kind=None,
    format=1,
    files="|".join(map(re.escape, DATA_FILES)),
    identity=("split", "sha256"),
)
