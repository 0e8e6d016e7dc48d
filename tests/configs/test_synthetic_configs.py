"""configs/synthetic: each file says what its own comment says, and trains as it stands."""

import dataclasses

import pytest
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.models import MODEL_DATACLASS_REGISTRY
from helpers.cli import run_module
from helpers.config_files import (
    ROOT,
    by_hydra,
    command,
    comment,
    composed,
    effective,
    link_root,
)
from omegaconf import OmegaConf

from rhhn_fairseq import plugin  # noqa: F401  (registers the architectures)
from rhhn_fairseq.data.problems.registry import PROBLEMS
from rhhn_fairseq.models.classifier_table import ARCHITECTURES
from rhhn_fairseq.tasks.synthetic import SyntheticTaskConfig

CONFIGS = sorted((ROOT / "configs" / "synthetic").glob("*.yaml"))

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def test_there_is_a_file_for_the_problems_of_the_papers():
    problems = {by_hydra(path).task.problem for path in CONFIGS}
    assert problems == set(PROBLEMS) - {"pdigits"}


@every_config
def test_model_is_that_of_the_architecture(path):
    name = by_hydra(path).model._name
    found = effective(dataclasses.asdict(OmegaConf.to_object(composed(path).model)))
    expected = effective(dataclasses.asdict(MODEL_DATACLASS_REGISTRY[name](_name=name)))
    # What the recipe is about; the architecture leaves it off.
    assert (found.pop("h_detach") > 0) == ("hdetach" in path.stem) and expected.pop("h_detach") == 0
    assert found == expected
    assert f"Parameters: {ARCHITECTURES[name].parameters:,}." in comment(path)


@every_config
def test_every_option_of_the_problem_can_be_overridden(path):
    task = by_hydra(path).task
    assert PROBLEMS[task.problem].options.keys() <= task.keys()
    assert task.keys() <= {spec.name for spec in dataclasses.fields(SyntheticTaskConfig)}


@every_config
def test_evaluation_in_the_comment_is_of_the_best_checkpoint(path):
    evaluation, config = command(path, "fairseq-validate"), by_hydra(path)
    assert f"{config['checkpoint']['save_dir']}/checkpoint_best.pt" in evaluation
    assert evaluation[evaluation.index("--problem") + 1] == config["task"]["problem"]
    if "length" in config["task"]:
        assert evaluation[evaluation.index("--length") + 1] == str(config["task"]["length"])


@pytest.mark.slow
def test_commands_in_the_comment_train_and_evaluate(tmp_path):
    path = ROOT / "configs" / "synthetic" / "lstm_copying_300_hdetach.yaml"
    link_root(tmp_path)
    tiny = ["task.length=5", "task.epoch_updates=2", "task.valid_examples=10", "model.hidden_size=8"]
    arguments = [*command(path, "fairseq-hydra-train"), *tiny, "optimization.max_epoch=1"]
    run_module("fairseq_cli.hydra_train", arguments, cwd=tmp_path)
    state = load_checkpoint_to_cpu(str(tmp_path / "checkpoints" / path.stem / "checkpoint_best.pt"))
    assert state["optimizer_history"][-1]["num_updates"] == 2 and state["cfg"]["model"]["h_detach"] == 0.5
    result = run_module("fairseq_cli.validate", [*command(path, "fairseq-validate"), "--cpu"], cwd=tmp_path)
    assert "valid on 'test' subset | loss" in result.stdout + result.stderr
