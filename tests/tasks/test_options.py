"""Every option of fairseq's programs does with these models what ``docs/options.md`` says."""

import pytest
from helpers.option_table import MEANINGLESS, NO_MEANING, REFUSALS, REFUSED, WORKS, expected, page
from helpers.option_values import VALUES, WITH
from helpers.option_walk import ROOT, TASKS, Workplace, cases, programs_of_options, try_option

from rhhn_fairseq.adaptations.refusals import REFUSALS as CHECKED

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("place"))


def test_the_page_is_that_of_the_table():
    assert (ROOT / "docs" / "options.md").read_text() == page(programs_of_options())


def test_the_table_has_every_option_and_no_other():
    known = set(programs_of_options())
    assert known == set(VALUES) and set(WITH) <= known
    assert set(NO_MEANING) <= known and set(REFUSALS) <= known
    checked = {refusal.option.split()[0] for refusal in CHECKED} - DEPENDS_ON_OTHERS
    assert all(REFUSED in {expected(p, option) for p in TASKS} for option in checked)


# Refused with some values of other options only.
DEPENDS_ON_OTHERS = {
    "--attention-normalised",
    "--attention-size",
    "--batch-size",
    "--ddp-backend",
    "--disable-validation",
    "--ema-decay",
    "--ema-fp32",
    "--ema-seed-model",
    "--ema-start-update",
    "--ema-update-freq",
    "--num-batch-buckets",
    "--post-process",
    "--print-alignment",
    "--sampling",
}

ONE_OF_EACH = [
    ("train", "synthetic", "--clip-norm", WORKS),
    ("train", "synthetic", "--profile", REFUSED),
    ("train", "synthetic", "--zero-sharding", REFUSED),
    ("train", "synthetic", "--cpu-offload", REFUSED),
    ("train", "synthetic", "--pipeline-model-parallel", REFUSED),
    ("train", "synthetic", "--ema-seed-model", WORKS),
    ("validate", "synthetic", "--max-tokens", WORKS),
    ("validate", "synthetic", "--num-shards", REFUSED),
    ("validate", "synthetic", "--disable-validation", WORKS),
    ("validate", "synthetic", "--bucket-cap-mb", MEANINGLESS),
]


@pytest.mark.parametrize("program,task,option,outcome", ONE_OF_EACH)
def test_outcomes(program, task, option, outcome, place):
    assert expected(program, option) == outcome
    found = try_option(program, task, option, place)
    assert found.kind == (REFUSED if outcome == REFUSED else WORKS), found.text


@pytest.mark.slow
@pytest.mark.parametrize("program,task,option", cases())
def test_every_option(program, task, option, place):
    found = try_option(program, task, option, place)
    assert found.kind == (REFUSED if expected(program, option) == REFUSED else WORKS), found.text
    assert "\n" not in found.text or found.kind == WORKS
