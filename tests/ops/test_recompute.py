"""A sequence whose parts are computed again in the backward pass: the same numbers, less kept."""

import dataclasses

import pytest
import torch
from helpers.fused_cells import RHN_NOISE, backends, run_pass
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import prune

from rhhn_fairseq.cells import take_scaling
from rhhn_fairseq.cells.registry import CELLS, build_cell, cell_options
from rhhn_fairseq.nn import LSTM, HyperLSTM
from rhhn_fairseq.ops import recompute

C, H, T, B = 4, 6, 7, 3
SMALL = dict(hyper_size=3, hyper_embed_size=2, rhn_depth=2)
CASES = [(name, "full") for name in CELLS] + [("rhn", "skip"), ("hyperrhn", "skip")]


def _cell(name, noise=True, **options):
    torch.manual_seed(0)
    wanted = SMALL | (RHN_NOISE if noise else {}) | options
    known = cell_options(name)
    cell = build_cell(name, C, H, **{key: value for key, value in wanted.items() if key in known}).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return cell


def _pass(cell, x, state, mask, noise, backend=None):
    """Outputs, the state after, and the gradients of everything."""
    with pytest.MonkeyPatch.context() as patch:
        return run_pass(cell, x, state, mask, noise, backend or "", patch)


def _set(cell, steps):
    cell.config = dataclasses.replace(cell.config, recompute_steps=steps)


@pytest.mark.parametrize("started", [False, True], ids=["zeros", "carried"])
@pytest.mark.parametrize("name, first_step", CASES)
def test_parts_equal_the_whole(name, first_step, started):
    cell = _cell(name, first_step=first_step)
    x = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    state = None
    if started:
        state = tuple(torch.randn(B, size, dtype=x.dtype, requires_grad=True) for size in cell.state_sizes)
    # Sequences that begin within the first part, in the second, and at its edge.
    mask = torch.arange(T).unsqueeze(1) >= torch.tensor([1, 4, 3])
    noise = cell.sample_noise(T, B)
    for backend in backends(cell, "cpu", x.dtype):
        _set(cell, 0)
        whole = _pass(cell, x, state, mask, noise, backend)
        for steps in (1, 3, T):
            _set(cell, steps)
            for one, other in zip(_pass(cell, x, state, mask, noise, backend), whole, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_noise_is_drawn_once():
    cell = _cell("ln_hyperlstm")
    x = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    found = []
    for steps in (0, 2):
        _set(cell, steps)
        torch.manual_seed(3)
        found.append(_pass(cell, x, None, None, None))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dropped", [True, False])
def test_weights_without_a_gradient_are_those_of_the_first_pass(dropped):
    """Which weight drop and ``functional_call`` replace for the pass."""
    found = []
    for steps in (0, 2):
        torch.manual_seed(0)
        rnn = LSTM(C, H, weight_drop=0.5 * dropped, recompute_steps=steps, dtype=torch.float64)
        rnn.stack.cells[0].weight_h.requires_grad_(False)
        x, others = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True), {}
        if not dropped:
            others = {name: 2 * weight.detach() for name, weight in rnn.named_parameters()}
        torch.manual_seed(1)
        torch.func.functional_call(rnn, others, x)[0].square().sum().backward()
        found.append([x.grad, *(p.grad for p in rnn.parameters() if p.grad is not None)])
    assert len(found[0]) == (3 if dropped else 1)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_scaling_is_taken_of_one_pass():
    rnn, x = HyperLSTM(C, H, recompute_steps=2), torch.randn(T, B, C)
    with take_scaling(rnn.stack.cells) as vectors:
        rnn(x)[0].sum().backward()
    assert vectors[0].shape == (T, B, 4, H)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("what", ["weight", "mask", "noise"])
def test_what_changes_before_the_backward_pass_is_an_error(what, frozen):
    cell = _cell("lstm", recompute_steps=2)
    cell.weight_h.requires_grad_(not frozen)
    mask, noise = torch.ones(T, B, dtype=torch.bool), cell.sample_noise(T, B)
    y, _ = cell(torch.randn(T, B, C, dtype=torch.float64), None, mask, noise)
    with torch.no_grad():
        dict(weight=cell.weight_h, mask=mask, noise=noise["zoneout"])[what].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _bytes_kept(cell, x):
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        cell(x)
    return sum(kept.values())


@pytest.mark.parametrize("name", ["ln_hyperlstm"])
def test_less_is_kept(name):
    cell = build_cell(name, 64, 64, hyper_size=32)
    x = torch.randn(64, 8, 64, requires_grad=True)
    parameters = sum(part.numel() * part.element_size() for part in cell.parameters())
    input_bytes = x.numel() * x.element_size()
    everything = _bytes_kept(cell, x) - input_bytes
    _set(cell, 8)
    # States of eight parts; the input is a view of what is there anyway.
    assert _bytes_kept(cell, x) - input_bytes < 0.1 * everything + parameters
    assert everything > 5 * input_bytes + parameters


def test_evaluation_runs_whole(monkeypatch):
    monkeypatch.setattr(recompute, "run_in_segments", lambda *_: pytest.fail("in segments"))
    cell = _cell("lstm", recompute_steps=2).eval()
    with torch.no_grad():
        cell(torch.randn(T, B, C, dtype=torch.float64))


def _errors(name, steps, exact=None):
    """Relative errors of the gradients of a bfloat16 pass by name; without ``exact``, float64's gradients."""
    cell = _cell(name, noise=False, recompute_steps=steps)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(parameter.bfloat16())
    x = torch.randn(400, 4, C, generator=torch.Generator().manual_seed(1)).bfloat16()
    dtype = torch.float64 if exact is None else torch.bfloat16
    cell, x = cell.to(dtype), x.to(dtype)
    y, _ = cell(x)
    y.sum().backward()
    found = {key: parameter.grad.double() for key, parameter in cell.named_parameters()}
    if exact is None:
        return found
    return {key: ((found[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact}


@pytest.mark.parametrize("name", ["ln_lstm", "hyperrhn"])
def test_parts_in_bfloat16_err_no_more_than_the_whole(name):
    """Sums and states of 80 parts in bfloat16 would err more; a whole sequence errs by up to 0.003."""
    exact = _errors(name, 0)
    whole, parts = _errors(name, 0, exact), _errors(name, 5, exact)
    for key in exact:
        # Measured: up to 1.05 times as much.
        assert parts[key] <= 1.2 * whole[key], key


@pytest.mark.parametrize("name", ["ln_lstm", "hyperrhn"])
def test_weights_that_are_computed_before_a_pass(name):
    """Pruning, for example, sets them as plain attributes that are no parameters."""
    cell = _cell(name, noise=False)
    matrix = "weight_h" if name == "ln_lstm" else "weight_x"
    prune.l1_unstructured(cell, matrix, amount=0.3)
    x = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    whole = _pass(cell, x, None, None, None)
    _set(cell, 3)
    for one, other in zip(_pass(cell, x, None, None, None), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
