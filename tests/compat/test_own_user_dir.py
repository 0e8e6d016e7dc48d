"""A researcher's own package: subclasses of the tasks, criterions, models and cells, named by --user-dir."""

import pytest
from helpers.cli import fairseq_train, json_log, run_module, run_rhhn

from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare

OWN = """
from dataclasses import dataclass, field

from fairseq.criterions import register_criterion
from fairseq.models import register_model, register_model_architecture
from fairseq.tasks import register_task

from rhhn_fairseq.cells.config import CellConfig
from rhhn_fairseq.cells.registry import CELLS, register_cell
from rhhn_fairseq.criterions.char_cross_entropy import CharCrossEntropy, CharCrossEntropyConfig
from rhhn_fairseq.models.char_lm import CharLM, CharLMConfig
from rhhn_fairseq.tasks.char_lm import CharLMTask, CharLMTaskConfig


@dataclass
class OwnTaskConfig(CharLMTaskConfig):
    factor: float = field(default=1.0, metadata={"help": "a factor"})


@register_task("own_task", dataclass=OwnTaskConfig)
class OwnTask(CharLMTask):
    def train_step(self, *arguments, **options):
        loss, size, logged = super().train_step(*arguments, **options)
        return loss, size, logged | {"loss": logged["loss"] * self.cfg.factor}


@register_criterion("own_loss", dataclass=CharCrossEntropyConfig)
class OwnLoss(CharCrossEntropy):
    pass


@register_model("own_model", dataclass=CharLMConfig)
class OwnModel(CharLM):
    pass


@register_model_architecture("char_lm", "own_preset")
def own_preset(args):
    args.cell, args.hidden_size = "own_gru", 6


@register_cell("own_gru", CELLS["gru"].config, CELLS["gru"].naive)
class OwnGRU(CELLS["gru"].cell):
    pass
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_package").mkdir()
    (folder / "own_package" / "__init__.py").write_text(OWN)
    text = folder / "text.txt"
    text.write_text("one two three four\n" * 30)
    prepare(
        text_files({split: [text] for split in ("train", "valid", "test")}, as_bytes=False), folder / "data"
    )
    return folder


def _train(places, *options, check=True):
    options = ["--hidden-size", 4, "--batch-size", 2, "--tokens-per-sample", 10, "--max-update", 2, *options]
    options += ["--optimizer", "adam", "--lr", 0.01, "--cpu", "--log-format", "json", "--log-interval", 1]
    folder = places / "own_package"
    return fairseq_train([places / "data", *options], user_dir=folder, check=check)


@pytest.mark.parametrize(
    "task, criterion, arch",
    [
        ("own_task", "own_loss", "own_model"),
        ("own_task", "char_cross_entropy", "char_lm"),
        ("char_lm", "own_loss", "own_model"),
    ],
)
def test_subclasses_go_together(places, tmp_path, task, criterion, arch):
    options = ["--task", task, "--criterion", criterion, "--arch", arch, "--save-dir", tmp_path]
    _train(places, *options, "--no-save", "--cell", "own_gru")


def test_options_of_a_subclass_reach_it(places, tmp_path):
    losses = []
    for factor in (1, 3):
        options = ["--task", "own_task", "--factor", factor, "--arch", "char_lm", "--cell", "gru"]
        options += ["--criterion", "char_cross_entropy", "--no-save", "--save-dir", tmp_path]
        result = _train(places, *options)
        losses += [r["loss"] for r in json_log(result.stdout + result.stderr) if r["tag"] == "train_inner"][
            :1
        ]
    assert losses[1] == pytest.approx(3 * losses[0], abs=2e-3)


def test_a_preset_is_trained_evaluated_and_sampled(places, tmp_path):
    own = places / "own_package"
    options = ["--task", "char_lm", "--criterion", "char_cross_entropy", "--save-dir", tmp_path]
    _train(places, *options, "--arch", "own_preset")
    best = tmp_path / "checkpoint_best.pt"
    evaluated = run_module(
        "fairseq_cli.eval_lm", [places / "data", "--user-dir", own, "--path", best, "--cpu"]
    )
    assert "bits per character" in evaluated.stdout + evaluated.stderr
    for folder, status in ((own, 0), (places / "nowhere", 1)):
        sampled = run_rhhn("--user-dir", folder, "sample", best, check=False)
        assert sampled.returncode == status, sampled.stderr
    assert "there is no directory" in sampled.stderr
