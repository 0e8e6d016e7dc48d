"""configs/: what each file composes to is written down, and no value is given in vain."""

import json
import shutil

import pytest
from helpers.cli import USER_DIR, run_module
from helpers.config_files import RECIPES, ROOT, SNAPSHOT, recipe_values

from rhhn_fairseq.adaptations.hydra_recipes import check_recipe

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")


def test_the_snapshot_has_every_file():
    names = {f"{path.parent.name}/{path.stem}" for path in RECIPES}
    assert json.loads(SNAPSHOT.read_text()).keys() == names


@every_recipe
def test_composes_to_what_is_written_down(path):
    """A change that is meant is written down by ``PYTHONPATH=tests python -m helpers.config_files``."""
    expected = json.loads(SNAPSHOT.read_text())[f"{path.parent.name}/{path.stem}"]
    assert json.loads(json.dumps(recipe_values(path))) == expected


@every_recipe
def test_no_value_is_given_twice(path):
    check_recipe(path)


def test_a_value_given_twice_ends_training(tmp_path):
    """Through fairseq-hydra-train, which would else train with the other value."""
    shutil.copytree(ROOT / "configs" / "synthetic", tmp_path / "configs")
    recipe = tmp_path / "configs" / "elman_xor.yaml"
    recipe.write_text(recipe.read_text() + "criterion: {_name: cross_entropy}\n")
    arguments = ["--config-dir", tmp_path / "configs", "--config-name", "elman_xor"]
    result = run_module(
        "fairseq_cli.hydra_train", [*arguments, f"common.user_dir={USER_DIR}"], cwd=tmp_path, check=False
    )
    assert result.returncode == 1
    assert f"error: {recipe} gives criterion._name, and " in result.stderr
    assert "Traceback" not in result.stderr
