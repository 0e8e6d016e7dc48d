"""Cells that are registered outside of the package, as in a notebook or a user's own directory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.cells.config import CellConfig, option
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import recurrent_weights
from rhhn_fairseq.nn import quantize_dynamic
from rhhn_fairseq.ops.matmul.gemm import affine


@pytest.fixture(autouse=True)
def registry():
    before = dict(CELLS)
    yield
    CELLS.clear()
    CELLS.update(before)


@dataclass(frozen=True, kw_only=True)
class LeakyConfig(CellConfig):
    forget_bias: float = option(-3.0, help="bias of the leak")
    width: int = option(2, help="a whole number")


def _leaky(weight="weight_h"):
    class Leaky(Cell):
        """A leaky integrator."""

        def __init__(self, config):
            super().__init__(config)
            H = config.hidden_size
            self.weight_x = nn.Parameter(torch.ones(config.input_size, H))
            setattr(self, weight, nn.Parameter(torch.ones(H, H)))

        def input_maps(self):
            return ((self.weight_x, None),)

        def state_matrices(self):
            return {weight: getattr(self, weight)}

        def step(self, g_t, state, noise_t, matrices=None):
            (matrix,) = matrices or (getattr(self, weight),)
            leak = torch.sigmoid(torch.tensor(self.config.forget_bias))
            h = leak * state[0] + torch.tanh(affine(state[0], matrix, g_t[0]))
            return h, (h,)

    return Leaky


def test_types_in_quotes_are_checked():
    register_cell("leaky", LeakyConfig, None)(_leaky())
    assert build_cell("leaky", 3, 4).config.forget_bias == -3.0
    with pytest.raises(UsageError, match="width=2.5 is not a whole number"):
        build_cell("leaky", 3, 4, width=2.5)
    for value in (float("nan"), float("inf")):
        with pytest.raises(UsageError, match=f"forget_bias={value} is not a finite number"):
            build_cell("leaky", 3, 4, forget_bias=value)


def test_a_field_that_is_no_option_is_refused_where_the_cell_is_defined():
    @dataclass(frozen=True, kw_only=True)
    class Plain(CellConfig):
        alpha: float = 0.5

    with pytest.raises(TypeError, match=r"Plain.alpha: use option\(default, help=...\) for every field"):
        register_cell("plain", Plain, None)


def test_a_definition_may_run_again():
    for _ in range(2):
        register_cell("leaky", LeakyConfig, None)(_leaky())
    with pytest.raises(ValueError, match="a cell named 'leaky' is registered already"):
        register_cell("leaky", LeakyConfig, None)(type(build_cell("lstm", 2, 2)))


def test_a_scaled_cell_keeps_its_own_defaults():
    register_cell("leaky", LeakyConfig, None)(_leaky())
    scaled = build_cell("hyper", 3, 4, main_cell="leaky", hyper_cell="leaky", hyper_size=2)
    assert scaled.main.config.forget_bias == scaled.hyper.config.forget_bias == -3.0
    given = build_cell("hyper", 3, 4, main_cell="leaky", hyper_cell="lstm", hyper_size=2, forget_bias=2.0)
    assert given.main.config.forget_bias == given.hyper.config.forget_bias == 2.0


def test_matrices_of_other_names_are_named_by_the_cell():
    register_cell("leaky", LeakyConfig, None)(_leaky("weight_leak"))
    cell = build_cell("leaky", 3, 4)
    reason = r"names 'weight_h', which Leaky lacks; name its own weights"
    with pytest.raises(UsageError, match=f"Leaky.recurrent_weights {reason}"):
        recurrent_weights(cell)
    with pytest.raises(UsageError, match=f"Leaky.affine_weights {reason}"):
        quantize_dynamic(cell, smallest=1)
    cell.recurrent_weights, cell.affine_weights = ("weight_leak",), ("weight_x", "weight_leak")
    assert list(recurrent_weights(cell)) == ["weight_leak"]
    quantize_dynamic(cell, smallest=1)(torch.zeros(2, 1, 3))
