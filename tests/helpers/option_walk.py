"""Data, and a trained checkpoint, of a tiny model of every task."""

from pathlib import Path

from helpers import tiny_char_lm, tiny_translation
from helpers.programs import run
from helpers.tiny_handwriting import prepare_words

ARCHITECTURES = {
    "char_lm": "char_lm",
    "gnmt_translation": "gnmt",
    "handwriting": "handwriting",
    "synthetic": "classifier",
}
# What makes a training short; an option that is tried takes the place of its like here.
TINY = {
    "char_lm": "--cell lstm --hidden-size 6 --tokens-per-sample 5 --batch-size 2",
    "gnmt_translation": "--hidden-size 6 --embed-dim 6 --encoder-layers 2 --decoder-layers 2 --batch-size 8",
    "handwriting": "--hidden-size 6 --mixtures 2 --batch-size 4",
    "synthetic": "--problem xor --length 4 --hidden-size 6 --batch-size 4 --valid-examples 8",
}
TRAINING = "--cpu --num-workers 0 --max-update 2 --log-format simple"


class Workplace:
    """A folder with data for every task, and a checkpoint of every task once one is asked for."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.data = {"synthetic": None}

    def data_of(self, task: str) -> list[str]:
        if task not in self.data:
            place = self.folder / f"data-{task}"
            place.mkdir(parents=True, exist_ok=True)
            makers = {"char_lm": tiny_char_lm.write_corpus, "gnmt_translation": tiny_translation.prepare}
            make = makers.get(task, lambda place: prepare_words(place / "data", lines=12))
            self.data[task] = str(make(place))
        return [self.data[task]] if self.data[task] else []

    def checkpoint_of(self, task: str) -> Path:
        path = self.folder / f"trained-{task}"
        if not path.exists():
            outcome = run("train", [*training(task, self), "--save-dir", path])
            assert outcome.kind == "works", outcome.text
        return path / "checkpoint_last.pt"


def training(task: str, place: Workplace) -> list[str]:
    return [*place.data_of(task), "--arch", ARCHITECTURES[task], *f"{TINY[task]} {TRAINING}".split()]
