"""--config-name without --config-dir: the package's own configurations, in any directory."""

from pathlib import Path

import pytest
import torch
from helpers.cli import USER_DIR, python, run_module
from helpers.programs import run
from helpers.tiny_char_lm import write_corpus

from rhhn_fairseq.compat import recipes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def composed(*arguments) -> str:
    outcome = run("hydra_train", [*arguments, "--cfg", "job"])
    assert outcome.kind == "works", outcome.text
    return outcome.text


def test_the_same_as_from_its_directory():
    own = composed("--config-name", "gnmt.yaml")
    assert "save_dir: checkpoints/${model._name}" in own
    assert own == composed("--config-dir", str(recipes.CONFIGS), "--config-name", "gnmt.yaml")


def test_a_directory_of_ones_own_comes_first(tmp_path):
    (tmp_path / "char_lm.yaml").write_text("common:\n  seed: 77\n")
    shown = composed("--config-dir", str(tmp_path), "--config-name", "char_lm")
    assert "seed: 77" in shown and "_name: char_lm" not in shown


def test_an_unknown_name_ends_in_one_line():
    """fairseq would train its default configuration."""
    outcome = run("hydra_train", ["--config-name", "charlm", "model=lstm_ptb"])
    assert outcome.kind == "refused"
    assert outcome.text.startswith("--config-name charlm: there is no charlm.yaml: did you mean char_lm?")


@pytest.mark.parametrize(
    "name, metric, line",
    [
        ("char_lm", "bpd", "char_cross_entropy logs no such figure, choose from loss, bpc, ppl, accuracy"),
        ("gnmt", "accuracy", "ppl, accuracy (--report-accuracy), bleu"),
    ],
)
def test_the_figure_of_the_best_checkpoint_is_checked_at_the_start(tmp_path, name, metric, line):
    arguments = ["--config-name", name, f"task.data={tmp_path}", "common.cpu=true"]
    outcome = run("hydra_train", [*arguments, f"checkpoint.best_checkpoint_metric={metric}"])
    assert outcome.kind == "refused" and line in outcome.text


def sweep(folder: Path) -> list[str]:
    """A sweep of two jobs of three updates, which have 8 and 12 units."""
    write_corpus(folder)
    model = [
        "model._name=lstm_modern",
        "+model.hidden_size=8,12",
        "dataset.batch_size=2",
        "+task.tokens_per_sample=7",
    ]
    limits = ["optimization.max_update=3"]
    more = [f"task.data={folder / 'data'}", f"common.user_dir={USER_DIR}", "common.cpu=true"]
    name = ["--config-name", "char_lm", "--multirun", "hydra.sweep.dir=sweep"]
    return [*name, *model, *limits, *more]


def require_trained(checkpoint: Path, width: int) -> None:
    state = torch.load(checkpoint, weights_only=True)
    assert state["cfg"]["model"]["hidden_size"] == width
    assert state["optimizer_history"][-1]["num_updates"] == 3


INSTALLED = """
import sys
sys.argv = {line!r}
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "ProgramFinder"]
import rhhn_fairseq_autoload
rhhn_fairseq_autoload.install()
from fairseq_cli.hydra_train import cli_main
cli_main()
"""


@pytest.mark.parametrize("form", ["user directory", pytest.param("installed", marks=pytest.mark.slow)])
def test_every_job_of_a_sweep_trains(tmp_path, form):
    """separate_jobs: the second would resume from the checkpoints of the first, and train nothing.

    Where the package is installed, fairseq's programs load it before they import anything themselves.
    """
    arguments = sweep(tmp_path)
    if form == "installed":
        line = ["fairseq-hydra-train", *(text for text in arguments if "user_dir" not in text)]
        result = python(INSTALLED.format(line=line), tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("job 1 of the sweep: checkpoints in") == 1
    else:
        run_module("fairseq_cli.hydra_train", arguments, cwd=tmp_path)
    for job, width in enumerate((8, 12)):
        place = tmp_path / "sweep" / str(job) / "checkpoints" / "lstm_modern"
        require_trained(place / "checkpoint_last.pt", width)


def test_jobs_of_a_sweep_share_no_directory(tmp_path):
    """separate_jobs: the first job trains, the second is refused."""
    place = tmp_path / "saved"
    outcome = run("hydra_train", [*sweep(tmp_path), f"checkpoint.save_dir={place}"])
    assert outcome.kind == "refused"
    assert f"checkpoint.save_dir={place}: job 1 of the sweep would resume" in outcome.text
    require_trained(place / "checkpoint_last.pt", 8)


def test_directories_that_differ_by_job(monkeypatch):
    def differs(value, *given):
        monkeypatch.setattr("sys.argv", ["fairseq-hydra-train", "model.hidden_size=8,12", *given])
        return recipes.differs_by_job("checkpoint.save_dir", value)

    assert not differs("/saved") and not differs("/saved", "checkpoint.save_dir='/saved'")
    assert differs("/saved", "checkpoint.save_dir=/saved,/other") and differs("/saved/${hydra:job.num}")
