"""A first run on one screen: trains a small LN HyperLSTM beside an LSTM, and shows what they have learnt.

Usage: %(prog)s [--log FILE]

The text is the source of Python's standard library. Models that an earlier run has trained are used again.
The details are in the log file.
"""

import importlib
import io
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from tqdm import tqdm

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import no_link
from rhhn_fairseq.inspection.training_logs import TRAIN, TRAIN_INNER, parse_line
from rhhn_fairseq.programs import interpreter

DATA, RUNS = Path("data-bin/quickstart"), Path("checkpoints/quickstart")
CHARACTERS, EPOCHS = 700_000, 3
MODELS = {
    "LN HyperLSTM": "--cell ln_hyperlstm --hidden-size 160 --hyper-size 32 --hyper-embed-size 4".split(),
    "LSTM": "--cell lstm --hidden-size 160".split(),
}
TRAINING = "--arch char_lm --optimizer adam --lr 0.005 --batch-size 32 --tokens-per-sample 50".split()
TRAINING += ["--max-epoch", str(EPOCHS), "--log-format", "json", "--log-interval", "10"]
# Not fairseq's own programs, which do not know the plugin where RHHN_AUTOLOAD is 0.
RHHN = interpreter("-m", "rhhn_fairseq")
PROMPT, WIDTH = "def ", 64
LINE = "def __init__(self, name, value=None): return self._items[name]"
LAST_LINES = 12


def main(argv=None) -> None:
    parser = make_parser("quickstart", __doc__)
    parser.add_argument(
        "--log", type=Path, default=RUNS / "details.log", help="file for the details (default: %(default)s)"
    )
    log = parser.parse_args(argv).log
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", opener=no_link) as file:
        print(f"details   {log}", flush=True)
        run_all(file)


def run_all(log) -> None:
    """Runs all stages, and prints a line or two for each. Raises UsageError if one fails."""
    prepare = [*RHHN, "prepare", "stdlib", "--size", str(CHARACTERS)]
    for _ in lines_of([*prepare, "--dest", str(DATA)], log):
        pass
    print(f"text      the source of Python's standard library, {CHARACTERS:,} characters")
    for name in MODELS:
        train(name, log)
    figures = {name: test(name, log) for name in MODELS}
    told = ", ".join(f"{name} {bits:.3f}" for name, bits in figures.items())
    print(f"test      {told} bits per character")
    picture, model = RUNS / "changes.png", checkpoint("LN HyperLSTM")
    said_by("plot", "weights", str(model), "--text", LINE, "--output", str(picture))
    print(f"picture   {picture}: how the weights change as the model reads")
    print("\nGo on with:")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        # The virtual environment is not activated in this terminal.
        print(f"  source {os.path.relpath(sys.prefix)}/bin/activate")
    print(f'  rhhn sample {model} --prompt "class "')
    print("  rhhn prepare text --input BOOK.txt --split 90/5/5 --dest data-bin/book")
    print("  rhhn train data-bin/book --arch ln_hyperlstm_modern --max-epoch 3 --save-dir checkpoints/book")


def folder(name: str) -> Path:
    return RUNS / name.lower().replace(" ", "_")


def checkpoint(name: str, which: str = "best") -> Path:
    return folder(name) / f"checkpoint_{which}.pt"


def lines_of(command: list[str], log) -> Iterator[str]:
    """Runs a command, yields the lines that it prints, and copies them to the log.

    Raises:
        UsageError: it failed; its last lines are printed to standard error.
    """
    last: deque[str] = deque(maxlen=LAST_LINES)
    log.write(f"$ {' '.join(command)}\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            log.write(line)
            log.flush()
            last.append(line)
            yield line
    if process.returncode != 0:
        sys.stderr.writelines(last)
        raise UsageError(f"{' '.join(command[1:5])} failed with status {process.returncode}; see {log.name}")


def train(name: str, log) -> None:
    """Trains a model; shows its bits per character and the time left, and a sample after each epoch."""
    finished = folder(name) / "finished"
    if finished.exists():
        print(f"training  {name}: trained before (remove {folder(name)} to train again)")
        return
    command = [*RHHN, "train", str(DATA), *TRAINING, *MODELS[name]]
    layout = "training  {desc}: {percentage:3.0f} %{postfix}, {remaining} left"
    # A terminal shows one line that is updated, other outputs only the lines of the epochs.
    with tqdm(desc=name, bar_format=layout, disable=None, leave=False, file=sys.stdout) as bar:
        for line in lines_of([*command, "--save-dir", str(folder(name))], log):
            follow(line, name, bar)
    finished.touch()


def follow(line: str, name: str, bar: tqdm) -> None:
    """Shows the content of a line of a training log."""
    if match := re.search(r": ([\d,]+) parameters; .* ([\d,]+) updates an epoch", line):
        bar.total = EPOCHS * int(match[2].replace(",", ""))
        bar.write(f"training  {name}, {match[1]} parameters, {EPOCHS} epochs")
        return
    record = parse_line(line)
    if record is None or "bpc" not in record.figures:
        return
    bits = record.figures["bpc"]
    if record.subset == TRAIN_INNER:
        bar.set_postfix_str(f"{bits:.2f} bits per character", refresh=False)
        bar.update(record.update - bar.n)
    elif record.subset != TRAIN:
        # Validation precedes the figures of the whole epoch; by then its checkpoint is saved.
        bar.valid_bits = bits
    else:
        epoch = record.update * EPOCHS // bar.total
        line = sample(name).replace("\n", "↵")[:WIDTH]
        bar.write(f"          epoch {epoch}: {bar.valid_bits:.2f} bits  {line}")


def sample(name: str) -> str:
    """Returns what a model writes after its last epoch."""
    asked = ["--prompt", PROMPT, "--length", str(WIDTH), "--temperature", "0.6"]
    return said_by("sample", str(checkpoint(name, "last")), *asked)


def said_by(command: str, *arguments: str) -> str:
    """Runs a command in this process, which then has fairseq loaded, and returns what it prints."""
    with redirect_stdout(io.StringIO()) as said:
        importlib.import_module(f"rhhn_fairseq.cli.{command}").main(list(arguments))
    return said.getvalue()


def test(name: str, log) -> float:
    """Returns the bits per character on the test set."""
    command = [*RHHN, "eval-lm", str(DATA), "--gen-subset", "test"]
    output = "".join(lines_of([*command, "--path", str(checkpoint(name)), "--protocol", "carry:8"], log))
    return float(re.search(r"([\d.]+) bits per character", output)[1])
