"""Checkpoints of wrong form, in every program that loads one."""

import argparse
import io
import os
import pickle
import zipfile
from pathlib import Path

import torch

from helpers.hostile import Case, Scene, evaluation, generation, training

PROGRAM = "__import__('os').mkdir('executed')"


class Smuggler:
    """Unpickling it makes a directory."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def cyclic() -> dict:
    """A configuration that contains itself."""
    config = {"model": {}}
    config["model"]["model"] = config
    return config


def deep() -> dict:
    """A configuration of two hundred levels."""
    config = {}
    for _ in range(200):
        config = {"model": config}
    return config


def first(state: dict) -> str:
    """The name of the largest weight."""
    return max(state["model"], key=lambda name: state["model"][name].numel())


def change(*keys, value):
    """A state with another value in one place."""

    def changed(state):
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return state

    return changed


def weights(made):
    """A state whose largest weight is made anew from the old one."""

    def changed(state):
        name = first(state)
        state["model"][name] = made(state["model"][name])
        return state

    return changed


def without(*keys):
    """A state in which a key is missing."""

    def changed(state):
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return state

    return changed


# What any loader refuses: from a good checkpoint's state to the object to save.
FORMS = {
    "a list": lambda state: [state],
    "weights alone": lambda state: state["model"],
    "model None": change("model", value=None),
    "NaN weights": weights(lambda w: torch.full_like(w, float("nan"))),
    "sparse weights": weights(lambda w: w.to_sparse()),
    "weights on the meta device": weights(lambda w: w.to("meta")),
    "a weight of terabytes": weights(lambda w: torch.zeros(1).expand(10**12)),
    "a weight missing": lambda s: {**s, "model": {k: v for k, v in s["model"].items() if k != first(s)}},
    "code": change("extra_state", value=Smuggler()),
}

# What a loader refuses that builds the model from the checkpoint's configuration.
CONFIGURATIONS = {
    "cfg None": change("cfg", value=None),
    "cfg contains itself": lambda state: {**state, "cfg": cyclic()},
    "cfg deeply nested": lambda state: {**state, "cfg": deep()},
    "cfg.model of no known name": change("cfg", "model", "_name", value="lstm_gnmt_smal"),
    "cfg.model of absurd width": change("cfg", "model", "hidden_size", value=10**9),
    "cfg.model of absurd depth": lambda state: change("cfg", "model", "encoder_layers", value=10**9)(
        change("cfg", "model", "layers", value=10**9)(state)
    ),
    "cfg.model a width of text to run": change("cfg", "model", "hidden_size", value=PROGRAM),
    "cfg.model an unknown resolver": change("cfg", "model", "hidden_size", value="${run:mkdir executed}"),
    "args of no known name": lambda state: {
        **state, "cfg": None, "args": argparse.Namespace(arch="lstn", task="translation", data="data")
    },
}  # fmt: skip

# What resuming refuses.
RESUMPTIONS = {
    "extra_state a string": change("extra_state", value="state"),
    "extra_state missing": without("extra_state"),
    "place in the data negative": change("extra_state", "train_iterator", "iterations_in_epoch", value=-3),
    "optimizer state empty": change("last_optimizer_state", value={}),
    "another criterion": change("optimizer_history", 0, "criterion_name", value="Other"),
    "updates a string": change("optimizer_history", 0, "num_updates", value="many"),
}


def _packed(content: bytes) -> bytes:
    """The same zip file, compressed, with ten gigabytes of zeros in it."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as file:
                file.write(old.read(name))
                if name.endswith("/data/0"):
                    for _ in range(200):
                        file.write(bytes(1 << 20))
    return packed.getvalue()


# Files that are damaged as such: from the bytes of a good one.
FILES = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "a pickle that runs code": lambda content: pickle.dumps({"model": Smuggler()}),
    "compressed zeros": _packed,
}


def _form(model: str, command, form):
    def arguments(scene) -> list:
        state = torch.load(scene.checkpoints / f"{model}.pt", weights_only=True)
        torch.save(form(state), scene.here / "hostile.pt")
        return command(scene, scene.here / "hostile.pt")

    return arguments


def _file(model: str, command, damage):
    def arguments(scene) -> list:
        content = (scene.checkpoints / f"{model}.pt").read_bytes()
        (scene.here / "hostile.pt").write_bytes(damage(content))
        return command(scene, scene.here / "hostile.pt")

    return arguments


COMMANDS = {
    "generate": ("generate", "gnmt", lambda s, path: generation(s, path=path)),
    "eval_lm": ("eval_lm", "char_lm", lambda s, path: evaluation(s, path=path)),
    "translate": (
        "rhhn",
        "gnmt",
        lambda s, path: ["translate", "--checkpoint", path, "--data", s.pairs, "--cpu"],
    ),
    "sample": ("rhhn", "char_lm", lambda s, path: ["sample", path, "--data", s.chars, "--length", 5]),
    "write": ("rhhn", "char_lm", lambda s, path: ["write", path, "--text", "a", "--points", 3]),
    "resume": ("train", "gnmt", lambda s, path: training(s, "--restore-file", path, "--max-update", 4)),
}


def _pipe(scene: Scene) -> Path:
    """A named pipe that nobody writes to."""
    path = scene.here / "pipe.pt"
    os.mkfifo(path)
    return path


OTHER = {
    "generate of a language model": ("generate", lambda s: generation(s, path=s.checkpoints / "char_lm.pt")),
    "generate from no file": ("generate", lambda s: generation(s, path=s.here / "nowhere.pt")),
    "eval_lm from a pipe": ("eval_lm", lambda s: evaluation(s, path=_pipe(s))),
    "resume from a directory": ("train", lambda s: training(s, "--restore-file", s.here)),
}


def checkpoint_cases() -> list[Case]:
    """Every form and damage in one of the programs, which share the loader, and every program with one."""
    cases = []
    for number, (kind, form) in enumerate((FORMS | CONFIGURATIONS).items()):
        name = ("generate", "eval_lm")[number % 2]
        program, model, command = COMMANDS[name]
        cases.append(Case(f"checkpoint/{name}/{kind}", program, _form(model, command, form)))
    for kind, damage in FILES.items():
        program, model, command = COMMANDS["eval_lm"]
        cases.append(Case(f"checkpoint/file {kind}", program, _file(model, command, damage)))
    for kind, form in RESUMPTIONS.items():
        program, model, command = COMMANDS["resume"]
        cases.append(Case(f"checkpoint/resume/{kind}", program, _form(model, command, form)))
    for name in ("translate", "sample", "write", "resume"):
        program, model, command = COMMANDS[name]
        form = FORMS["NaN weights"]
        cases.append(Case(f"checkpoint/{name}", program, _form(model, command, form), slow=name != "resume"))
    write = lambda s, path: ["write", path, "--lines", 1, "--points", 3]  # noqa: E731
    good = Case("control/write", "rhhn", _form("handwriting", write, lambda state: state), harmless=True)
    cases.append(good)
    cases += [Case(f"checkpoint/{kind}", program, arguments) for kind, (program, arguments) in OTHER.items()]
    return cases
