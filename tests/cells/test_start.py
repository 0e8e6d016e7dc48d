"""How cells start: the first step of a sequence, and the values of their parameters."""

from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from helpers.small_cells import C, H, build, draw_inputs

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.compat.resume import flatten_moments
from rhhn_fairseq.saving import RENAMED, WEIGHTS


def test_first_step_skip_starts_at_the_first_real_position():
    for name, options in (("rhn", {"rhn_depth": 2}), ("hyperrhn", {"rhn_depth": 2, "hyper_size": 3})):
        cell = build(name, options | {"first_step": "skip"}).eval()
        x, _ = draw_inputs(cell, 4, 1)
        padded = torch.cat([torch.full((3, 1, C), float("nan"), dtype=x.dtype), x])
        mask = torch.tensor([False] * 3 + [True] * 4).unsqueeze(1)
        y, _ = cell(padded, mask_TB=mask)
        torch.testing.assert_close(y[3:], cell(x)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name, gates", [("lstm", 4), ("ln_lstm", 4), ("hyperlstm", 4), ("gru", 3)])
def test_matrices_start_gate_by_gate(name, gates):
    """Recurrent ones orthogonal, those of the input Glorot uniform."""
    cell, bound = build_cell(name, 32, 32, **({"hyper_size": 8} if "hyper" in name else {})), (6 / 64) ** 0.5
    for own, read in zip(cell.weight_h.chunk(gates, 1), cell.weight_x.chunk(gates, 1), strict=True):
        # Orthogonalised in float32, whose rounding is 1e-7.
        torch.testing.assert_close(own @ own.T, torch.eye(32), rtol=0, atol=1e-5)
        assert 0.98 * bound < read.abs().max() <= bound


@pytest.mark.parametrize("name", ["hyperlstm", "ln_hyperlstm", "hyperrnn"])
def test_scaling_vectors_start_as_documented(name):
    start = 1.0 if name == "hyperrnn" else 0.1
    for init, rank in (("paper", 1), ("broken_symmetry", 4)):
        torch.manual_seed(0)
        cell = build_cell(name, C, 64, hyper_size=8, hyper_embed_size=4, hyper_init=init)
        d_h, d_x, b = cell.scaling(torch.randn(16, 8))
        assert (b.abs().max() == 0) and cell.diagnostics()["scaling_rank"] == rank
        if init == "paper":
            torch.testing.assert_close(d_h, torch.full_like(d_h, start), rtol=0, atol=1e-6)
        else:
            assert abs(d_h.mean().item() - start) < 0.02 * start
            assert 0.05 * start < d_h.std().item() < 0.15 * start


@pytest.mark.parametrize("init, expected", [("paper", 1), ("broken_symmetry", 4)])
def test_the_papers_constants_keep_rank_one_under_gradient_descent(init, expected):
    torch.manual_seed(0)
    cell = build_cell("ln_hyperlstm", C, 16, hyper_size=8, hyper_embed_size=4, hyper_init=init).double()
    optimizer = torch.optim.Adam(cell.parameters(), 1e-2)
    x, target = torch.randn(8, 4, C).double(), torch.randn(8, 4, 16).double()
    for _ in range(20):
        optimizer.zero_grad()
        (cell(x)[0] - target).square().sum().backward()
        optimizer.step()
    assert cell.diagnostics()["scaling_rank"] == expected


@pytest.mark.parametrize("name", ["rhn", "hyperrhn"])
def test_transform_gates_start_shut(name):
    """With a bias of -4 (Zilly) a state passes the layers almost as it is; with 0 about half of it does."""
    kept = {}
    for bias in (0.0, -4.0):
        torch.manual_seed(0)
        options = {"hyper_size": 8} if name == "hyperrhn" else {}
        cell = build_cell(name, C, 64, rhn_depth=2, transform_bias=bias, **options)
        state = tuple(torch.randn(4, size) for size in cell.state_sizes)
        y, _ = cell(torch.zeros(1, 4, C), state)
        kept[bias] = float((y[0] * state[0]).sum() / state[0].square().sum())
    assert kept[0.0] < 0.6 and kept[-4.0] > 0.9


@pytest.mark.parametrize("name, options", [("rhn", {}), ("hyperrhn", {"hyper_size": 64})])
def test_highway_networks_start_orthogonal_with_uniform_biases(name, options):
    cell = build_cell(name, 64, 64, rhn_depth=2, **options)
    for weight in cell.weight_s:
        torch.testing.assert_close(weight @ weight.T, torch.eye(64), rtol=0, atol=1e-5)
    for bias in (cell.bias_x, *cell.bias_s):
        assert 0.9 / 8 < bias.abs().max() <= 1 / 8


def test_scaling_vectors_start_near_their_start():
    torch.manual_seed(0)
    cell = build_cell("hyper", 3, 64, hyper_size=8, hyper_embed_size=4, hyper_start=0.1)
    e, zeros = torch.randn(16, 8), torch.zeros(16, 64)
    d = cell.scaling_vectors((zeros, zeros, e, e))
    assert abs(d.mean().item() - 0.1) < 0.002 and 0.005 < d.std().item() < 0.015
    # At 0, all rows that make them would otherwise be equal, and stay so.
    cell = build_cell("hyper", 3, 64, hyper_size=8, hyper_embed_size=4, hyper_start=0.0)
    assert cell.scaling[0].weight_d.std(1).mean() > 0.02


NORMALISED = ("ln_lstm", "ln_hyperlstm", "ln_gru")


@pytest.mark.parametrize("name", NORMALISED)
def test_loops_over_names_initialise_normalised_cells_as_torchs(name):
    """As scripts do: zeros for every name without "weight", orthogonal for every matrix with it."""
    cell = build(name, {"hyper_size": 3} if "hyper" in name else {})
    fresh = build_cell(name, C, H, **({"hyper_size": 3} if "hyper" in name else {}))
    for (own, parameter), first in zip(cell.named_parameters(), fresh.parameters(), strict=True):
        if "weight" not in own:
            torch.nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.orthogonal_(parameter)
        elif "norm" in own:
            assert (first == 1).all()
    x, state = draw_inputs(cell, 4, 2)
    assert (cell(x, state)[0].abs() > 1e-4).all()


@pytest.mark.parametrize("name", NORMALISED)
def test_older_names_of_gains_load(name, tmp_path):
    """As a state dictionary and as a saved directory; a HyperLSTM's were matrices."""
    cell = build(name, {"hyper_size": 3} if "hyper" in name else {}, dtype=torch.float32).eval()
    older = {new: old for old, new in RENAMED.items()}
    state = {}
    for key, value in cell.state_dict().items():
        start, dot, last = key.rpartition(".")
        is_matrix = last.startswith("gate_norm") and not start and "hyper" in name
        state[start + dot + older.get(last, last)] = value.view(4, -1) if is_matrix else value
    count = {"ln_lstm": 4, "ln_hyperlstm": 8, "ln_gru": 2}[name]
    assert len(state.keys() - cell.state_dict().keys()) == count
    cell.save_pretrained(tmp_path)
    safetensors.torch.save_file({key: value.clone() for key, value in state.items()}, tmp_path / WEIGHTS)
    loaded = build(name, {"hyper_size": 3} if "hyper" in name else {}, seed=5, dtype=torch.float32).eval()
    loaded.load_state_dict(state)
    x, start = draw_inputs(cell, 4, 2, dtype=torch.float32)
    for other in (loaded, type(cell).from_pretrained(tmp_path)):
        assert torch.equal(other(x, start)[0], cell(x, start)[0])


def test_moments_of_older_gains_are_vectors():
    gain = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([gain])
    optimizer.state[gain] = {"exp_avg": torch.arange(8.0).view(4, 2), "step": torch.tensor(3.0)}
    flatten_moments(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer)))
    assert torch.equal(optimizer.state[gain]["exp_avg"], torch.arange(8.0))
    assert optimizer.state[gain]["step"].shape == ()
