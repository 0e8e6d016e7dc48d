"""``manifest.json`` of a prepared parallel corpus, and which files such a directory has."""

import re

from rhhn_fairseq.data.common.manifest import ManifestForm

KIND = "parallel"

FORMAT = 1

_OWN = re.compile(
    r"dict\.\w+\.txt|pieces\.(model|vocab)|(train|valid|test\d*)\.\w+-\w+\.\w+\.(bin|idx)|raw/((valid|test\d*)\.\w+)?"
)


def is_parallel_file(name: str) -> bool:
    """Whether a prepared parallel corpus may have this file, a path relative to its directory."""
    return bool(_OWN.fullmatch(name))


PARALLEL = ManifestForm("a parallel corpus", KIND, FORMAT)
