"""What asks for the loop over a cell's step: second derivatives, torch.func, hooks on inner modules."""

import copy
import warnings

import pytest
import torch
from helpers.cli import python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize, prune

from rhhn_fairseq.cells import CELLS, build_cell, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.nn import layer_of
from rhhn_fairseq.ops import backends, native, policy

C, H, T, B = 4, 6, 5, 3
# A fixture of all tests replaces it.
CURRENT = policy.current


def _build(cell, **options):
    small = {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}
    torch.manual_seed(0)
    return layer_of(cell)(C, H, **small, **options, dtype=torch.float64)


def _x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives(cell):
    rnn = _build(cell, backend="reference")
    x = _x(3, 2, C).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: rnn(x)[0], x, fast_mode=True)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("options", [{}, {"recompute_steps": 2, "zoneout": 0.2}], ids=["plain", "segments"])
def test_second_derivatives_are_those_of_the_loop(cell, options):
    """With padding, resets, noise and a carried state, after a change in place."""
    mask, resets = torch.ones(T, B, dtype=torch.bool), torch.zeros(T, B, dtype=torch.bool)
    mask[3:, 1], resets[2, 0], found = False, True, []
    for backend in ("reference", None):
        rnn, x = _build(cell, backend=backend, **options).train(), _x(T, B, C).requires_grad_()
        hx = tuple(_x(1, B, size) for size in rnn.stack.state_sizes)
        sources = [x, *rnn.parameters()]
        torch.manual_seed(0)
        _, state = rnn(x, hx if len(hx) > 1 else hx[0], mask=mask, resets=resets)
        y, _ = rnn(x, state, mask=mask, resets=resets)
        y += 1.0
        first = torch.autograd.grad(y.square().sum(), sources, create_graph=True)
        loss = sum(gradient.square().sum() for gradient in first)
        found.append([*first, *torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"recompute_steps": 2}, {}], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "ln_hyperlstm", "hyperrhn"])
def test_weights_frozen_between_a_pass_and_its_backward(cell, options):
    """As where a discriminator is frozen for the generator's turn."""
    found = []
    for before, after in ((True, True), (True, False), (False, True)):
        rnn, x = _build(cell, **options).requires_grad_(before), _x(T, B, C).requires_grad_()
        loss = rnn(x)[0].square().sum()
        rnn.requires_grad_(after)
        (dx,) = torch.autograd.grad(loss, x, create_graph=not options)
        found.append(dx if options else torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-12)


def test_operations_name_the_cure_of_second_derivatives():
    cell, x = build_cell("lstm", C, H), torch.randn(T, B, C, requires_grad=True)
    y, _ = cell.run_pass(x, cell.zero_state(B), None, None, None, backends.make_plan("aten"))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UsageError, match='second derivatives give the cell or layer backend="reference"'):
        gradient.square().sum().backward()


@pytest.mark.parametrize(
    "cell, options",
    [
        *((cell, {}) for cell in CELLS),
        ("hyperlstm", {"hyper_rank": 2}),
        ("hyperrhn", {"hyper_rank": 2}),
        ("lstm", {"recompute_steps": 2}),
    ],
)
def test_per_sample_gradients_of_torch_func(cell, options):
    rnn, x_BTC = _build(cell, **options), _x(B, T, C)
    parameters = dict(rnn.named_parameters())

    def loss(parameters, x_TC):
        return functional_call(rnn, parameters, (x_TC,))[0].square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x_BTC)
    for b, x_TC in enumerate(x_BTC):
        rnn.zero_grad()
        rnn(x_TC)[0].square().sum().backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(each[name][b], parameter.grad, rtol=0, atol=1e-12)


def test_lengths_of_each_sample():
    rnn, lengths = _build("ln_lstm"), torch.tensor([[5], [3], [1]])
    found = vmap(lambda x_TC, n: rnn(x_TC.unsqueeze(1), lengths=n)[0], in_dims=(1, 0))(_x(T, B, C), lengths)
    expected = rnn(_x(T, B, C), lengths=lengths[:, 0])[0]
    torch.testing.assert_close(found.squeeze(2).transpose(0, 1), expected, rtol=0, atol=1e-13)


def test_vmap_draws_noise_for_each_sample():
    rnn, x_TC = _build("lstm", zoneout=0.5, gal_dropout=0.5, recurrent_dropout=0.5), _x(T, C)
    x_BTC = torch.stack([x_TC, x_TC])

    def outputs(randomness):
        torch.manual_seed(0)
        return vmap(grad(lambda x: rnn(x)[0].sum()), randomness=randomness)(x_BTC)

    # Rows of one product may be summed in different orders. Measured: 1.1e-16.
    torch.testing.assert_close(*outputs("same"), rtol=0, atol=1e-12)
    assert not torch.equal(*outputs("different"))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_forward_mode_derivatives(cell, trained):
    rnn, x, tangent = _build(cell).requires_grad_(trained), _x(T, B, C), _x(1, B, C)
    with forward_ad.dual_level():
        derivative = forward_ad.unpack_dual(rnn(forward_ad.make_dual(x, tangent.expand_as(x)))[0]).tangent
    step = 1e-6
    difference = (rnn(x + step * tangent)[0] - rnn(x - step * tangent)[0]) / (2 * step)
    # Measured: 2e-10, the rounding of the difference.
    torch.testing.assert_close(derivative, difference.detach(), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "inner, kind", [("scaling", "forward"), ("hyper", "forward"), ("scaling", "backward")]
)
def test_hooks_on_inner_modules_run_at_every_step(inner, kind):
    rnn, calls = _build("ln_hyperlstm"), []
    x = _x(T, B, C).requires_grad_()
    expected, _ = rnn(x)
    module = getattr(rnn.stack.cells[0], inner)
    register = module.register_forward_hook if kind == "forward" else module.register_full_backward_hook
    handle = register(lambda *arguments: calls.append(arguments))
    y, _ = rnn(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    y.sum().backward()
    assert len(calls) == T
    handle.remove()
    rnn(x)
    assert len(calls) == T


def test_backward_hooks_that_would_never_run_are_refused():
    rnn = _build("ln_hyperlstm")
    rnn.stack.cells[0].hyper.register_full_backward_hook(print)
    with pytest.raises(UsageError, match='inner LSTM would see no gradient; with backend="reference"'):
        rnn(_x(T, B, C))


def test_pruning_an_inner_cell_is_refused():
    rnn = _build("hyperlstm")
    prune.random_unstructured(rnn.stack.cells[0].hyper, "weight_x", 0.5)
    with pytest.raises(UsageError, match="a forward pre-hook on an inner LSTM, as torch.nn.utils.prune"):
        rnn(_x(T, B, C))


def test_a_pruned_cell_follows_its_weights():
    cell = _build("hyperlstm").stack.cells[0]
    prune.random_unstructured(cell, "weight_x", 0.5)
    before = cell(_x(T, B, C))[0]
    with torch.no_grad():
        cell.weight_x_orig.mul_(2)
    assert (cell(_x(T, B, C))[0] - before).abs().max() > 1e-3


@pytest.mark.parametrize("cell, weights", [("rhn", "weight_s"), ("hyperrhn", "hyper.weight_s")])
def test_a_pruned_list_follows_its_weights(cell, weights):
    """A list of weights is never called, so torch would not run what prunes it."""
    rnn, x = _build(cell), _x(T, B, C)
    pruned = rnn.stack.cells[0].get_submodule(weights)
    prune.l1_unstructured(pruned, "0", 0.5)
    for _ in range(2):
        with torch.no_grad():
            pruned.get_parameter("0_orig").mul_(2)
        y = rnn(x)[0]
        plain = _build(cell)
        matrix = plain.stack.cells[0].get_submodule(weights)[0]
        with torch.no_grad():
            matrix.copy_(pruned.get_parameter("0_orig") * pruned.get_buffer("0_mask"))
        torch.testing.assert_close(y, plain(x)[0], rtol=0, atol=1e-13)
        (gradient,) = torch.autograd.grad(plain(x)[0].sum(), matrix)
        (found,) = torch.autograd.grad(y.sum(), pruned.get_parameter("0_orig"))
        torch.testing.assert_close(found, gradient * pruned.get_buffer("0_mask"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", ["lstm", "ln_lstm", "hyperrhn", "hyperlstm"])
def test_batched_gradients(cell):
    ranks = {"hyper_rank": 2} if "hyper_rank" in cell_options(cell) else {}
    rnn, x = _build(cell, num_layers=2, bidirectional=True, **ranks), _x(T, B, C)

    def last(x):
        return rnn(x, lengths=[T, 3, 1])[0][-2, 0]

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(last, x, vectorize=True), jacobian(last, x), rtol=0, atol=1e-12)


def _replica(module):
    """What torch.nn.DataParallel makes of a module on another GPU: its weights are plain tensors."""
    copies = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        copy = copies[id(part)]
        for name, child in part._modules.items():
            setattr(copy, name, copies[id(child)])
        for name, weight in part._parameters.items():
            setattr(copy, name, weight * 1.0)
    return copies[id(module)]


def test_replicas_of_data_parallel():
    rnn, x = _build("hyperrhn"), _x(T, B, C).requires_grad_()
    replica, found = _replica(rnn), []
    for module in (rnn, replica):
        y, state = module(x, module.zero_state(B))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append((y, *state, *torch.autograd.grad(slope.square().sum(), rnn.parameters())))
        assert module(x[:, :0])[0].shape == (T, 0, H)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_jit_trace(cell):
    rnn = _build(cell).eval()
    traced = torch.jit.trace(rnn, (_x(T, B, C),))
    x = torch.randn(T, B, C, dtype=torch.float64)
    torch.testing.assert_close(traced(x), rnn(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("cell", ["hyperrhn", "hyperrnn"])
def test_hooks_on_the_hypernetwork_run(cell):
    rnn, shapes = _build(cell), []
    inner = rnn.stack.cells[0].hyper
    inner.register_forward_hook(lambda module, inputs, output: shapes.append(output[0].shape))
    rnn(_x(T, B, C))
    # HyperRHN's hypernetwork runs over the whole sequence before the main network.
    assert shapes == ([(T, B, 7 * 3)] if cell == "hyperrhn" else [(B, 3)] * T)
    assert inner.forward.__func__ is type(inner).forward


@pytest.mark.skipif(native.library() is None, reason="needs the compiled kernels")
def test_forced_backends_that_cannot_say_so_in_one_line():
    cell = build_cell("hyperlstm", C, H, hyper_size=3)
    cell.scaling.register_forward_hook(print)
    with policy.using(kernel="native"), pytest.raises(UsageError) as error:
        cell(torch.randn(T, B, C))
    assert str(error.value) == (
        "RHHN_KERNEL=native: HyperLSTM runs on reference only; a hook on 'scaling' needs the loop over the "
        'cell\'s step, backend="reference"'
    )


@pytest.mark.parametrize("cell", ["lstm", "ln_hyperlstm", "hyperrhn"])
def test_fake_tensors(cell):
    with FakeTensorMode():
        rnn = layer_of(cell)(C, 12, 2, bidirectional=True)
        y, _ = rnn(torch.randn(T, B, C))
        y.sum().backward()
    assert y.shape == (T, B, 24) and next(rnn.parameters()).grad is not None


def test_a_symbolic_trace_has_the_layer_as_a_leaf():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = _build("hyperlstm"), nn.Linear(H, 2, dtype=torch.float64)

        def forward(self, x, lengths):
            y, state, scaling = self.rnn(x, lengths=lengths, return_scaling=True)
            return self.out(y), state[1], scaling[0]

    tagger, x, lengths = Tagger(), _x(T, B, C), torch.tensor([2, 5, 3])
    traced = torch.fx.symbolic_trace(tagger)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["rnn", "out"]
    assert all(map(torch.equal, traced(x, lengths), tagger(x, lengths)))


ON_META = f"""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rhhn_fairseq.nn import layer_of
torch.manual_seed(0)
rnn, expected = (layer_of("ln_lstm")({C}, {H}, 2, bias=False, device=device) for device in ("meta", "cpu"))
if SHARDED:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    fully_shard(rnn, mesh=init_device_mesh("cpu", (1,)))
rnn.to_empty(device="cpu")
torch.manual_seed(0)
rnn.reset_parameters()
x = torch.randn({T}, {B}, {C})
print(torch.equal(rnn(x)[0], expected(x)[0]))
"""


def test_a_pass_on_meta_has_shapes():
    rnn = layer_of("ln_hyperlstm")(C, H, hyper_size=3, device="meta")
    y, _ = rnn(torch.empty(T, B, C, device="meta"))
    y.sum().backward()
    assert y.shape == (T, B, H) and rnn.stack.cells[0].weight_h.grad.shape == (H, 4 * H)


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_of_a_module_on_meta_are_initialised(sharded):
    """In a process of its own: one that has sharded a module hangs when another thread of it forks, because
    torch's thread-local cache of DTensors then destroys the process group in the child."""
    done = python(f"SHARDED = {sharded}{ON_META}")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("cell", ["gru", "ln_hyperlstm", "hyperrhn"])
def test_autocast_keeps_state_and_gradients_in_float32(cell):
    rnn, x = _build(cell).float(), _x(T, B, C).float()
    exact, _ = rnn(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = rnn(x)
    y.float().sum().backward()
    entries = state if isinstance(state, tuple) else (state,)
    assert {tensor.dtype for tensor in (*entries, *(p.grad for p in rnn.parameters()))} == {torch.float32}
    # bfloat16 has eight bits; the outputs are of the order of 1.
    assert 0 < (y.float() - exact).abs().max() < 0.02


class DrawnWeights(nn.Module):
    """A parametrization that draws another weight each time."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, weight):
        self.drawn.append(weight * (torch.rand_like(weight) < 0.5))
        return self.drawn[-1]


@pytest.mark.parametrize("cell, inner", [("lstm", ""), ("ln_hyperlstm", "hyper"), ("mogrifier_lstm", "")])
def test_a_parametrization_computes_a_weight_once_a_pass(cell, inner):
    rnn, x = _build(cell), _x(T, B, C)
    owner, operation = rnn.stack.cells[0].get_submodule(inner), rnn.stack.cells[0].operation
    for parameter in rnn.parameters():
        # Hypernetworks start without an effect.
        nn.init.normal_(parameter, std=0.5)
    expected, made = copy.deepcopy(rnn), DrawnWeights()
    parametrize.register_parametrization(owner, "weight_h", made)
    assert rnn.stack.cells[0].operation == operation
    made.drawn.clear()
    y, _ = rnn(x)
    (weight,) = made.drawn
    expected.stack.cells[0].get_submodule(inner).weight_h.data.copy_(weight)
    torch.testing.assert_close(y, expected(x)[0], rtol=0, atol=1e-12)
    y.sum().backward()
    assert owner.parametrizations.weight_h.original.grad.abs().sum() > 0


def test_second_derivatives_reach_a_weight_that_was_computed():
    cell, x = build_cell("lstm", C, H).double(), _x(T, B, C)
    source = cell.weight_h.detach().clone().requires_grad_()
    del cell.weight_h
    cell.weight_h = 2 * source
    loss = cell(x)[0].sum()
    (first,) = torch.autograd.grad(loss, source, create_graph=True)
    assert first.requires_grad
    torch.testing.assert_close(first, torch.autograd.grad(cell(x)[0].sum(), source)[0])


DISTRIBUTED = f"""
import copy, os, torch
from torch.nn.parallel import DistributedDataParallel
from rhhn_fairseq.nn import layer_of
other = os.fork()
RANK = int(other == 0)

def compare():
    store = torch.distributed.FileStore(STORE, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    torch.manual_seed(0)
    x, mine = torch.randn({T}, 4, {C}), slice(2 * RANK, 2 * RANK + 2)
    for cell, options in (
        ("ln_hyperlstm", dict(num_layers=2, bidirectional=True)),
        ("hyperrhn", dict(first_step="skip")),
        ("rhn", dict(initial_state="learned")),
    ):
        alone = layer_of(cell)({C}, {H}, **options)
        shared = DistributedDataParallel(copy.deepcopy(alone))
        # Twice: after a pass without a gradient for a parameter the second would raise.
        for _ in range(2):
            alone(x)[0].square().mean().backward()
            shared(x[:, mine])[0].square().mean().backward()
        for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-8)

if RANK:
    status = 1
    try:
        compare()
        status = 0
    finally:
        os._exit(status)
compare()
print(os.waitpid(other, 0)[1])
"""


def test_two_workers_have_the_gradients_of_one(tmp_path):
    done = python(f"STORE = {str(tmp_path / 'store')!r}{DISTRIBUTED}")
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    "cell",
    [
        *("gru", "hyperrhn", "mingru"),
        *(pytest.param(cell, marks=pytest.mark.slow) for cell in ("ln_lstm", "hyper", "hyperlstm")),
    ],
)
def test_compiling_warns_of_nothing(cell, monkeypatch):
    monkeypatch.setattr(policy, "current", CURRENT)
    torch._dynamo.reset()
    x = _x(T, B, C).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(_build(cell, lstm_state=False), backend="aot_eager", fullgraph=True)(x)[
            0
        ].sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_backward_pass_of_compiled_code_leaves_the_state_alone(monkeypatch):
    """torch's inductor let it write into the returned c of a NAS cell, which the next chunk starts from."""
    monkeypatch.setattr(policy, "current", CURRENT)
    torch._dynamo.reset()
    x = _x(1, B, C).requires_grad_()
    y, state = torch.compile(_build("nas"), fullgraph=True)(x)
    before = [entry.detach().clone() for entry in state]
    sum((entry * entry.cos()).sum() for entry in (y, *state)).backward()
    for entry, value in zip(state, before, strict=True):
        assert torch.equal(entry, value)
