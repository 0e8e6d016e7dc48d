"""configs/: what each file composes to is written down, and no value is given in vain."""

import json

import pytest
from config_files import RECIPES, SNAPSHOT, recipe_values

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")


def test_the_snapshot_has_every_file():
    names = {f"{path.parent.name}/{path.stem}" for path in RECIPES}
    assert json.loads(SNAPSHOT.read_text()).keys() == names


@every_recipe
def test_composes_to_what_is_written_down(path):
    """A change that is meant is written down by ``python tests/config_files.py``."""
    expected = json.loads(SNAPSHOT.read_text())[f"{path.parent.name}/{path.stem}"]
    assert json.loads(json.dumps(recipe_values(path))) == expected
