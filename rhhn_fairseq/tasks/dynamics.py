"""Training metrics of what happens inside a network.

With ``--log-dynamics N`` every N-th update logs

- ``grad_norm.BLOCK``: the L2 norm of the gradient of each weight matrix, as the optimizer receives it, which
  is after clipping;
- ``update_norm.BLOCK``: the L2 norm of the change that the update makes to it; with ``--bf16`` or ``--fp16``,
  of the rounded weights;
- ``weight_change``: how much the matrices that a hypernetwork generates change from one step to the next, the
  mean over the steps, gates and layers (Ha et al. 2016, figures 3 and 4);
- ``rank_z``, ``rank_d``: the effective ranks of its embeddings and scaling vectors over the steps.

The last three are measured on at most ``STEPS`` steps of the batch's first sequence, read from the zero state
by each cell that ran as a whole; cells inside an attention or a window over a text are left out.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from rhhn_fairseq.cells.config import check_fields, option
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.blocks import is_matrix
from rhhn_fairseq.inspection.rank import hyper_vectors, variation_rank
from rhhn_fairseq.inspection.tracing import CellTrace, recorded
from rhhn_fairseq.inspection.weights import matrix_changes
from rhhn_fairseq.ops import backends

STEPS = 50


@dataclass
class DynamicsTaskConfig(FairseqDataclass):
    log_dynamics: int = option(
        0,
        help="every so many updates, log the norms of gradients and updates by block of weights, the "
        "change of generated weights and the rank of what scales them; 0: never",
        low=0,
    )

    def check(self):
        """Raises UsageError for an option that is not as declared; fairseq does not call __post_init__."""
        if getattr(self, "data", "here") in (None, "", "???"):
            raise UsageError("task.data is not given: name the directory that rhhn prepare made")
        check_fields(self, flags=True)


class LogsDynamics:
    """Mixin for a task that logs the metrics of the module's docstring; ``cfg`` is a ``DynamicsTaskConfig``.

    fairseq calls ``train_step`` for each batch of an update, then ``optimizer_step``. Without the option both
    are unchanged. The model's ``diagnostics`` of its own weights are metrics of every validation.
    """

    _inputs: dict[Cell, Tensor]
    _names: tuple[str, ...] = ()

    def post_validate(self, model: nn.Module, stats: dict, agg) -> None:
        """Adds diagnostics to a validation's metrics ``stats``, which fairseq prints and stores."""
        diagnostics = getattr(model, "diagnostics", dict)
        stats |= {key: round(value, 4) for key, value in diagnostics().items()}

    def _logs(self, update_num: int) -> bool:
        """Whether the update after ``update_num`` is logged."""
        interval = self.cfg.log_dynamics
        return interval > 0 and (update_num + 1) % interval == 0

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        arguments = sample, model, criterion, optimizer, update_num, ignore_grad
        forget_what_was_printed(self._names)
        if not self._logs(update_num):
            return super().train_step(*arguments)
        self._inputs = {}
        with ExitStack() as hooks:
            for cell in outer_cells(model):
                handle = cell.register_forward_hook(self._keep_input, with_kwargs=True)
                hooks.callback(handle.remove)
            return super().train_step(*arguments)

    def _keep_input(self, cell, arguments, keywords, result) -> None:
        x_TBC, _, mask_TB = (*arguments, None, None)[:3]
        mask_TB = keywords.get("mask_TB", mask_TB)
        x_T1C = x_TBC[:, :1].detach()
        self._inputs[cell] = (x_T1C if mask_TB is None else x_T1C[mask_TB[:, 0]])[:STEPS]

    def optimizer_step(self, optimizer, model, update_num):
        if not self._logs(update_num):
            return super().optimizer_step(optimizer, model, update_num)
        matrices = {}
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter) and parameter.grad is not None:
                # The wrappers for several workers are no blocks of the network.
                matrices[re.sub(r"^(module\.)+", "", name)] = parameter
        # In 16 bits the optimizer keeps loss scale, mean over symbols and clipping as a factor.
        factor = float(getattr(optimizer, "_multiply_factor", 1.0))
        figures = {f"grad_norm.{name}": factor * p.grad.float().norm() for name, p in matrices.items()}
        before = {name: p.detach().clone() for name, p in matrices.items()}
        super().optimizer_step(optimizer, model, update_num)
        figures |= {f"update_norm.{name}": (p.detach() - before[name]).norm() for name, p in matrices.items()}
        figures |= hyper_figures(trace_cells(self._inputs))
        for name, value in figures.items():
            metrics.log_scalar(name, float(value), weight=0, priority=2000, round=6)
        self._names = tuple(figures)


def forget_what_was_printed(names: tuple[str, ...]) -> None:
    """Removes figures that fairseq has printed and reset; later lines would show them as None."""
    for aggregator in metrics.get_active_aggregators():
        reset = [name for name in names if name in aggregator and aggregator[name].val is None]
        for name in reset:
            del aggregator[name]
        if reset:
            aggregator.priorities[:] = [entry for entry in aggregator.priorities if entry[-1] not in reset]


def outer_cells(model: nn.Module) -> list[Cell]:
    """Returns the cells of a model that are not inside another cell."""
    cells = [module for module in model.modules() if isinstance(module, Cell)]
    inner = {module for cell in cells for module in cell.modules() if module is not cell}
    return [cell for cell in cells if cell not in inner]


@torch.no_grad()
def trace_cells(inputs: dict[Cell, Tensor]) -> list[CellTrace]:
    """Runs cells over sequences from the zero state, as in evaluation, and returns their traces.

    Args:
        inputs: for each cell a sequence [T, 1, C].
    """
    traces = []
    # These steps must not change what the log says about the training's backends.
    running = dict(backends.RUNNING)
    for number, (cell, x_T1C) in enumerate(inputs.items(), start=1):
        # Within autocast, layers above the first read a narrow type.
        x_T1C = x_T1C.to(next(cell.parameters()).dtype)
        training, state = cell.training, None
        cell.eval()
        with recorded([cell]) as (taken,):
            for x_1C in x_T1C:
                state = cell(x_1C.unsqueeze(0), state)[1]
        cell.train(training)
        if len(taken) > 1:
            traces.append(CellTrace.of(number, cell, taken))
    backends.RUNNING.update(running)
    return traces


def hyper_figures(traces: list[CellTrace]) -> dict[str, float]:
    """Returns the change of the generated weights and the ranks; empty without a hypernetwork."""
    figures = {}
    names, changes = matrix_changes(traces)
    if names:
        figures["weight_change"] = float(changes.mean())
    ranks: dict[str, list[float]] = {}
    for each in traces:
        for kind, vectors in hyper_vectors(each).items():
            ranks.setdefault(kind, []).extend(map(variation_rank, vectors))
    return figures | {f"rank_{kind}": float(np.mean(values)) for kind, values in ranks.items()}
