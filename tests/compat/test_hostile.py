"""Every hostile case ends in one line: no traceback, hang or crash; nothing is run, nothing is lost."""

import argparse
import dataclasses
import math
import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.dataclass import initialize
from fairseq.dataclass.configs import FairseqConfig
from fairseq.logging import metrics
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from fairseq.trainer import Trainer
from helpers.cli import HANGS
from helpers.hostile import World, generation, training
from helpers.hostile_cases import CASES, QUICK
from helpers.in_process import configuration
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.compat import divergence, names, one_line, ranges, starting
from rhhn_fairseq.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("hostile"))
    yield world
    world.close()


def test_cases_are_distinct():
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def _parameters():
    for case in CASES:
        marks = () if case.name in QUICK else pytest.mark.slow
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(_parameters()))
def test_case(world, case):
    found, outcome = world.run(case)
    assert found == "good", outcome.stdout[-3000:] + outcome.stderr[-3000:]


@pytest.mark.parametrize(
    "name, parameter",
    [
        ("loss/translation", r"(en|de)coder\.\S+"),
        ("loss/char_lm", r"\S+"),
        ("loss/adding", r"\S+"),
        pytest.param("loss/copying", r"\S+", marks=pytest.mark.slow),
    ],
)
def test_absurd_loss_names_update_and_parameter(world, name, parameter):
    (case,) = [case for case in CASES if case.name == name]
    _, outcome = world.run(case)
    assert outcome.status == 1
    assert re.fullmatch(
        r"error: training diverged in update \d+: \w+ \S+ is above "
        rf"\S+, which no model that learns exceeds \(in {parameter}\); "
        r"try a lower --lr \(now \S+\) or a stronger --clip-norm \(now \S+\)\n",
        outcome.stderr,
    )


def test_handwriting_that_diverges_names_its_parameter(world):
    """Its densities become NaN at once, when no parameter is infinite yet."""
    (case,) = [case for case in CASES if case.name == "loss/handwriting"]
    _, outcome = world.run(case)
    assert outcome.status == 1
    assert re.match(
        r"error: training diverged in update \d+: the loss .* infinite \(in \S+\); ", outcome.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train", "generate", "interactive"])
def test_program_whose_output_is_full(world, program):
    scene = world.scene(f"full/{program}")
    arguments = training(scene) if program == "train" else generation(scene)
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", f"fairseq_cli.{program}", *map(str, arguments)],
            input="▁one\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANGS,
            env={**os.environ, "LOGLEVEL": "INFO"},
        )
    assert ended.returncode == 1
    assert ended.stderr.endswith("error: standard output: cannot be written (No space left on device)\n")
    assert "Traceback" not in ended.stderr


def test_directory_that_cannot_be_written(tmp_path):
    """It is refused before anything is loaded, and nothing is left of it."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (("file", "Not a directory"), ("file/in", "Not a directory"), ("loop", "a link")):
        with pytest.raises(UsageError, match=rf"^--save-dir .*{name}: no checkpoint can be saved .*{reason}"):
            checkpoint_utils.verify_checkpoint_directory(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_parents_of_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    with pytest.raises(UsageError, match=r"no checkpoint can be saved there \(File name too long\)"):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "new" / ("x" * 300)))
    ((remove, made),) = at_exit
    remove(made)
    assert list(tmp_path.iterdir()) == []


def test_events_that_cannot_be_written(tmp_path):
    """TensorBoard's directory is refused before the first update, not at the first validation."""
    (tmp_path / "file").touch()
    for name, reason in (("file", "File exists"), ("file/in", "Not a directory")):
        with pytest.raises(UsageError, match=rf"^--tensorboard-logdir .*{name}: cannot be made .*{reason}"):
            starting.make_event_directory(str(tmp_path / name))
    starting.make_event_directory(str(tmp_path / "new" / "events"))
    starting.make_event_directory(None)
    assert (tmp_path / "new" / "events").is_dir()


def test_mistyped_name_of_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setattr(
        sys, "argv", ["fairseq-hydra-train", "--config-dir", str(tmp_path), "--config-name", "mien"]
    )
    with pytest.raises(UsageError, match="--config-name mien: there is no mien.yaml: did you mean mine"):
        initialize.hydra_init("mien")


class TinyTask(SimpleNamespace):
    """A task of this package."""

    __module__ = "rhhn_fairseq.tasks"


def test_bounds_of_losses():
    """A thousand times what a model that knows nothing has; of numbers of order 1, a thousand squared."""
    bounds = divergence.largest_losses(SimpleNamespace(target_dictionary=range(64)))
    assert bounds == {"nll_loss": 6000, "loss": 6000}
    assert divergence.largest_losses(SimpleNamespace(problem=SimpleNamespace(classes=8)))["loss"] == 3000
    numbers = divergence.largest_losses(SimpleNamespace(target_dictionary=None))
    assert numbers == {"mse": 1e6, "nats_point": 1e6}


@pytest.mark.parametrize(
    "figures, line",
    [
        ({"loss": 6000.0}, None),
        ({"loss": 6001.0}, "update 7: loss 6001 is above 6000, "),
        ({"loss": math.nan}, "update 7: loss nan is above 6000, "),
        # A sentence's sum, as with --sentence-avg.
        ({"loss": 9000.0, "nll_loss": 6.0}, None),
        ({"loss": 9.0, "nll_loss": 6001.0}, "update 7: nll_loss 6001 is above 6000, "),
    ],
)
def test_losses_beyond_their_bounds(figures, line):
    """end_divergence_in_one_line"""

    def reduce_metrics(outputs, criterion):
        for name, value in figures.items():
            metrics.log_scalar(name, value)

    task = TinyTask(target_dictionary=range(64), reduce_metrics=reduce_metrics)
    sections = {"common": {"log_interval": 1}, "optimization": {"clip_norm": 0}}
    trainer = SimpleNamespace(
        task=task,
        cfg=OmegaConf.create(sections | {"checkpoint": {"save_dir": "nowhere"}}),
        model=torch.nn.Linear(1, 1),
        tpu=False,
        get_criterion=lambda: None,
        get_model=lambda: None,
        get_num_updates=lambda: 7,
        get_lr=lambda: 0.5,
    )
    with nullcontext() if line is None else pytest.raises(UsageError, match=line):
        Trainer._reduce_and_log_stats(trainer, [], 1)


def test_defaults_of_fairseq_are_in_range():
    """check_options refuses no value that fairseq or the project itself gives."""
    registries = [MODEL_DATACLASS_REGISTRY, TASK_DATACLASS_REGISTRY]
    registries += [entry["dataclass_registry"] for entry in REGISTRIES.values()]
    kinds = [kind for registry in registries for kind in registry.values()]
    assert len(kinds) > 50
    for kind in kinds:
        ranges.check({field.name: field.default for field in dataclasses.fields(kind)})
    config = OmegaConf.structured(FairseqConfig)
    ranges.check(ranges.options_of(config))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"--lr": [0.1, math.nan]}, "--lr 0.1,nan is not possible: more than 0"),
        ({"--lr": []}, "--lr has no value; give at least one: more than 0"),
        ({"optimization.max_epoch": -1}, "optimization.max_epoch -1 is not possible: at least 0"),
        ({"--patience": 0}, "--patience 0 is not possible: at least 1, or -1"),
        ({"--adam-betas": "(0.9, 2)"}, "--adam-betas (0.9, 2) is not possible: at least 0 and less than 1"),
        ({"--anything": math.nan}, "--anything nan is not possible: a finite number"),
        ({"--nbest": 5, "--beam": 2}, "--nbest 5 is more than --beam 2 hypotheses"),
        (
            {"--valid-subset": "valid,test", "--combine-valid-subsets": True},
            "--valid-subset valid,test and --combine-valid-subsets exclude each other; leave one of them out",
        ),
        (
            {"--checkpoint-suffix": "_a", "--keep-best-checkpoints": 1},
            "--checkpoint-suffix _a may have no _ with --keep-best-checkpoints",
        ),
        ({"--seed": -(10**400)}, f"--seed {-(10**400)} is not possible: at least 0 and at most 4.29497e+09"),
        ({"--eval-bleu-args": '{"beam": "4"}'}, '--eval-bleu-args {"beam": "4"}: beam is not a number'),
    ],
)
def test_range(options, message):
    with pytest.raises(UsageError) as caught:
        ranges.check(options)
    assert str(caught.value) == message


def test_range_leaves_names_alone():
    ranges.check({"--save-dir": "nan", "--source-lang": "inf", "--seed": None, "--cpu": True})
    # The beam is the one that fairseq takes.
    ranges.check({"--eval-bleu-args": '{"diverse_beam_groups": 5, "beam": null}'})


@pytest.mark.parametrize(
    "criterion, fits", [("nat_loss", False), ("label_smoothed_cross_entropy_with_rdrop", True)]
)
def test_losses_of_translation(criterion, fits):
    expected = f"--arch lstm_gnmt needs --criterion label_smoothed_cross_entropy, not {criterion}"
    with nullcontext() if fits else pytest.raises(UsageError, match=expected):
        names.check_combination("translation", "lstm_gnmt", criterion)


def test_a_criterion_without_a_dataclass(tmp_path):
    """check_options: its options are a namespace."""
    given = [tmp_path, "--arch", "lstm", "--task", "translation", "--max-tokens", 9, "--cpu"]
    cfg = configuration([*given, "--optimizer", "adam", "--criterion", "legacy_masked_lm_loss"])
    with pytest.raises(Exception, match="Could not infer language pair"):
        tasks.setup_task(cfg.task)


def test_an_option_without_a_default():
    message = names.explain(argparse.ArgumentParser(), "argument --max-lr: invalid float value: '???'")
    assert message == "--max-lr is missing: it has no default"


def _raised(module: str, statement: str) -> Exception:
    """What a statement raises in a module of that name."""
    with pytest.raises(Exception) as error:
        exec(statement, {"__name__": module})
    return error.value


@pytest.mark.parametrize(
    "error, line",
    [
        (_raised("fairseq.registry", "{}['adma']"), "'adma' (KeyError, in fairseq.registry)"),
        (_raised("numpy.core", "raise ValueError('two\\nlines')"), "two lines (ValueError, in numpy.core)"),
        (_raised("torch.nn", "assert False"), "(AssertionError, in torch.nn)"),
        (_raised("fairseq", "raise OSError('bad\\x1b[2J')"), "bad\\x1b[2J (OSError, in fairseq)"),
    ],
)
def test_any_exception_is_one_line_and_a_file(error, line, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shown = one_line.message_of(error)
    (file,) = tmp_path.iterdir()
    assert shown == f"{line}; the traceback is in {file}"
    text = file.read_text()
    assert text.startswith("Traceback (most recent call last)") and type(error).__name__ in text


def test_words_of_the_package_are_kept_however_deep_the_error_is(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outer = RuntimeError("outer")
    outer.__cause__ = Exception(f"Caught in a worker.\nTraceback ...\n{one_line.MARK}a file: is missing\n")
    assert one_line.message_of(outer) == "a file: is missing"
    assert not list(tmp_path.iterdir())


def test_a_program_writes_its_traceback_to_a_file_or_to_the_screen(tmp_path):
    program = "import fairseq_cli, rhhn_fairseq.plugin; {}['key']"
    for wanted in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "RHHN_TRACEBACK": wanted, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 1
        last = result.stderr.splitlines()[-1]
        assert ("Traceback" in result.stderr) == (wanted == "1")
        assert last.startswith("KeyError" if wanted == "1" else "error: 'key' (KeyError, in __main__)")
    assert len(list(tmp_path.glob("rhhn-*.traceback.txt"))) == 1


def test_nearest():
    assert (
        names.nearest("lstm_gnmt_smal", ["lstm_gnmt_small", "transformer"]) == "did you mean lstm_gnmt_small?"
    )
    assert names.nearest("x", ["one", "two"]) == "choose from one, two"
    assert names.nearest("x", map(str, range(100, 200))) == ""
