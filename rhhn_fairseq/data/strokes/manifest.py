"""``manifest.json`` of prepared handwriting, and which files such a directory has."""

from dataclasses import dataclass
from pathlib import Path

from rhhn_fairseq.data.common.manifest import MANIFEST_NAME, ManifestForm
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.errors import UsageError

STROKES = ManifestForm(
    "handwriting",
    kind="strokes",
    format=1,
    files=r"(train|valid1?|test)\.(points\.npy|starts\.npy|jsonl)",
    identity=("sha256",),
)


@dataclass(frozen=True)
class StrokeManifest:
    """What models need to know about prepared handwriting.

    Attributes:
        variant: the corpus in words. splits: the names of its splits.
        normalisation: of the training lines' offsets.
        symbols: the characters of the training lines' texts in order, "" if none has a text.
        points_per_symbol: training points for each character of their texts, 0 if none has a text.
    """

    variant: str
    splits: tuple[str, ...]
    normalisation: Normalisation
    symbols: str
    points_per_symbol: float

    @classmethod
    def load(cls, data_dir: str | Path) -> "StrokeManifest":
        """Loads the manifest of a prepared directory; UsageError if there is none or it cannot be read."""
        manifest = STROKES.read(data_dir)
        if manifest is None:
            raise UsageError(f"{data_dir}: has no {MANIFEST_NAME}; name a directory that rhhn prepare made")
        statistics = manifest["statistics"]
        return cls(
            manifest["variant"],
            tuple(manifest["splits"]),
            Normalisation(tuple(statistics["mean"]), tuple(statistics["std"])),
            manifest["symbols"],
            manifest["points_per_symbol"],
        )
