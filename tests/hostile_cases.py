"""The hostile cases: data, checkpoints, options and names that careless or hostile people would try."""

from hostile import Case, evaluation, generation, training
from hostile_checkpoints import checkpoint_cases
from hostile_data import data_cases
from hostile_options import option_cases

CASES = [
    Case("control/train", "train", lambda s: training(s), harmless=True),
    Case("control/generate", "generate", lambda s: generation(s), harmless=True),
    Case("control/interactive", "interactive", lambda s: generation(s), harmless=True, stdin="▁one ▁two\n"),
    Case("control/eval_lm", "eval_lm", lambda s: evaluation(s), harmless=True),
    *data_cases(),
    *checkpoint_cases(),
    *option_cases(),
]

# The ordinary suite runs these: some of each family, each of them refused within half a second.
QUICK = {
    case.name
    for number, case in enumerate(CASES)
    if case.name.startswith(("control/eval_lm", "control/interactive"))
    or (not case.harmless and not case.slow and number % 12 == 0)
}
