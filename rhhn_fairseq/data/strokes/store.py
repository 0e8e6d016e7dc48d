"""Writes splits of prepared handwriting, and reads them without loading them whole.

``SPLIT.points.npy`` holds the points of all lines one after the other, float32 [sum of N, 3], in the corpus's
units; ``SPLIT.starts.npy`` where each begins, and the end, int64 [lines + 1]; ``SPLIT.jsonl`` one JSON object
per line with its ``name`` and, if it is known, its ``text``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.manifest import MANIFEST_NAME, ManifestForm
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.strokes.points import Line
from rhhn_fairseq.errors import UsageError

STROKES = ManifestForm(
    "handwriting",
    kind="strokes",
    format=1,
    files=r"(train|valid|valid_second|test)\.(points\.npy|starts\.npy|jsonl)",
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


def write_split(directory: Path, split: str, lines: Sequence[Line]) -> None:
    """Writes the three files of a split of at least one line."""
    points = np.concatenate([line.points for line in lines]).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum([len(line.points) for line in lines])]).astype(np.int64)
    np.save(directory / f"{split}.points.npy", points)
    np.save(directory / f"{split}.starts.npy", starts)
    with (directory / f"{split}.jsonl").open("w", encoding="ascii", newline="\n") as file:
        for line in lines:
            entry = {"name": line.name} | ({} if line.text is None else {"text": line.text})
            file.write(json.dumps(entry) + "\n")


class StrokeSplit:
    """The lines of a prepared split; their points stay on disk until they are read.

    Attributes:
        sizes: number of points of each line, int64 [lines].
        names, texts: of each line; an unknown text is "".
    """

    def __init__(self, directory: str | Path, split: str):
        """Opens a split.

        Raises:
            UsageError: it is not there, or its files do not fit together.
        """
        paths = {kind: Path(directory) / f"{split}.{kind}" for kind in ("points.npy", "starts.npy", "jsonl")}
        if not paths["points.npy"].exists():
            others = sorted(path.name.split(".")[0] for path in Path(directory).glob("*.points.npy"))
            raise UsageError(
                f"{paths['points.npy']}: is missing; the directory has these splits of handwriting: "
                f"{', '.join(others) or 'none'}"
            )
        self._points = np.load(paths["points.npy"], mmap_mode="r", allow_pickle=False)
        self._starts = np.load(paths["starts.npy"], allow_pickle=False)
        entries = [json.loads(line) for line in paths["jsonl"].read_text(encoding="ascii").splitlines()]
        self.names = [entry["name"] for entry in entries]
        self.texts = [entry.get("text", "") for entry in entries]
        starts = self._starts
        fits = (
            (self._points.dtype, starts.dtype) == (np.float32, np.int64)
            and self._points.shape == (starts[-1] if starts.ndim == 1 and len(starts) else -1, 3)
            and len(starts) == len(entries) + 1
            and starts[0] == 0
            and (np.diff(starts) >= 2).all()
        )
        if not fits:
            raise UsageError(
                f"{directory}: the files of its {split} split do not fit together; prepare it again with "
                "--force"
            )
        self.sizes = np.diff(starts)

    def __len__(self) -> int:
        return len(self.sizes)

    def points(self, index: int) -> np.ndarray:
        """Returns the points of a line, float32 [N, 3]."""
        return np.array(self._points[self._starts[index] : self._starts[index + 1]])
