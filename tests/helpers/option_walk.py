"""Tries every option of fairseq's programs on a tiny model of every task.

``PYTHONPATH=tests python -m helpers.option_walk FOLDER PROGRAM TASK [OPTION ...]`` prints how
options end, one a line.
"""

import functools
import shlex
import shutil
import sys
from pathlib import Path

from fairseq import options

from helpers import tiny_char_lm, tiny_translation
from helpers.idx_files import write_mnist
from helpers.option_values import VALUES, WITH
from helpers.programs import Outcome, run
from helpers.tiny_handwriting import prepare_words
from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)

ROOT = Path(__file__).resolve().parents[2]

ARCHITECTURES = {
    "char_lm": "char_lm",
    "gnmt_translation": "gnmt",
    "handwriting": "handwriting",
    "synthetic": "classifier",
}
CRITERIONS = {
    "char_lm": "cross_entropy",
    "gnmt_translation": "chunked_cross_entropy",
    "handwriting": "mixture_density",
    "synthetic": "problem_loss",
}
# What makes a training short; an option that is tried takes the place of its like here.
TINY = {
    "char_lm": "--cell lstm --hidden-size 6 --tokens-per-sample 5 --batch-size 2",
    "gnmt_translation": "--hidden-size 6 --embed-dim 6 --encoder-layers 2 --decoder-layers 2 --batch-size 8",
    "handwriting": "--hidden-size 6 --mixtures 2 --batch-size 4",
    "synthetic": "--problem xor --length 4 --hidden-size 6 --batch-size 4 --valid-examples 8",
}
TRAINING = "--cpu --num-workers 0 --max-update 2 --log-format simple"
EVALUATION = {
    "eval_lm": "--cpu --num-workers 0 --batch-size 4",
    "generate": "--cpu --num-workers 0 --batch-size 8 --beam 2 --max-len-b 5",
    "interactive": "--cpu --beam 2 --max-len-b 5",
    "validate": "--cpu --num-workers 0 --batch-size 4",
}
PARSERS = {
    "train": options.get_training_parser,
    "eval_lm": options.get_eval_lm_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "validate": options.get_validation_parser,
}
# Options of a task that go with others of the model or the problem, which only a training takes.
OF_THE_TRAINING = (
    *("--h-detach-final", "--c-detach-final", "--detach-anneal-updates", "--detach-until"),
    *("--length", "--copying-input", "--mnist-dir", "--mnist-split", "--permutation-seed"),
)
# The tasks whose models a program is for.
TASKS = {
    "train": tuple(ARCHITECTURES),
    "eval_lm": ("char_lm",),
    "generate": ("gnmt_translation",),
    "interactive": ("gnmt_translation",),
    "validate": tuple(ARCHITECTURES),
}


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

    def averages_of(self, task: str) -> Path:
        """A checkpoint of a training with --store-ema."""
        path = self.folder / f"averaged-{task}"
        if not path.exists():
            outcome = run("train", [*training(task, self), "--store-ema", "--save-dir", path])
            assert outcome.kind == "works", outcome.text
        return path / "checkpoint_last.pt"

    def new_path(self) -> Path:
        self.count += 1
        return self.folder / f"new-{self.count}"

    def place(self, word: str, task: str) -> str:
        """What a word in ``option_values`` stands for; other words stand for themselves."""
        if word == "CHECKPOINT":
            return str(self.checkpoint_of(task))
        if word == "AVERAGES":
            return str(self.averages_of(task))
        if word == "PIECES":
            return str(Path(*self.data_of("gnmt_translation")) / "pieces.model")
        if word == "PATH":
            return str(self.new_path())
        if word == "LM":
            return str(self.checkpoint_of("char_lm"))
        if word == "MNIST":
            return str(write_mnist(self.folder / "mnist", train=60, t10k=60))
        if word == "INPUT":
            path = self.folder / "input.txt"
            path.write_text("▁one ▁two\n▁three\n", encoding="utf-8")
            return str(path)
        words = {"USER_DIR": str(ROOT / "rhhn_fairseq"), "TASK": task, "ARCH": ARCHITECTURES[task]}
        return (words | {"CRITERION": CRITERIONS[task]}).get(word, word)


def training(task: str, place: Workplace) -> list[str]:
    return [*place.data_of(task), "--arch", ARCHITECTURES[task], *f"{TINY[task]} {TRAINING}".split()]


def options_of(program: str, task: str) -> list[str]:
    """The options that ``--help`` names, in its order, each by its first long name."""
    parser = PARSERS[program]()
    line = [] if task == "synthetic" else ["data"]
    line += ["--arch", ARCHITECTURES[task]] if program == "train" else ["--task", task]
    options.parse_args_and_arch(parser, line)
    names = (next((s for s in a.option_strings if s.startswith("--")), None) for a in parser._actions)
    return [name for name in names if name not in (None, "--help")]


def programs_of_options() -> dict[str, list[str]]:
    """Every option of every program, with the programs that have it."""
    walked: dict[str, list[str]] = {}
    for program, _, option in cases():
        programs = walked.setdefault(option, [])
        if program not in programs:
            programs.append(program)
    return walked


@functools.cache
def cases() -> list[tuple[str, str, str]]:
    """Every option of every program for every task that the program is for."""
    return [
        (program, task, option)
        for program, tasks in TASKS.items()
        for task in tasks
        for option in options_of(program, task)
    ]


def command(program: str, task: str, option: str, place: Workplace) -> list[str]:
    """The arguments that try the option."""
    words = [option, *([VALUES[option]] if VALUES[option] else []), *companions(program, task, option)]
    tried = [place.place(word, task) for word in words]
    if program == "train":
        base = [*training(task, place), "--save-dir", str(place.new_path())]
    else:
        base = [*place.data_of(task), "--path", str(place.checkpoint_of(task)), *EVALUATION[program].split()]
        if option == "--checkpoint-suffix":
            path = place.checkpoint_of(task)
            shutil.copy(path, path.with_name(f"checkpoint_last{VALUES[option]}.pt"))
    if option == "--cpu":
        base.remove("--cpu")
    if option == "--max-tokens" and "--batch-size" in base:
        at = base.index("--batch-size")
        del base[at : at + 2]
    if "--problem" in tried and "--length" in base:
        at = base.index("--length")
        del base[at : at + 2]
    return base + tried


def companions(program: str, task: str, option: str) -> list[str]:
    """What stands beside the option. A training's options for its model are no others' options."""
    if program != "train" and option in OF_THE_TRAINING:
        return []
    if (program, option) == ("interactive", "--batch-size"):
        return ["--buffer-size", "3"]
    if (option, task) == ("--residual-from", "gnmt_translation"):
        return ["--encoder-layers", "3", "--decoder-layers", "3", "--residual-from", "3"]
    return WITH.get(option, [])


def try_option(program: str, task: str, option: str, place: Workplace) -> Outcome:
    return run(program, command(program, task, option, place), stdin="▁one ▁two\n")


def main(folder: str, program: str, task: str, *wanted: str) -> None:
    place = Workplace(Path(folder))
    stdout = sys.stdout
    for option in wanted or options_of(program, task):
        if option not in VALUES:
            print("NO VALUE", option, file=stdout, flush=True)
            continue
        outcome = try_option(program, task, option, place)
        text = "" if outcome.kind == "works" else " ".join(outcome.text.split())[:300]
        print(f"{outcome.kind}\t{option}\t{shlex.quote(text)}", file=stdout, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
