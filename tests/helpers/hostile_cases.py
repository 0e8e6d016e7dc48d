"""The hostile cases: data, checkpoints, options and names that careless or hostile people would try."""

import contextlib
import io

from helpers.hostile import (
    ADDING,
    CHAR_LM,
    COPYING,
    GNMT,
    HANDWRITING,
    Case,
    evaluation,
    generation,
    training,
)
from helpers.hostile_checkpoints import checkpoint_cases
from helpers.hostile_data import data_cases
from helpers.tiny_handwriting import prepare_words


def _strokes(folder):
    with contextlib.redirect_stdout(io.StringIO()):
        return prepare_words(folder)


ONE = ["--max-update", 1]

CASES = [
    Case("control/train", "train", lambda s: training(s), harmless=True),
    Case("control/generate", "generate", lambda s: generation(s), harmless=True),
    Case("control/interactive", "interactive", lambda s: generation(s), harmless=True, stdin="▁one ▁two\n"),
    Case("control/eval_lm", "eval_lm", lambda s: evaluation(s), harmless=True),
    # A model whose first loss is high by its initialisation, and which learns.
    Case(
        "control/train with a high first loss",
        "train",
        lambda s: training(s, "--init-range", 30, "--lr", 1e-4, model=GNMT),
        harmless=True,
    ),
    Case("loss/translation", "train", lambda s: training(s, "--lr", 1e6, model=GNMT)),
    Case("loss/char_lm", "train", lambda s: training(s, "--lr", 1e6, model=CHAR_LM)),
    Case("loss/char_lm in its last update", "train", lambda s: training(s, "--lr", 1e6, *ONE, model=CHAR_LM)),
    Case("loss/copying", "train", lambda s: training(s, "--lr", 1e6, model=COPYING)),
    Case("loss/adding", "train", lambda s: training(s, "--lr", 1e6, model=ADDING)),
    Case(
        "loss/handwriting",
        "train",
        lambda s: training(s, "--lr", 1e6, data=_strokes(s.here / "strokes"), model=HANDWRITING),
    ),
    *data_cases(),
    *checkpoint_cases(),
]

# The ordinary suite runs these: some of each family, each of them refused within half a second.
QUICK = {
    case.name
    for number, case in enumerate(CASES)
    if case.name.startswith(("control/eval_lm", "control/interactive", "checkpoint/eval_lm from a pipe"))
    or (not case.harmless and not case.slow and number % 12 == 0)
}
