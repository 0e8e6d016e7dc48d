"""--config-name without --config-dir: the package's own configurations, in any directory."""

from pathlib import Path

import pytest
import torch
from helpers.cli import USER_DIR, python, run_module
from helpers.config_files import RECIPES
from helpers.programs import run
from helpers.tiny_char_lm import write_corpus

from rhhn_fairseq.adaptations import hydra_configs, hydra_recipes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def composed(*arguments) -> str:
    outcome = run("hydra_train", [*arguments, "--cfg", "job"])
    assert outcome.kind == "works", outcome.text
    return outcome.text


def test_the_names_are_unique():
    assert len({path.stem for path in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ln_hyperlstm_ptb", "_name: ln_hyperlstm_ptb"),
        ("hyperrhn_gnmt_small.yaml", "_name: gnmt_translation"),
        ("lstm_900_iam", "_name: handwriting"),
        ("lstm_adding_200", "problem: adding"),
    ],
)
def test_a_configuration_of_each_system(name, line):
    """Those of different systems have shared files of the same names, which must not be mixed."""
    assert line in composed("--config-name", name)


def test_the_same_as_from_its_directory():
    folder = hydra_configs.CONFIGS / "gnmt"
    own = composed("--config-name", "lstm_gnmt_small")
    assert own == composed("--config-dir", str(folder), "--config-name", "lstm_gnmt_small")


def test_fairseqs_own_configuration_stays_the_default():
    assert composed() == composed("--config-name", "config")
    assert "_name: char_lm" not in composed()


def test_a_directory_of_ones_own_comes_first(tmp_path):
    (tmp_path / "lstm_ptb.yaml").write_text("common:\n  seed: 77\n")
    shown = composed("--config-dir", str(tmp_path), "--config-name", "lstm_ptb")
    assert "seed: 77" in shown and "_name: char_lm" not in shown


def test_an_unknown_name_ends_in_one_line():
    outcome = run("hydra_train", ["--config-name", "ln_hyperlstm_ptbx"])
    assert outcome.kind == "refused"
    said = "--config-name ln_hyperlstm_ptbx is unknown without a --config-dir, did you mean ln_hyperlstm_ptb "
    assert outcome.text.startswith(said)


@pytest.mark.parametrize(
    "override, line",
    [
        (
            "task.subword_sampling=0.2",
            "the configuration has no task.subword_sampling: +task.subword_sampling=",
        ),
        (
            "optimization.max_updat=3",
            "the configuration has no optimization.max_updat: did you mean max_update?",
        ),
    ],
)
def test_an_option_that_the_file_lacks(override, line):
    outcome = run("hydra_train", ["--config-name", "hyperlstm_gnmt_small", override])
    assert outcome.kind == "refused" and line in outcome.text


@pytest.mark.parametrize(
    "name, metric, line",
    [
        ("lstm_ptb", "bpd", "char_cross_entropy logs no such figure, choose from loss, bpc, ppl, accuracy"),
        ("lstm_gnmt_small", "bleu", "--best-checkpoint-metric bleu needs --eval-bleu"),
    ],
)
def test_the_figure_of_the_best_checkpoint_is_checked_at_the_start(tmp_path, name, metric, line):
    arguments = ["--config-name", name, f"task.data={tmp_path}", "common.cpu=true"]
    outcome = run("hydra_train", [*arguments, f"checkpoint.best_checkpoint_metric={metric}"])
    assert outcome.kind == "refused" and line in outcome.text


def sweep(folder: Path) -> list[str]:
    """A sweep of two jobs of three updates, which have 8 and 12 units."""
    write_corpus(folder)
    model = ["model.hidden_size=8,12", "dataset.batch_size=2", "task.tokens_per_sample=7"]
    limits = ["optimization.max_update=3", "optimization.max_epoch=0", "lr_scheduler.total_num_update=3"]
    more = [f"task.data={folder / 'data'}", f"common.user_dir={USER_DIR}", "common.cpu=true"]
    name = ["--config-name", "lstm_modern", "--multirun", "hydra.sweep.dir=sweep"]
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


@pytest.mark.parametrize("form", ["user directory", "installed"])
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


@pytest.mark.parametrize(
    "given, value, differs",
    [
        (None, "/saved", False),
        ("/saved", "/saved", False),
        ("'/saved'", "/saved", False),
        ("/saved,/other", "/saved", True),
        (None, "/saved/${hydra:job.num}", True),
        ("/saved/${model.hidden_size}", "/saved/${model.hidden_size}", True),
    ],
)
def test_directories_that_differ_by_job(monkeypatch, given, value, differs):
    line = ["fairseq-hydra-train", "model.hidden_size=8,12"]
    monkeypatch.setattr("sys.argv", line if given is None else [*line, f"checkpoint.save_dir={given}"])
    assert hydra_recipes.differs_by_job("checkpoint.save_dir", value) == differs
