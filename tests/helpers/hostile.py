"""What hostile cases are made of: small data and models, a command on a damaged copy, a verdict."""

import hashlib
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from helpers import tiny_handwriting
from helpers.cli import HANGS
from helpers.forks import ROOT, Outcome, Programs
from rhhn_fairseq.models.handwriting import HandwritingConfig

WORDS = ("one two three four five six cat dog", "un deux trois quatre cinq six chat chien")
SPLITS = {"train": 60, "valid": 8, "test": 8}
TEXT = "the cat sat on the mat\nand the dog sat on the log\n" * 12
QUIET = ["--cpu", "--log-format", "none"]
# A line of a log that fairseq set up.
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| ")


@dataclass(frozen=True)
class Scene:
    """What a case works with: the world's folders, and an empty folder of its own."""

    pairs: Path
    chars: Path
    checkpoints: Path
    here: Path
    user_dir: Path


@dataclass(frozen=True)
class Case:
    """A command that must end in one line.

    Args:
        name: of the family and the case. program: as `forks.Programs.run` takes it.
        arguments: makes them, and whatever they name, from a scene.
        harmless: the command has to succeed instead: a control, that the boundary refuses no good input.
        slow: left to the slow tests. timeout: seconds. stdin: text on standard input.
    """

    name: str
    program: str
    arguments: Callable[[Scene], list]
    harmless: bool = False
    slow: bool = False
    timeout: float = HANGS
    stdin: str = ""


def write_pairs(folder: Path) -> Path:
    """A parallel corpus in fairseq's binary format with its sentencepiece model; its directory."""
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    folder.mkdir()
    draw = random.Random(1)
    sides = {"en": WORDS[0].split(), "fr": WORDS[1].split()}
    picks = {s: [draw.choices(range(8), k=draw.randint(1, 5)) for _ in range(n)] for s, n in SPLITS.items()}
    texts = {
        (split, language): [" ".join(words[number] for number in line) for line in lines]
        for split, lines in picks.items()
        for language, words in sides.items()
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts["train", "en"] + texts["train", "fr"]),
        model_prefix=str(folder / "pieces"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "pieces.vocab").unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    dictionary = Dictionary()
    for index in range(3, pieces.get_piece_size()):
        dictionary.add_symbol(pieces.id_to_piece(index))
    for language in sides:
        dictionary.save(str(folder / f"dict.{language}.txt"))
    for (split, language), lines in texts.items():
        prefix = f"{folder}/{split}.en-fr.{language}"
        builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for line in lines:
            encoded = " ".join(pieces.encode(line, out_type=str))
            builder.add_item(dictionary.encode_line(encoded, add_if_not_exist=False))
        builder.finalize(f"{prefix}.idx")
    return folder


def write_chars(folder: Path) -> Path:
    """A text as rhhn prepare prepares it; its directory."""
    from rhhn_fairseq.data.text.corpora import text_files
    from rhhn_fairseq.data.text.prepare import prepare

    files = {}
    for split in SPLITS:
        files[split] = [folder.parent / f"{split}.txt"]
        files[split][0].write_text(TEXT)
    prepare(text_files(files, as_bytes=False), folder)
    return folder


OPTIMIZER = ["--optimizer", "adam", "--lr", 0.01, *QUIET]
GNMT = ["--task", "gnmt_translation", "--arch", "lstm_gnmt_small", "--hidden-size", 8, "--embed-dim", 8]
GNMT += ["--criterion", "label_smoothed_cross_entropy", "--max-tokens", 100]
CHAR_LM = ["--task", "char_lm", "--arch", "char_lm", "--cell", "lstm", "--hidden-size", 8]
CHAR_LM += ["--criterion", "char_cross_entropy", "--batch-size", 2, "--tokens-per-sample", 20]
COPYING = ["--task", "synthetic", "--arch", "lstm_copying", "--hidden-size", 8, "--batch-size", 5]
COPYING += ["--criterion", "problem_loss", "--problem", "copying", "--length", 2, "--epoch-updates", 3]
COPYING += ["--valid-examples", 5]
ADDING = [*COPYING, "--arch", "lstm_adding", "--problem", "adding"]
HANDWRITING = ["--task", "handwriting", "--arch", "handwriting", "--cell", "lstm", "--hidden-size", 8]
HANDWRITING += ["--mixtures", 2, "--criterion", "mixture_density", "--batch-size", 4]


def training(scene: Scene, *options, data: Path | None = None, model=GNMT) -> list:
    """Arguments of fairseq-train that save in the scene's own folder; later options win."""
    if data is None:
        data = {id(GNMT): scene.pairs, id(CHAR_LM): scene.chars}.get(id(model))
    places = ["--user-dir", scene.user_dir, "--save-dir", scene.here / "saved"]
    places += ["--max-update", 2, "--no-epoch-checkpoints"]
    return [*([] if data is None else [data]), *model, *OPTIMIZER, *places, *options]


def generation(scene: Scene, *options, data: Path | None = None, path: Path | None = None) -> list:
    """Arguments of fairseq-generate and fairseq-interactive."""
    path = path or scene.checkpoints / "gnmt.pt"
    given = [data or scene.pairs, "--task", "gnmt_translation", "--path", path, "--beam", 2]
    return [
        *given,
        "--user-dir",
        scene.user_dir,
        "--source-lang",
        "en",
        "--target-lang",
        "fr",
        *QUIET,
        *options,
    ]


def evaluation(scene: Scene, *options, data: Path | None = None, path: Path | None = None) -> list:
    """Arguments of fairseq-eval-lm."""
    path = path or scene.checkpoints / "char_lm.pt"
    given = [data or scene.chars, "--task", "char_lm", "--path", path, "--user-dir", scene.user_dir]
    return [*given, *QUIET, *options]


class World:
    """Small data and trained models, and the process that runs commands on them.

    Args:
        folder: where to make it.
    """

    def __init__(self, folder: Path):
        self.folder, self.programs = folder, Programs()
        self.user_dir = ROOT / "rhhn_fairseq"
        self.pairs, self.chars = write_pairs(folder / "pairs"), write_chars(folder / "chars")
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        for name, model in (("gnmt", GNMT), ("char_lm", CHAR_LM), ("copying", COPYING)):
            scene = self.scene(name)
            outcome = self.programs.run("train", training(scene, model=model), scene.here, timeout=HANGS)
            if outcome.status:
                raise RuntimeError(outcome.stdout + outcome.stderr)
            (scene.here / "saved/checkpoint_last.pt").rename(self.checkpoints / f"{name}.pt")
        handwriting = HandwritingConfig(cell="lstm", hidden_size=8, mixtures=2)
        tiny_handwriting.save(tiny_handwriting.build(), handwriting, self.checkpoints / "handwriting.pt")
        self.digest = self._digest()

    def scene(self, name: str) -> Scene:
        """An empty folder for a case."""
        # Names of cases hold what Hydra and YAML would read as more than a path.
        here = self.folder / "cases" / hashlib.sha256(name.encode()).hexdigest()[:16]
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        return Scene(self.pairs, self.chars, self.checkpoints, here, self.user_dir)

    def run(self, case: Case) -> tuple[str, Outcome]:
        """Runs a case; the verdict, "good" or what went wrong, and how the command ended."""
        scene = self.scene(case.name)
        arguments = case.arguments(scene)
        outcome = self.programs.run(case.program, arguments, scene.here, case.timeout, case.stdin)
        result = verdict(case, outcome)
        if (scene.here / "executed").exists():
            result = "executed"
        elif self._digest() != self.digest:
            result = "lost"
        elif list(scene.here.rglob("*.tmp")):
            result = "left over"
        shutil.rmtree(scene.here, ignore_errors=True)
        return result, outcome

    def _digest(self) -> str:
        """Of everything that a command could damage."""
        digest = hashlib.sha256()
        for folder in (self.pairs, self.chars, self.checkpoints):
            for path in sorted(folder.rglob("*")):
                digest.update(str(path).encode())
                if path.is_file():
                    digest.update(path.read_bytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.programs.close()


def verdict(case: Case, outcome: Outcome) -> str:
    """What became of a case, as far as the outcome tells."""
    if outcome.hung:
        return "hang"
    if outcome.status < 0 or "Fatal Python error" in outcome.stderr:
        return "crash"
    if "Traceback (most recent call last)" in outcome.stdout + outcome.stderr:
        return "traceback"
    if case.harmless:
        return "good" if outcome.status == 0 else "refused"
    if outcome.status == 0:
        return "silent yes"
    lines = [line for line in outcome.stderr.splitlines() if not LOG_LINE.match(line)]
    if case.program == "hydra_train":
        # Hydra warns of itself before it begins.
        lines = lines[-1:]
    return "good" if len(lines) == 1 and lines[0].startswith("error: ") else "many lines"
