"""Energies of additive attention by compiled code, beside torch's operations."""

import pytest
import torch
from helpers.fused_cells import assert_equal

from rhhn_fairseq.ops import energy, native, policy


def _energies(q, k, v, mask):
    hidden = torch.tanh(q.unsqueeze(2) + k.unsqueeze(1))
    return (hidden @ v).masked_fill(~mask.unsqueeze(1), float("-inf"))


@pytest.mark.parametrize("N, R, S, A", [(1, 1, 1, 1), (3, 7, 5, 17), (5, 3, 4, 129)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_energies_equal_torchs_operations(N, R, S, A, dtype, monkeypatch):
    if native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")
    torch.manual_seed(0)
    parts = [torch.randn(N, R, A), 2 * torch.randn(N, S, A), torch.randn(A)]
    parts = [part.to(dtype).requires_grad_() for part in parts]
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    mask = torch.rand(N, S) > 0.3
    mask[:, 0] = True
    weights = torch.randn(N, R, S, dtype=torch.float64)

    def run(function, q, k, v):
        # Through a softmax, as padding has to leave no trace in the gradients either.
        chances = function(q, k, v, mask).softmax(dim=-1)
        loss = (chances * weights.to(chances.dtype)).sum()
        return [chances, *torch.autograd.grad(loss, [q, k, v])]

    exact = run(_energies, *exact_parts)
    found = run(energy.energies, *parts)
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Measured: 1e-15, 4e-7 and, for gradients stored in bfloat16, 4e-3.
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype]
    assert_equal([part.double() for part in found], exact, tolerance)
    monkeypatch.setattr(native, "library", lambda: None)
    if dtype != torch.bfloat16:
        assert_equal([part.double() for part in run(energy.energies, *parts)], exact, tolerance)


@pytest.mark.parametrize("wrong", ["q", "k", "v"])
def test_operands_of_other_widths_are_refused(wrong):
    widths = dict(q=5, k=5, v=5) | {wrong: 3}
    q, k, v = torch.randn(2, 3, widths["q"]), torch.randn(2, 4, widths["k"]), torch.randn(widths["v"])
    with pytest.raises(RuntimeError, match="size"):
        energy.energies(q, k, v, torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_one_sentence_for_all_is_broadcast(shared):
    parts = [torch.randn(3, 2, 5), torch.randn(3, 4, 5), torch.randn(5), torch.rand(3, 4) > 0.3]
    parts[shared] = parts[shared][:1]
    torch.testing.assert_close(energy.energies(*parts), _energies(*parts))


def test_energies_have_every_derivative_without_the_compiled_code():
    torch.manual_seed(0)
    shapes = ((2, 3, 5), (2, 4, 5), (5,))
    operands = tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    tangents = tuple(torch.randn_like(operand) for operand in operands)
    mask = torch.ones(2, 4, dtype=torch.bool)

    def own(q, k, v):
        return energy.energies(q, k, v, mask)

    def plain(q, k, v):
        return _energies(q, k, v, mask)

    values = tuple(operand.detach() for operand in operands)
    torch.testing.assert_close(torch.func.jvp(own, values, tangents), torch.func.jvp(plain, values, tangents))
    expected = torch.func.grad(lambda *tensors: plain(*tensors).sum())(*values)
    torch.testing.assert_close(torch.func.grad(lambda *tensors: own(*tensors).sum())(*values), expected)
    with policy.using(kernel="reference"):
        assert torch.autograd.gradgradcheck(own, operands)


def test_energy_operations_keep_torchs_rules():
    if native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (2, 4, 5), (5,))
    )
    mask = torch.ones(2, 4, dtype=torch.bool)
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(energy.energy, (q, k, v, mask), test_utils=rules)
    de = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.library.opcheck(energy.energy_backward, ([de], [], q, k, v, mask), test_utils=rules)
    assert torch.autograd.gradcheck(lambda *tensors: energy.energies(*tensors, mask), (q, k, v))


def test_energies_are_compiled_as_one_operation():
    if native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")
    torch.manual_seed(0)
    operands = [torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 5), (2, 4, 5), (5,))]
    mask = torch.rand(2, 4) > 0.3
    mask[:, 0] = True
    names = []

    def keep_names(module, _):
        names.extend(str(node.target) for node in module.graph.nodes)
        return module

    def run(function):
        loss = function(*operands, mask).softmax(dim=-1).square().sum()
        return [loss, *torch.autograd.grad(loss, operands)]

    found = run(torch.compile(energy.energies, fullgraph=True, backend=keep_names))
    torch.testing.assert_close(found, run(energy.energies))
    assert "rhhn.energy.default" in names and not any("tanh" in name for name in names), names
