"""Converts the author's HyperRHN or RHN of Suarez 2017 to a checkpoint of this project.

Example:
  python -m experiments.suarez WEIGHTS FILE --data data-bin/ptb --output suarez.pt

WEIGHTS is a state dict of jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS, FILE the dictionary from
characters to indices beside it. No code in either is run.
"""

import ast
from pathlib import Path

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.cli import running
from rhhn_fairseq.cli.convert import new_checkpoint
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.compat.checkpoints import write
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import check_output
from rhhn_fairseq.tasks.char_lm import CharLMTask


def main(argv=None) -> None:
    parser = make_parser("", __doc__)
    parser.prog = "python -m experiments.suarez"
    parser.add_argument("weights", metavar="WEIGHTS", help="the author's state dict")
    parser.add_argument("vocabulary", metavar="FILE", help="the author's dictionary of characters")
    parser.add_argument("--data", required=True, metavar="DIR", help="directory of the prepared corpus")
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")
    args = parser.parse_args(argv)
    check_output("--output", args.output, [args.weights, args.vocabulary])
    checkpoint = from_author(args.weights, args.vocabulary, args.data)
    write(checkpoint, args.output)
    count = sum(weight.numel() for weight in checkpoint["model"].values() if weight.is_floating_point())
    print(f"converted: {checkpoint['cfg']['model']['_name']}, {count:,} weights")
    print(f"written: {args.output}")


def from_author(weights: str | Path, vocabulary: str | Path, data: str | Path) -> dict:
    """Returns a checkpoint of a HyperRHN or RHN of Suarez 2017, for the uses of ``convert.to_checkpoint``.

    The author's weights are [out, in], this project's [in, out]; the halves [h, t] have the same order. Both
    models omit the recurrent map and its bias at the first step: ``first_step=skip``. The author numbers the
    characters in sorted order, so the rows of the embedding and of the output layer are permuted.

    Args:
        weights: the state dict. vocabulary: the dictionary of characters, a Python literal.
        data: the directory of the corpus, prepared with ``rhhn prepare ptb --variant raw``.

    Raises:
        UsageError: the weights are no such model's. KeyError: characters of the data are not in the
            dictionary. RuntimeError: the weights have other shapes.
    """
    state = dict(torch.load(weights, map_location="cpu", weights_only=True))
    table = ast.literal_eval(Path(vocabulary).read_text(encoding="utf-8").strip())
    if sorted(table.values()) != list(range(len(state["embed.weight"]))):
        raise UsageError(f"{vocabulary}: its indices are not 0 to {len(state['embed.weight']) - 1}")
    hyper = "cell.upscaleProj.0.weight" in state
    depth = sum(".cell." in name for name in state) // (4 if hyper else 2)
    sizes = {"hidden-size": state["unembed.weight"].shape[1], "embed-dim": state["embed.weight"].shape[1]}
    sizes["rhn-depth"] = depth
    if hyper:
        sizes["hyper-size"] = state["cell.upscaleProj.0.weight"].shape[1]
    arguments = [str(data), "--arch", "hyperrhn_ptb" if hyper else "rhn_ptb", "--first-step", "skip"]
    arguments += [f"--{name}={size}" for name, size in sizes.items()]
    parser = fairseq_options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments))
    task = CharLMTask.setup_task(cfg.task)
    symbols = ["\n"] * task.vocabulary.newline_occurs + list(task.vocabulary.symbols)
    model = task.build_model(cfg.model)
    converted = rename(state, [table[symbol] for symbol in symbols], depth)
    if state:
        raise UsageError(f"{weights}: has {next(iter(state))}, which the author's model has not")
    model.load_state_dict(converted | {"symbol_codes": model.symbol_codes})
    cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return new_checkpoint(cfg, model.state_dict(), task.state_dict())


def rename(state: dict[str, Tensor], order: list[int], depth: int) -> dict[str, Tensor]:
    """Takes the author's weights out of ``state``; returns them with our names and layout, in float32."""

    def take(name: str) -> tuple[Tensor, Tensor]:
        return state.pop(f"{name}.weight").float().T, state.pop(f"{name}.bias").float()

    out, bias = take("unembed")
    ours = {"embedding": state.pop("embed.weight").float()[order]}
    ours |= {"weight_out": out[:, order], "bias_out": bias[order]}
    cells = {"cell.": ""}
    if "cell.upscaleProj.0.weight" in state:
        cells = {"cell.HyperCell.": "hyper.", "cell.RHNCell.": ""}
        pairs = [take(f"cell.upscaleProj.{layer}") for layer in range(depth)]
        names = ("stack.cells.0.weight_z", "stack.cells.0.bias_z")
        ours |= {name: torch.stack(each) for name, each in zip(names, zip(*pairs, strict=True), strict=True)}
    for theirs, inner in cells.items():
        prefix = f"stack.cells.0.{inner}"
        ours[f"{prefix}weight_x"], ours[f"{prefix}bias_x"] = take(f"{theirs}inp")
        for layer in range(depth):
            ours[f"{prefix}weight_s.{layer}"], ours[f"{prefix}bias_s.{layer}"] = take(f"{theirs}cell.{layer}")
    return {name: weight.contiguous() for name, weight in ours.items()}


if __name__ == "__main__":
    raise SystemExit(running.run(main))
