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

from rhhn_fairseq import plugin as compat
from rhhn_fairseq.compat import checkpoints
from rhhn_fairseq.compat.checkpoints import evaluate
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
def test_smuggled_code_is_refused(tmp_path, monkeypatch, save):
    """load_weights_only; with the variable set, PyTorch's default would be to run the code."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
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
    """The options of fairseq's older models."""
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "args": argparse.Namespace(**NAMES)}, path)
    with path.open("rb") as file:
        assert checkpoint_utils.torch.load(file)["args"].task == "language_modeling"
    torch.save({"model": {}, "args": SimpleNamespace(**NAMES)}, path)
    with pytest.raises(UsageError, match="types.SimpleNamespace"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_languages_in_a_list_are_checked_one_by_one():
    """Multilingual tasks of fairseq's keep them so; a checkpoint of theirs was refused."""
    languages = ["de-en", "fr-en"]
    state = {"model": {}, "cfg": {"model": {"lang_pairs": languages}}}
    checkpoints.check_state("a.pt", state)
    languages.append("../fr-en")
    with pytest.raises(UsageError, match="cfg.model.lang_pairs .* a checkpoint may not set"):
        checkpoints.check_state("a.pt", state)


@pytest.mark.parametrize("content", [{"model": {"weight": torch.zeros(1000)}}, [1, 2]])
def test_unreadable_checkpoint_is_one_line(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    if isinstance(content, dict):
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert "\n" not in str(caught.value)


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
    """fairseq trains from scratch, or shows a traceback."""
    given = {"restore_file": "checkpoint_last.pt", "finetune_from_model": None, "continue_once": None}
    config = SimpleNamespace(save_dir=str(tmp_path), **given | {option: "nowhere.pt"})
    task = CharLMTask.__new__(CharLMTask)
    trainer = SimpleNamespace(checkpoint_suffix="", get_model=lambda: None, task=task)
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} nowhere.pt"):
        checkpoint_utils.load_checkpoint(config, trainer)


@pytest.mark.parametrize(
    "suffix, shards, names",
    [("", 1, ["checkpoint.pt"]), ("_a", 1, ["checkpoint_a.pt"]), ("", 2, ["checkpoint_part0.pt"])],
)
def test_a_model_may_be_as_large_as_its_files_are(tmp_path, monkeypatch, suffix, shards, names):
    """For the files that fairseq makes of one name, too."""
    allowed = []
    monkeypatch.setattr(checkpoints, "Allowance", lambda numbers, _: allowed.append(numbers) or nullcontext())
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


def test_evaluate():
    assert evaluate("[(512, 10, 5)] + [(512, 3, 2)] * 2") == [(512, 10, 5), (512, 3, 2), (512, 3, 2)]
    assert evaluate(" {'a': -1.5, 'b': 6 / 3}") == {"a": -1.5, "b": 2.0}


@pytest.mark.parametrize("text", ["f()", "a", "(1).real", "[x for x in (1,)]", "1 +", "2 ** 9", "1/0"])
def test_evaluate_refuses(text):
    with pytest.raises(UsageError, match="in the configuration"):
        evaluate(text)
