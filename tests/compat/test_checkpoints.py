"""Checkpoints are data: what is refused when fairseq reads them, and that no code in them runs."""

import argparse
import os
import pickle
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, utils
from helpers.cli import python

from rhhn_fairseq.compat import applying as compat
from rhhn_fairseq.compat import checkpoints, forms
from rhhn_fairseq.compat.expressions import evaluate
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.char_lm import CharLMTask

compat.apply()


class Smuggler:
    """Unpickling it runs a program."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


NAMES = {"arch": "lstm_lm", "task": "language_modeling"}


def save_pickle(obj, path):
    path.write_bytes(pickle.dumps(obj))


def save_old_format(obj, path):
    torch.save(obj, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, save_old_format, save_pickle])
@pytest.mark.parametrize("force_unsafe", ["0", "1"])
def test_smuggled_code_is_refused(tmp_path, monkeypatch, save, force_unsafe):
    """load_weights_only; with the variable set, PyTorch's default would be to run the code."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force_unsafe)
    path = tmp_path / "evil.pt"
    save({"model": {}, "extra_state": Smuggler(f"touch {tmp_path}/ran")}, path)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert not (tmp_path / "ran").exists()


def test_weights_only_cannot_be_switched_off_by_the_caller(tmp_path):
    path = tmp_path / "evil.pt"
    torch.save({"model": Smuggler(f"touch {tmp_path}/ran")}, path)
    with path.open("rb") as file, pytest.raises(UsageError, match="posix.system"):
        checkpoint_utils.torch.load(file, weights_only=False)
    assert not (tmp_path / "ran").exists()
    assert checkpoint_utils.torch.Tensor is torch.Tensor


def test_other_classes_are_refused_and_namespace_is_not(tmp_path):
    """allow_namespace."""
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "args": argparse.Namespace(**NAMES)}, path)
    with path.open("rb") as file:
        assert checkpoint_utils.torch.load(file)["args"].task == "language_modeling"
    torch.save({"model": {}, "args": SimpleNamespace(**NAMES)}, path)
    with pytest.raises(UsageError, match="types.SimpleNamespace"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize("kind", ["cut", "empty", "text", "list", "missing", "directory"])
def test_unreadable_checkpoint_is_one_line(tmp_path, kind):
    """load_weights_only and name_missing_file."""
    path = tmp_path / "checkpoint.pt"
    if kind == "directory":
        path.mkdir()
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind != "missing":
        torch.save({"model": {"weight": torch.zeros(1000)}}, path)
        content = {"cut": path.read_bytes()[:2000], "empty": b"", "text": b"not a checkpoint"}
        path.write_bytes(content[kind])
    with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entries, problem",
    [
        ({"extra_state": None}, "extra_state is of type NoneType, and has to be dict"),
        ({"optimizer_history": None}, "optimizer_history is of type NoneType, and has to be list"),
        ({"task_state": None}, "task_state is of type NoneType, and has to be dict"),
        (
            {"extra_state": {"train_iterator": None}},
            "extra_state.train_iterator is of type NoneType, and has to be dict",
        ),
        (
            {"extra_state": {"metrics": "x"}},
            "extra_state.metrics is of type str, and has to be dict",
        ),
        (
            {"optimizer_history": [{"num_updates": -5}]},
            "optimizer_history.num_updates is -5, and has to be 0 or more",
        ),
    ],
)
def test_entries_that_cannot_be(entries, problem):
    forms.check_state("a.pt", {"model": {}, "cfg": None, "criterion": None, "last_optimizer_state": None})
    with pytest.raises(UsageError, match=f"^checkpoint a.pt: {problem}$"):
        forms.check_state("a.pt", {"model": {}} | entries)


def test_nothing_but_namespace_is_allowed():
    """PyTorch's own modules allow some classes of theirs; the plugin adds one to them."""
    result = python(
        "import fairseq, fairseq.trainer, argparse, torch.distributed.run\n"
        "from torch.serialization import get_safe_globals\n"
        "before = set(get_safe_globals())\n"
        "import rhhn_fairseq.plugin\n"
        "assert set(get_safe_globals()) - before == {argparse.Namespace}, get_safe_globals()"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("option", ["restore_file", "finetune_from_model", "continue_once"])
def test_named_checkpoint_must_exist(tmp_path, option):
    """require_named_checkpoint: without it fairseq trains from scratch, or shows a traceback."""
    given = {"restore_file": "checkpoint_last.pt", "finetune_from_model": None}
    given |= {"continue_once": None, option: "nowhere.pt"}
    reset = dict.fromkeys(["optimizer", "lr_scheduler", "meters", "dataloader"], False)
    config = SimpleNamespace(
        save_dir=str(tmp_path),
        optimizer_overrides="{}",
        **given,
        **{f"reset_{name}": value for name, value in reset.items()},
    )
    task = CharLMTask.__new__(CharLMTask)
    trainer = SimpleNamespace(checkpoint_suffix="", get_model=lambda: None, task=task)
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} nowhere.pt"):
        checkpoint_utils.load_checkpoint(config, trainer)


@pytest.mark.parametrize(
    "suffix, shards, names",
    [("", 1, ["checkpoint.pt"]), ("_a", 1, ["checkpoint_a.pt"]), ("", 2, ["checkpoint_part0.pt"])],
)
def test_a_model_may_be_as_large_as_its_files_are(tmp_path, monkeypatch, suffix, shards, names):
    """bound_the_model, for the files that fairseq makes of one name, too."""
    allowed = []
    monkeypatch.setattr(checkpoints, "allowance", lambda numbers, _: allowed.append(numbers) or nullcontext())
    for name in names:
        (tmp_path / name).write_bytes(bytes(1000))
    path = str(tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match=f"{names[0]} cannot be read"):
        checkpoint_utils.load_model_ensemble_and_task(
            [path], suffix=suffix, num_shards=shards, strict=shards == 1
        )
    assert allowed == [4000 + (1 << 24)]


def test_configuration_strings_run_no_code(tmp_path):
    """configuration_is_data: the configuration inside a checkpoint reaches these calls of eval."""
    assert utils.eval_str_list("[1, 2] * 2", type=int) == [1, 2, 1, 2]
    assert utils.eval_bool("True") is True and utils.eval_bool(None, default=True) is True
    args = argparse.Namespace(decoder_layers=f"[__import__('os').mkdir({str(tmp_path / 'ran')!r})]")
    with pytest.raises(UsageError, match="is not made of numbers"):
        utils.eval_str_list(args.decoder_layers)
    from fairseq.models import fconv_lm

    assert fconv_lm.eval is evaluate
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[(512, 10, 5)] + [(512, 3, 2)] * 2", [(512, 10, 5), (512, 3, 2), (512, 3, 2)]),
        ("{'a': -1.5, 'b': None}", {"a": -1.5, "b": None}),
        (" 1e-30 ", 1e-30),
        ("{1, 6 / 3}", {1, 2.0}),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["f()", "a", "(1).real", "[x for x in (1,)]", "1 +", "2 ** 9", "1/0"])
def test_evaluate_refuses(text):
    with pytest.raises(UsageError, match="is not made of numbers"):
        evaluate(text)
