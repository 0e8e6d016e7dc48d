"""Sequences that start anew within a pass, and what a pass says of the scaling by its hypernetwork."""

import itertools

import numpy as np
import pytest
import torch
from helpers.fused_cells import backends
from helpers.small_cells import build, cell_cases, draw_inputs, draw_noise, every_cell, noise_at

from rhhn_fairseq.cells import take_scaling
from rhhn_fairseq.cells.hyper_rnn import naive_scaling
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.backends import torch_nn


def _cut_apart(cell, x, state, mask, noise, resets):
    """Outputs and last state of every sequence cut at its resets; each part but the first has no state."""
    columns, finals = [], []
    for b in range(x.shape[1]):
        cuts = sorted({0, len(x), *resets[:, b].nonzero().flatten().tolist()})
        current, parts = None if resets[0, b] else tuple(part[b : b + 1] for part in state), []
        for start, stop in itertools.pairwise(cuts):
            here, one = slice(start, stop), slice(b, b + 1)
            given = None if start else current
            y, current = cell(x[here, one], given, mask[here, one], noise_at(noise, here, b))
            parts.append(y)
        columns.append(torch.cat(parts))
        finals.append(current)
    return torch.cat(columns, dim=1), tuple(map(torch.cat, zip(*finals, strict=True)))


@every_cell
def test_resets_equal_sequences_cut_there(name, options, monkeypatch):
    cell = build(name, options)
    T, B = 9, 4
    x, state = draw_inputs(cell, T, B)
    noise = draw_noise(cell, T, B)
    resets, mask = torch.zeros(T, B, dtype=torch.bool), torch.ones(T, B, dtype=torch.bool)
    # None; the first step; several, two of them in a row; one in padding, and one after it.
    for b, steps in enumerate(([], [0, 5], [2, 3, 8], [4, 7])):
        resets[steps, b] = True
    mask[4:6, 3] = mask[8, 3] = mask[0, 3] = False
    results = []
    # torch's own GRU and LSTM know no resets.
    for backend in (None, *(b for b in backends(cell, dtype=torch.float64) if b != "torch_nn")):
        if backend is not None:
            monkeypatch.setenv("RHHN_KERNEL", backend)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *state)]
        if backend is None:
            y, final = _cut_apart(cell, leaves[0], leaves[1:], mask, noise, resets)
        else:
            y, final = cell(leaves[0], tuple(leaves[1:]), mask, noise, resets)
        loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + sum(part.sum() for part in final)
        results.append([y, *final, *torch.autograd.grad(loss, [*leaves, *cell.parameters()])])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("most_padding", [4, 0], ids=["padded", "packed"])
def test_torchs_gru_takes_resets(most_padding, monkeypatch):
    monkeypatch.setattr(torch_nn, "MOST_PADDING", most_padding)
    cell = build("gru", {})
    x, state = draw_inputs(cell, 9, 4)
    resets = torch.zeros(9, 4, dtype=torch.bool)
    resets[[0, 3, 3, 8], [1, 0, 2, 3]] = True
    results = []
    for backend in ("torch_nn", "reference"):
        monkeypatch.setenv("RHHN_KERNEL", backend)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *state)]
        y, final = cell(leaves[0], tuple(leaves[1:]), resets_TB=resets)
        loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + final[0].sum()
        results.append([y, *final, *torch.autograd.grad(loss, [*leaves, *cell.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


SCALED = [
    pytest.param(*case.values, id=case.id)
    for case in cell_cases()
    if not case.marks and case.values[0].startswith(("hyper", "ln_hyper", "rolled"))
]


@pytest.mark.parametrize("name, options", SCALED)
def test_scaling_vectors_of_a_pass_are_those_of_its_steps(name, options, monkeypatch):
    """Single steps from the states in between tell what scaled each of them."""
    cell = build(name, options)
    T, B = 7, 3
    x, state = draw_inputs(cell, T, B)
    noise = draw_noise(cell, T, B)
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[[0, 3, 4], [1, 0, 2]] = True
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    steps, after = [], state
    for t in range(T):
        now = {key: part[t : t + 1] if len(part) > 1 else part for key, part in noise.items()}
        with take_scaling([cell]) as vectors:
            _, after = cell(x[t : t + 1], after, noise=now, resets_TB=resets[t : t + 1])
        steps += vectors
    for backend in backends(cell, dtype=torch.float64):
        monkeypatch.setenv("RHHN_KERNEL", backend)
        with take_scaling([cell]) as vectors:
            cell(x, state, noise=noise, resets_TB=resets)
        torch.testing.assert_close(vectors[0], torch.cat(steps), rtol=0, atol=1e-12)
    assert not vectors[0].requires_grad and cell.taken is None
    if name == "hyperrhn":
        expected = after[1] @ cell.weight_z[-1] + cell.z_shift()[-1]
        torch.testing.assert_close(steps[-1][0, :, -1], expected, rtol=0, atol=1e-12)
    if name == "hyperlstm" and cell.config.hyper_state == "current":
        parameters = {key: value.numpy() for key, value in cell.state_dict().items()}
        for b, gate in itertools.product(range(B), range(4)):
            d_h, _, _ = naive_scaling(parameters, "scaling.", after[2][b].detach().numpy(), gate, 4)
            np.testing.assert_allclose(steps[-1][0, b, gate].numpy(), d_h, rtol=0, atol=1e-12)


def test_scaling_of_a_cell_without_a_hypernetwork_is_refused():
    cell = build("lstm", {})
    with pytest.raises(UsageError, match="LSTM has no hypernetwork"), take_scaling([cell]):
        cell(*draw_inputs(cell, 2, 1))
