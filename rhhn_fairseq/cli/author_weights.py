"""Converts the HyperRHN and RHN checkpoints of Suarez 2017 to checkpoints of this project.

The author's repository (jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS) writes state dicts of torch.nn
modules. Their weights are [out, in], this project's are [in, out]; the halves [h, t] have the same order.
Both models omit the recurrent map and its bias at the first step: ``first_step=skip``. The author numbers the
characters in sorted order, so the rows of the embedding and of the output layer are permuted.

Shapes: V symbols, E embedding, H main width, N width of the hypernetwork, L depth.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from rhhn_fairseq.compat.checkpoints import check_file, why_unreadable
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import open_regular, read_regular
from rhhn_fairseq.saving import weight_problem
from rhhn_fairseq.tasks.char_lm import CharLMTask

LARGEST_VOCABULARY_FILE = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The sizes of one of the author's models; ``hyper`` is None for an RHN."""

    symbols: int
    embedding: int
    hidden: int
    depth: int
    hyper: int | None

    @property
    def arch(self) -> str:
        """Returns the architecture of this project with the options of the model."""
        return "rhn_ptb" if self.hyper is None else "hyperrhn_ptb"

    @property
    def cells(self) -> dict[str, tuple[str, int]]:
        """Returns the recurrent networks: the author's prefix, our prefix and the width."""
        if self.hyper is None:
            return {"cell.": ("stack.cells.0.", self.hidden)}
        return {
            "cell.HyperCell.": ("stack.cells.0.hyper.", self.hyper),
            "cell.RHNCell.": ("stack.cells.0.", self.hidden),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight by the author's name, in the author's layout."""
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.symbols, self.embedding)}
        linear = {"unembed": (self.symbols, self.hidden)}
        for prefix, (_, width) in self.cells.items():
            linear[f"{prefix}inp"] = (2 * width, self.embedding)
            linear |= {f"{prefix}cell.{layer}": (2 * width, width) for layer in range(self.depth)}
        if self.hyper is not None:
            linear |= {f"cell.upscaleProj.{layer}": (self.hidden, self.hyper) for layer in range(self.depth)}
        for name, shape in linear.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Reads the author's state dict: tensors by name, without running any code from the file.

    Raises:
        UsageError: the file cannot be read, is damaged, holds anything but tensors, or a weight that is not
            finite.
    """
    with open_regular(path) as file:
        check_file(str(path), file)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        # The unpickler fails on damaged bytes with any exception: KeyError, EOFError, RuntimeError, ...
        except Exception as error:
            raise UsageError(why_unreadable(str(path), error)) from error
    if not isinstance(state, Mapping) or not state:
        raise UsageError(f"{path}: holds a {type(state).__name__}, not a state dict (tensors by name)")
    for name, weight in state.items():
        if problem := weight_problem(name, weight):
            raise UsageError(f"{path}: {name} {problem}")
    return dict(state)


def read_sizes(state: Mapping[str, Tensor], path: str | Path) -> Sizes:
    """Returns the sizes of the author's model after checking every name and shape.

    Raises:
        UsageError: names the first weight that is missing, superfluous or of another shape.
    """
    advice = "it is no HyperRHN or RHN of jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS"

    def matrix(name: str) -> tuple[int, int]:
        if name not in state:
            raise UsageError(f"{path}: has no {name}; {advice}")
        if state[name].dim() != 2:
            raise UsageError(f"{path}: {name} has shape {list(state[name].shape)}, a matrix is expected")
        rows, columns = state[name].shape
        return rows, columns

    hyper = any(name.startswith("cell.HyperCell.") for name in state)
    layer = re.compile(r"cell\.RHNCell\.cell\.(\d+)\.weight" if hyper else r"cell\.cell\.(\d+)\.weight")
    sizes = Sizes(
        *matrix("embed.weight"),
        hidden=matrix("unembed.weight")[1],
        depth=sum(layer.fullmatch(name) is not None for name in state),
        hyper=matrix("cell.upscaleProj.0.weight")[1] if hyper else None,
    )
    if not sizes.depth:
        raise UsageError(f"{path}: has no {'cell.RHNCell' if hyper else 'cell'}.cell.0.weight; {advice}")
    expected = sizes.shapes()
    for name in (*expected, *state):
        if name not in state:
            raise UsageError(f"{path}: has no {name}; {advice}")
        if name not in expected:
            raise UsageError(f"{path}: has {name}, which the author's model has not; {advice}")
        if tuple(state[name].shape) != expected[name]:
            raise UsageError(
                f"{path}: {name} has shape {list(state[name].shape)}, {list(expected[name])} is expected "
                "by the shapes of the others"
            )
    return sizes


def read_characters(path: str | Path) -> dict[str, int]:
    """Reads the author's vocabulary: a Python dictionary from characters to indices, as a literal.

    Raises:
        UsageError: the file cannot be read, is no such literal, or the indices are not 0, 1, 2, ...
    """
    content = read_regular(path, LARGEST_VOCABULARY_FILE)
    try:
        table = ast.literal_eval(content.decode("utf-8").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path}: is no Python dictionary written as a literal ({error})") from error
    if not isinstance(table, dict) or not table:
        raise UsageError(f"{path}: holds a {type(table).__name__}, a dictionary of characters is expected")
    for symbol, index in table.items():
        if not isinstance(symbol, str) or len(symbol) != 1 or type(index) is not int:
            raise UsageError(f"{path}: {symbol!r}: {index!r} is not a character and its index")
    if sorted(table.values()) != list(range(len(table))):
        raise UsageError(f"{path}: the indices of its {len(table)} characters are not 0 to {len(table) - 1}")
    return table


def symbol_order(characters: Mapping[str, int], vocabulary: CharVocabulary, path, data) -> list[int]:
    """Returns the author's index of each of our symbols, in the model's order.

    Raises:
        UsageError: the symbols differ, or ours are words.
    """
    advice = "prepare the author's corpus with rhhn prepare ptb --variant raw"
    if vocabulary.mode == "words":
        raise UsageError(f"--data {data}: is a corpus of words; {advice}")
    ours = [chr(code) for code in vocabulary.codes().tolist()]
    if set(ours) != set(characters):
        only_in_file, only_in_data = sorted(set(characters) - set(ours)), sorted(set(ours) - set(characters))
        raise UsageError(
            f"{path} has {len(characters)} characters and {data} has {len(ours)} symbols: only there "
            f"{only_in_file[:8]}, only in the data {only_in_data[:8]}; {advice}"
        )
    return [characters[symbol] for symbol in ours]


def convert_weights(state: Mapping[str, Tensor], sizes: Sizes, order: list[int]) -> dict[str, Tensor]:
    """Returns the author's weights with our names and layout, in float32, without ``symbol_codes``."""
    state = {name: weight.float() for name, weight in state.items()}
    weights = {
        "embedding": state["embed.weight"][order],
        "weight_out": state["unembed.weight"][order].T,
        "bias_out": state["unembed.bias"][order],
    }
    for theirs, (ours, _) in sizes.cells.items():
        weights[f"{ours}weight_x"] = state[f"{theirs}inp.weight"].T
        weights[f"{ours}bias_x"] = state[f"{theirs}inp.bias"]
        for layer in range(sizes.depth):
            weights[f"{ours}weight_s.{layer}"] = state[f"{theirs}cell.{layer}.weight"].T
            weights[f"{ours}bias_s.{layer}"] = state[f"{theirs}cell.{layer}.bias"]
    if sizes.hyper is not None:
        names = [f"cell.upscaleProj.{layer}" for layer in range(sizes.depth)]
        weights["stack.cells.0.weight_z"] = torch.stack([state[f"{name}.weight"].T for name in names])
        weights["stack.cells.0.bias_z"] = torch.stack([state[f"{name}.bias"] for name in names])
    return {name: weight.contiguous() for name, weight in weights.items()}


def convert(weights: str | Path, vocabulary: str | Path, data: str | Path) -> dict:
    """Returns a checkpoint of this project made from the author's files.

    It is for ``fairseq-eval-lm``, the scripts and ``fairseq-train --finetune-from-model``. The configuration
    is that of ``rhn_ptb`` or ``hyperrhn_ptb`` with the sizes of the weights.

    Args:
        weights: the state dict. vocabulary: the dictionary of characters.
        data: the directory of the corpus, prepared with ``rhhn prepare``.

    Raises:
        UsageError: see ``read_state_dict``, ``read_sizes``, ``read_characters`` and ``symbol_order``.
    """
    state = read_state_dict(weights)
    sizes = read_sizes(state, weights)
    characters = read_characters(vocabulary)
    if len(characters) != sizes.symbols:
        raise UsageError(
            f"{vocabulary} has {len(characters)} characters, {weights} was trained on {sizes.symbols}"
        )
    cfg = _configuration(sizes, data)
    task = CharLMTask.setup_task(cfg.task)
    order = symbol_order(characters, task.vocabulary, vocabulary, data)
    model = task.build_model(cfg.model)
    converted = convert_weights(state, sizes, order)
    model.load_state_dict(converted | {"symbol_codes": model.symbol_codes})
    history = {
        "criterion_name": "CharCrossEntropy",
        "optimizer_name": "",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "criterion": {},
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"converted": str(weights)},
        "last_optimizer_state": None,
    }


def _configuration(sizes: Sizes, data: str | Path):
    """Returns the configuration that fairseq-train would build from the options of such a model."""
    arguments = [str(data), "--arch", sizes.arch, "--first-step", "skip"]
    arguments += ["--hidden-size", str(sizes.hidden), "--rhn-depth", str(sizes.depth)]
    arguments += ["--embed-dim", str(sizes.embedding)]
    if sizes.hyper is not None:
        arguments += ["--hyper-size", str(sizes.hyper)]
    parser = fairseq_options.get_training_parser()
    return convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments))
