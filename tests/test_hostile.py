"""Every hostile case ends in one line: no traceback, hang or crash; nothing is run, nothing is lost."""

import pytest
from hostile import World
from hostile_cases import CASES, QUICK

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("hostile"))
    yield world
    world.close()


def test_cases_are_distinct():
    assert len({case.name for case in CASES}) == len(CASES) >= 200


def _parameters():
    for case in CASES:
        marks = () if case.name in QUICK else pytest.mark.slow
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", _parameters())
def test_case(world, case):
    found, outcome = world.run(case)
    assert found == "good", outcome.stdout[-3000:] + outcome.stderr[-3000:]
