"""Every hostile case ends in one line: no traceback, hang or crash; nothing is run, nothing is lost."""

import dataclasses
import math
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from helpers.cli import python
from helpers.hostile import World
from helpers.hostile_cases import CASES, QUICK
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.compat import errors, ranges
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


class TinyTask(SimpleNamespace):
    """A task of this package."""

    __module__ = "rhhn_fairseq.tasks"


@pytest.mark.parametrize(
    "figures, line",
    [
        ({"loss": 6000.0}, None),
        ({"loss": math.nan}, "update 7: loss nan is above 6000, "),
        # A sentence's sum, as with --sentence-avg.
        ({"loss": 9000.0, "nll_loss": 6.0}, None),
        ({"loss": 9.0, "nll_loss": 6001.0}, "update 7: nll_loss 6001 is above 6000, "),
    ],
)
def test_losses_beyond_their_bounds(figures, line):
    trainer = SimpleNamespace(
        task=TinyTask(target_dictionary=range(64)),
        cfg=OmegaConf.create({"common": {"log_interval": 1}, "optimization": {"clip_norm": 0}}),
        get_model=lambda: None,
        get_num_updates=lambda: 7,
        get_lr=lambda: 0.5,
    )
    with nullcontext() if line is None else pytest.raises(UsageError, match=line):
        errors.require_learning(trainer, figures)
    numbers = errors.largest_losses(SimpleNamespace(target_dictionary=None))
    assert numbers == {"mse": 1e6, "nats_point": 1e6}


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
        ({"--adam-betas": "(0.9, 2)"}, "--adam-betas (0.9, 2) is not possible: at least 0 and less than 1"),
        ({"--seed": -(10**400)}, f"--seed {-(10**400)} is not possible: at least 0 and at most 4.29497e+09"),
        (
            {"--eval-bleu-args": '{"beam": 0}'},
            "--eval-bleu-args beam 0 is not possible: at least 1 and at most 10000",
        ),
    ],
)
def test_range(options, message):
    with pytest.raises(UsageError) as caught:
        ranges.check(options)
    assert str(caught.value) == message


def test_range_leaves_names_alone():
    ranges.check({"--save-dir": "nan", "--source-lang": "inf", "--seed": None, "--cpu": True})


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
        (_raised("fairseq", "raise OSError('bad\\x1b[2J')"), "bad\\x1b[2J (OSError, in fairseq)"),
    ],
)
def test_any_exception_is_one_line_and_a_file(error, line, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shown = errors.message_of(error)
    (file,) = tmp_path.iterdir()
    assert shown == f"{line}; the traceback is in {file}"
    text = file.read_text()
    assert text.startswith("Traceback (most recent call last)") and type(error).__name__ in text


@pytest.mark.slow
def test_a_program_writes_its_traceback_to_a_file_or_to_the_screen(tmp_path):
    program = f"import fairseq_cli, rhhn_fairseq.plugin, tempfile; tempfile.tempdir = {str(tmp_path)!r}; "
    for wanted in ("0", "1"):
        result = python(program + "{}['key']", tmp_path, RHHN_TRACEBACK=wanted)
        assert result.returncode == 1
        last = result.stderr.splitlines()[-1]
        assert ("Traceback" in result.stderr) == (wanted == "1")
        assert last.startswith("KeyError" if wanted == "1" else "error: 'key' (KeyError, in __main__)")
    assert len(list(tmp_path.glob("rhhn-*.traceback.txt"))) == 1
