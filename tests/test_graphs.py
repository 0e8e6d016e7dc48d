"""Which calls are recorded and replayed as CUDA graphs, and that no value outlives its call.

On the CPU graphs are imitated, see graph_imitation.py.
"""

import pytest
import torch
from graph_imitation import count, imitate, imitated_graphs

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import graphs


@pytest.fixture
def recordings(monkeypatch):
    """Graphs are wanted, and imitated on the CPU."""
    monkeypatch.setenv(graphs.VARIABLE, "1")
    return imitated_graphs(monkeypatch)


CELLS = {
    "ln_lstm": dict(zoneout=0.1),
    "ln_hyperlstm": dict(hyper_size=3, hyper_embed_size=2, recurrent_dropout=0.3),
    "hyperrhn": dict(hyper_size=3, rhn_depth=2, recurrent_dropout=0.3),
}


def _cell(name):
    torch.manual_seed(0)
    return build_cell(name, 4, 5, **CELLS[name]).double()


def _losses(cell, batches):
    """Gradients accumulated over batches whose forwards all run before the first backward."""
    cell.zero_grad()
    losses, outputs = [], []
    for x, mask in batches:
        torch.manual_seed(1)
        y, state = cell(x, None, mask)
        outputs += [y, *state]
        losses.append(y.square().sum() + sum(part.sum() for part in state))
    for loss in reversed(losses):
        loss.backward()
    return [part.detach() for part in outputs], [p.grad.clone() for p in cell.parameters()]


@pytest.mark.parametrize("name", CELLS)
def test_calls_that_interleave_keep_their_values(name, recordings, monkeypatch):
    cell = _cell(name).train()
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    batches = [(torch.randn(3, 2, 4, dtype=torch.float64), m) for m in (None, mask, None, mask, None, mask)]
    found = _losses(cell, batches)
    assert count(recordings) >= 4
    monkeypatch.setenv(graphs.VARIABLE, "0")
    for one, other in zip(found, _losses(cell, batches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_activation_checkpointing(recordings, monkeypatch):
    cell = _cell("ln_lstm").eval()
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)

    def gradient():
        y = x
        for _ in range(3):
            y = torch.utils.checkpoint.checkpoint(lambda z: cell(z[..., :4])[0], y, use_reentrant=False)
        return torch.autograd.grad(y.square().sum(), [x, *cell.parameters()])

    found = gradient()
    assert count(recordings) == 2
    monkeypatch.setenv(graphs.VARIABLE, "0")
    torch.testing.assert_close(found, gradient(), rtol=0, atol=1e-13)


def test_layers_of_one_shape_share_recordings_and_other_shapes_do_not(recordings):
    first, second = _cell("ln_lstm"), _cell("ln_lstm")
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        first.eval()(x)
        assert count(recordings) == 0
        second.eval()(x)
        assert count(recordings) == 1
        for _ in range(2):
            first(x[:2])
        assert count(recordings) == 2
        for _ in range(2):
            first(x, None, torch.ones(3, 2, dtype=torch.bool))
        assert count(recordings) == 3


def test_the_least_recently_used_recording_goes():
    settled = []

    def record(call, values):
        recording = imitate(call, values)
        recording.settle = lambda: settled.append(len(values))
        return recording

    recordings = graphs.Recordings(record, limit=2)

    def run(n):
        values = [torch.full((1,), float(n))] * n
        (total,) = recordings.run(n, lambda tensors: (sum(tensors),), values)
        assert total == n * n

    for n in (1, 1, 2, 2, 1, 3):
        run(n)
    assert settled == []
    run(3)
    assert settled == [2]
    for n in range(4, 300):
        run(n)
    assert len(recordings.kept) <= 200 and settled == [2, 1, 3]


def test_arguments_fall_into_values_and_key():
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(2)
    args = (a, None, [b, c], [0.5, 1.0], "aten", [])
    assert [id(value) for value in graphs.tensors_of(args)] == [id(a), id(b), id(c)]
    others = [torch.zeros(2), torch.zeros(3), torch.zeros(2)]
    again = graphs.with_tensors(args, others)
    assert again[0] is others[0] and again[2][1] is others[2]
    assert again[1] is None and again[3:] == [[0.5, 1.0], "aten", []]
    assert graphs.key_of(args) == graphs.key_of(again)
    hash(graphs.key_of(args))
    for other in (
        (a, b, [b, c], [0.5, 1.0], "aten", []),
        (a, None, [b, c], [0.5, 2.0], "aten", []),
        (a.double(), None, [b, c], [0.5, 1.0], "aten", []),
        (a, None, [b], [0.5, 1.0], "aten", []),
    ):
        assert graphs.key_of(args) != graphs.key_of(other)


def test_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv(graphs.VARIABLE, raising=False)
    assert not graphs.wanted()
    monkeypatch.setenv(graphs.VARIABLE, "1")
    assert graphs.wanted()
    # On the CPU the request changes nothing.
    assert not graphs.applies([torch.ones(1)])
    monkeypatch.setenv(graphs.VARIABLE, "yes")
    with pytest.raises(UsageError, match="RHHN_CUDA_GRAPHS=yes is unknown, choose from 0, 1"):
        graphs.wanted()


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream(monkeypatch):
    x, before = torch.ones(3, device="cuda"), torch.cuda.current_stream()
    # A value cannot leave the device meanwhile.
    with pytest.raises(RuntimeError):
        graphs.record(lambda values: (values[0] * values[0].sum().item(),), [x])
    assert torch.cuda.current_stream() == before
    assert graphs.record(lambda values: (values[0] * 2,), [x])([x])[0].tolist() == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CELLS)
def test_graphs_on_a_gpu_equal_the_loop(name, monkeypatch):
    monkeypatch.setenv(graphs.VARIABLE, "1")
    recordings = graphs.Recordings(graphs.record)
    monkeypatch.setattr(graphs, "_recordings", recordings)
    cell = _cell(name).cuda().train()
    batches = [(torch.randn(3, 2, 4, dtype=torch.float64, device="cuda"), None) for _ in range(4)]
    found = _losses(cell, batches)
    assert count(recordings) >= 2
    monkeypatch.setenv(graphs.VARIABLE, "0")
    for one, other in zip(found, _losses(cell, batches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
