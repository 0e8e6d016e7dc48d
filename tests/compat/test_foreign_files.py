"""Files from somebody else: nothing in them is executed, and none of them keeps a loader busy."""

import os
import pty
import shutil
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from helpers import tiny_char_lm, tiny_handwriting
from helpers.cli import fairseq_train, run_module, run_rhhn
from helpers.tiny_translation import lstm
from safetensors.torch import load_file, save_file

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq.cli import average
from rhhn_fairseq.compat import checkpoints
from rhhn_fairseq.compat.checkpoints import evaluate
from rhhn_fairseq.compat.command_line import stored_defaults
from rhhn_fairseq.data.strokes.iam import _points
from rhhn_fairseq.errors import UsageError, printable
from rhhn_fairseq.nn import from_pretrained

SHELL = "$(touch executed)"


@pytest.fixture(scope="module")
def gift(tmp_path_factory):
    """A directory with data, and a model whose stored options lead to a shell."""
    folder = tmp_path_factory.mktemp("gift")
    for language in ("en", "fr"):
        for split in ("train", "valid"):
            (folder / f"{split}.{language}").write_text("a b c d\n" * 8)
    texts = ["--trainpref", folder / "train", "--validpref", folder / "valid"]
    languages = ["--source-lang", "en", "--target-lang", "fr"]
    run_module("fairseq_cli.preprocess", [*texts, *languages, "--destdir", folder / "data"])
    fairseq_train(lstm(folder / "data", folder / "saved", "--max-update", 1, size=4))
    state = torch.load(folder / "saved/checkpoint_last.pt", weights_only=True)
    state["cfg"]["task"] |= {"dataset_impl": "fasta", "source_lang": SHELL}
    for name in (SHELL, "fr"):
        shutil.copy(folder / "data/dict.en.txt", folder / f"data/dict.{name}.txt")
        (folder / f"data/valid.{SHELL}-fr.{name}.fasta").write_text(">one\nabc\n")
    torch.save(state, folder / "data/model.pt")
    return folder / "data"


@pytest.mark.parametrize("module", ["fairseq_cli.validate", "fairseq_cli.generate"])
def test_a_directory_that_is_given_away_starts_no_shell(gift, module, tmp_path):
    subset = "--valid-subset" if module.endswith("validate") else "--gen-subset"
    arguments = [gift, "--path", gift / "model.pt", subset, "valid", "--max-tokens", 100, "--cpu"]
    result = run_module(module, arguments, cwd=tmp_path, check=False)
    assert not (tmp_path / "executed").exists()
    assert "error: checkpoint" in result.stderr and "which a checkpoint may not set" in result.stderr


def test_names_of_sequences_in_fasta_reach_no_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{SHELL}.fasta").write_text(">first\nAC\nGT\n>second\nA\n")
    with pytest.raises(UsageError, match="fairseq gives this name to a shell"):
        data_utils.load_indexed_dataset(SHELL)
    assert not (tmp_path / "executed").exists()


def nested(levels: int) -> dict:
    """A dictionary that holds the same one twice, and so on: 2 ** levels values in a few hundred bytes."""
    inner = {}
    for _level in range(levels):
        inner = {"left": inner, "right": inner}
    return inner


def references(levels: int) -> dict:
    """Settings of which each refers to the one before ten times."""
    chain = {f"s{level}": f"${{model.s{level - 1}}}" * 10 for level in range(1, levels)}
    return {"s0": "0", **chain}


HANGING = {
    "a shared configuration": lambda state: {**state, "cfg": {**state["cfg"], "x": nested(30)}},
    "shared training state": lambda state: {**state, "extra_state": nested(40)},
    "references": lambda state: {
        **state,
        "cfg": {**state["cfg"], "model": {**state["cfg"]["model"], **references(11)}},
    },
}


def test_defaults_of_fairseq_may_refer_to_one_value():
    """As in checkpoints that ``rhhn convert`` writes."""
    root = {"common": {"seed": 1, "all": {}}, "optimization": {"update_freq": [1, 2]}}
    root["task"] = {"x": "${a.b}"}
    for name, holds in (("common.seed", True), ("optimization.update_freq", True), ("common.all", False)):
        assert checkpoints._is_one_value("${" + name + "}", root) == holds
    for text in ("${task.x}", "${task}", "${common.seed}${common.seed}", "${oc.env:HOME}", "${nowhere.x}"):
        assert not checkpoints._is_one_value(text, root)


LOADERS = {
    "a program's": lambda path: stored_defaults({"path": str(path)}),
    "fairseq's": lambda path: checkpoint_utils.load_model_ensemble([str(path)]),
    "the average's": average.load,
}


@pytest.fixture(scope="module")
def char_lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("char_lm")
    corpus = tiny_char_lm.write_corpus(folder)
    model = tiny_char_lm.build_model(tiny_char_lm.build_task(corpus))
    tiny_char_lm.save(model, corpus, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", HANGING)
def test_small_files_take_little_work(char_lm, kind, loader, tmp_path):
    state = torch.load(char_lm, weights_only=True)
    torch.save(HANGING[kind](state), tmp_path / "small.pt")
    start = time.process_time()
    with pytest.raises(UsageError, match=r"small\.pt: (cfg|extra_state)"):
        LOADERS[loader](tmp_path / "small.pt")
    # Walking through them would take hours; refusing them takes 0.1 to 0.9 s.
    assert time.process_time() - start < 30


@pytest.mark.parametrize("loader", LOADERS)
def test_a_compressed_checkpoint_is_refused_by_all(char_lm, loader, tmp_path):
    with (
        zipfile.ZipFile(char_lm) as old,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UsageError, match="is compressed"):
        LOADERS[loader](tmp_path / "small.pt")
    LOADERS[loader](char_lm)


@pytest.mark.parametrize("text", ["10000000000 * [0]", "([0] * 5000) * 5000", "[0] * (9999999999 + 1)"])
def test_expressions_of_a_configuration_stay_small(text):
    with pytest.raises(UsageError, match="in the configuration"):
        evaluate(text)
    assert evaluate("[(512, 3)] * 15") == [(512, 3)] * 15


def test_nested_elements_are_read_once():
    depth = 50_000
    content = b"<a><StrokeSet>" + b"<Stroke>" * depth + b'<Point x="1" y="2"/>' * 3
    content += b"</Stroke>" * depth + b"</StrokeSet></a>"
    plain = b"<a><StrokeSet><Stroke>" + b'<Point x="1" y="2"/>' * 3 + b"</Stroke></StrokeSet></a>"
    start = time.process_time()
    np.testing.assert_array_equal(_points(content, "line.xml"), _points(plain, "line.xml"))
    # A quadratic reader visits 1.25e9 elements.
    assert time.process_time() - start < 60


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_in_both_formats(value, tmp_path):
    model = tiny_handwriting.build()
    model.save_pretrained(tmp_path / "net")
    weights = load_file(tmp_path / "net/model.safetensors")
    name = next(name for name, weight in weights.items() if weight.is_floating_point() and weight.dim() == 2)
    weights[name] = weights[name].clone()
    weights[name][0, 0] = value
    save_file(weights, tmp_path / "net/model.safetensors")
    with pytest.raises(UsageError, match=rf"model\.safetensors: {name} holds NaN or infinite numbers"):
        from_pretrained(tmp_path / "net")


def test_no_escape_sequence_reaches_a_terminal(tmp_path):
    name = "bad\x1b[2Jname\x9b\r.pt"
    shown = str(UsageError(f"{name}: no such file"))
    assert shown == "bad\\x1b[2Jname\\x9b\\r.pt: no such file"
    assert printable("Grüße\tan\r\nalle 漢字\u00a0!") == "Grüße\tan\r\nalle 漢字\u00a0!"
    result = run_rhhn("sample", tmp_path / name, check=False)
    assert result.returncode == 1
    assert "\x1b" not in result.stdout + result.stderr and "\\x1b[2J" in result.stderr


def test_a_terminal_gets_no_control_characters_from_a_text(tmp_path):
    program = "from rhhn_fairseq.cli.running import run; exit(run(lambda: print('a\\x1b[31mb')))"
    for terminal, expected in ((False, b"a\x1b[31mb\n"), (True, b"a\\x1b[31mb")):
        assert expected in printed(program, terminal)


def printed(program: str, terminal: bool) -> bytes:
    """What a program writes to a pipe, or to a terminal."""
    command = [sys.executable, "-c", program]
    if not terminal:
        return subprocess.run(command, stdout=subprocess.PIPE).stdout
    here, there = pty.openpty()
    subprocess.run(command, stdout=there)
    os.close(there)
    text = os.read(here, 1000)
    os.close(here)
    return text
