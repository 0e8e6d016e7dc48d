"""A first run on one screen: trains a small LN HyperLSTM beside an LSTM, and shows what they have learnt.

Usage: %(prog)s [--log FILE]

The text is the source of Python's standard library. Models that an earlier run has trained are used again.
The details are in the log file.
"""

import logging
import multiprocessing
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

from tqdm import tqdm

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.cli.table import FAIRSEQ
from rhhn_fairseq.cli.table import main as rhhn
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import no_link
from rhhn_fairseq.inspection.training_logs import TRAIN, TRAIN_INNER, parse_line

DATA, RUNS = Path("data-bin/quickstart"), Path("checkpoints/quickstart")
# The parts that follow are of the same kind as the text: n-grams have about as many bits on either.
CHARACTERS, EPOCHS = 550_000, 3
MODELS = {
    "LN HyperLSTM": "--cell ln_hyperlstm --hidden-size 128 --hyper-size 32 --hyper-embed-size 4".split(),
    "LSTM": "--cell lstm --hidden-size 128".split(),
}
TRAINING = "--arch char_lm --optimizer adam --lr 0.005 --batch-size 32 --tokens-per-sample 50".split()
TRAINING += ["--max-epoch", str(EPOCHS), "--log-format", "json", "--log-interval", "10"]
# One process imports fairseq, which takes seconds, and every command is a fork of it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fairseq_cli.train", "fairseq_cli.eval_lm", "rhhn_fairseq.plugin"])
PROMPT, WIDTH = "def ", 64
LINE = "def __init__(self, name, value=None): return self._items[name]"
LAST_LINES = 12


def main(argv=None) -> None:
    parser = make_parser("quickstart", __doc__)
    parser.add_argument(
        "--log", type=Path, default=RUNS / "details.log", help="file for the details (default: %(default)s)"
    )
    log = parser.parse_args(argv).log
    # Nothing is imported from the working directory: beside somebody's data, a file ``numpy.py`` would run.
    os.environ["PYTHONSAFEPATH"] = "1"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", opener=no_link) as file:
        print(f"details   {log}", flush=True)
        run_all(file)


def run_all(log) -> None:
    """Runs all stages, and prints a line or two for each. Raises UsageError if one fails."""
    start_forks(log)
    output_of(["prepare", "stdlib", "--size", str(CHARACTERS), "--dest", str(DATA)], log)
    print(f"text      the source of Python's standard library, {CHARACTERS:,} characters")
    for name in MODELS:
        train(name, log)
    figures = {name: test(name, log) for name in MODELS}
    told = ", ".join(f"{name} {bits:.3f}" for name, bits in figures.items())
    print(f"test      {told} bits per character")
    picture, model = RUNS / "changes.png", checkpoint("LN HyperLSTM")
    output_of(["plot", "weights", str(model), "--text", LINE, "--output", str(picture)], log)
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


def start_forks(log) -> None:
    """Starts the process that is forked; what fairseq prints when it is imported goes to the log."""
    screen = os.dup(1)
    os.dup2(log.fileno(), 1)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(screen, 1)
        os.close(screen)


def lines_of(arguments: list[str], log) -> Iterator[str]:
    """Runs a command of ``rhhn``, yields the lines that it prints, and copies them to the log.

    Raises:
        UsageError: it failed; its last lines are printed to standard error.
    """
    last: deque[str] = deque(maxlen=LAST_LINES)
    log.write(f"$ rhhn {' '.join(arguments)}\n")
    reader, writer = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_run, args=(arguments, writer))
    process.start()
    writer.close()
    with open(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as output:
        reader.close()
        for line in output:
            log.write(line)
            log.flush()
            last.append(line)
            yield line
    process.join()
    if process.exitcode != 0:
        sys.stderr.writelines(last)
        raise UsageError(f"rhhn {arguments[0]} failed with status {process.exitcode}; see {log.name}")


def output_of(arguments: list[str], log) -> str:
    """Returns all that a command prints. Raises UsageError as ``lines_of`` does."""
    return "".join(lines_of(arguments, log))


def _run(arguments: list[str], output) -> None:
    """Runs a command in a process of its own, which prints to a pipe."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    # Workers that load data start as in any other run; by default they would start as this process did.
    multiprocessing.set_start_method(None, force=True)
    if arguments[0] not in FAIRSEQ:
        # fairseq's programs have set up a log, which these commands would print as well.
        logging.getLogger().handlers.clear()
    sys.argv = ["rhhn", *arguments]
    try:
        sys.exit(rhhn())
    except Exception:
        # multiprocessing would print a traceback, where the plugin prints one line.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def train(name: str, log) -> None:
    """Trains a model; shows its bits per character and the time left, and a sample after each epoch."""
    finished = folder(name) / "finished"
    if finished.exists():
        print(f"training  {name}: trained before (remove {folder(name)} to train again)")
        return
    command = ["train", str(DATA), *TRAINING, *MODELS[name]]
    layout = "training  {desc}: {percentage:3.0f} %{postfix}, {remaining} left"
    # A terminal shows one line that is updated, other outputs only the lines of the epochs.
    with tqdm(desc=name, bar_format=layout, disable=None, leave=False, file=sys.stdout) as bar:
        for line in lines_of([*command, "--save-dir", str(folder(name))], log):
            follow(line, name, bar, log)
    finished.touch()


def follow(line: str, name: str, bar: tqdm, log) -> None:
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
        line = sample(name, log).replace("\n", "↵")[:WIDTH]
        bar.write(f"          epoch {epoch}: {bar.valid_bits:.2f} bits  {line}")


def sample(name: str, log) -> str:
    """Returns what a model writes after its last epoch."""
    asked = ["--prompt", PROMPT, "--length", str(WIDTH), "--temperature", "0.6"]
    return output_of(["sample", str(checkpoint(name, "last")), *asked], log)


def test(name: str, log) -> float:
    """Returns the bits per character on the test set."""
    command = ["eval-lm", str(DATA), "--gen-subset", "test", "--path", str(checkpoint(name))]
    output = output_of([*command, "--protocol", "carry:8"], log)
    return float(re.search(r"([\d.]+) bits per character", output)[1])
