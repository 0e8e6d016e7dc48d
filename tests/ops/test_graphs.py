"""Which calls are recorded and replayed as CUDA graphs, at which lengths; that no value outlives its call.

On the CPU graphs are imitated, see graph_imitation.py.
"""

import logging

import pytest
import torch
from helpers.graph_imitation import count, imitate, imitated_graphs

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import library, policy
from rhhn_fairseq.ops.backends import graphs, lengths


@pytest.fixture
def recordings(monkeypatch):
    """Graphs are wanted, and imitated on the CPU."""
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    return imitated_graphs(monkeypatch)


CELLS = {
    "ln_lstm": dict(zoneout=0.1, h_detach=0.3),
    "ln_hyperlstm": dict(hyper_size=3, hyper_embed_size=2, recurrent_dropout=0.3),
    "hyperrhn": dict(hyper_size=3, rhn_depth=2, recurrent_dropout=0.3, first_step="skip"),
    "elman": {},
}
RECORDED = ("ln_lstm", "ln_hyperlstm", "hyperrhn")


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


@pytest.mark.parametrize("name", RECORDED)
def test_calls_that_interleave_keep_their_values(name, recordings, monkeypatch):
    cell = _cell(name).train()
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    batches = [(torch.randn(3, 2, 4, dtype=torch.float64), m) for m in (None, mask, None, mask, None, mask)]
    found = _losses(cell, batches)
    assert count(recordings) >= 4
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    for one, other in zip(found, _losses(cell, batches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


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


def _numbers_recorded(size=1, kernels=0, **bounds):
    """A function that runs a call of n values of ``size`` numbers, and the list of recordings that went."""
    settled = []

    def record(call, values, beside):
        recording = imitate(call, values)
        recording.settle, recording.kernels = lambda: settled.append(len(values)), kernels
        return recording

    recordings = graphs.Recordings(record, **bounds)

    def run(n):
        values = [torch.full((size,), float(n))] * n
        (total,) = recordings.run("here", n, lambda tensors: (sum(tensors),), values)
        assert total[0] == n * n

    return run, settled, recordings


def test_calls_without_room_run_as_they_are(caplog, monkeypatch):
    monkeypatch.setattr(graphs, "KEYS", 50)
    run, settled, recordings = _numbers_recorded(limit=2)
    with caplog.at_level(logging.INFO):
        for n in (1, 1, 2, 2, 3, 3, 4, 4):
            run(n)
    assert settled == [] and {what for _, what in recordings.kept} == {1, 2}
    assert [record.message for record in caplog.records] == [
        "the limit of CUDA graphs is reached (2 graphs, 0.0 GB); other calls run without graphs"
    ]
    for n in range(4, 60):
        run(n)
    assert len(recordings.met) == graphs.KEYS and count(recordings) == 2


def test_recordings_take_a_share_of_the_memory():
    # A recording of n values has n inputs and an output of 400 bytes each, and what the driver takes.
    run, settled, recordings = _numbers_recorded(size=100, share=0.5, memory=lambda: 8000, kernels=400)
    for n in (1, 1, 2, 2, 3, 3):
        run(n)
    assert settled == [] and recordings.size == 12 * 400
    for n in (4, 4):
        run(n)
    # With less than 4000 bytes it would have been made.
    assert {what for _, what in recordings.kept} == {1, 2, 3}


def test_recordings_that_are_not_replayed_make_room(monkeypatch):
    monkeypatch.setattr(graphs, "PATIENCE", 4)
    run, settled, recordings = _numbers_recorded(limit=2)
    for n in (1, 1, 2, 2):
        run(n)
    # Refused four times, but replayed as often.
    for n in (1, 3, 2, 3, 1, 3, 2, 3, 3):
        run(n)
    assert settled == [] and {what for _, what in recordings.kept} == {1, 2}
    # Now the third is most of what comes.
    for n in (3, 1, 3, 3, 3):
        run(n)
    assert settled == [1, 2] and {what for _, what in recordings.kept} == {3}
    # If that recurs, it recurs half as often.
    for n in (4, 4, *[5] * 8):
        run(n)
    assert {what for _, what in recordings.kept} == {3, 4}
    run(5)
    assert settled == [1, 2, 3, 4] and {what for _, what in recordings.kept} == {5}


def test_a_recording_that_fails_leaves_none(recordings):
    """What a capture has left in the memory that they share is unknown."""

    def fails(tensors):
        raise RuntimeError("illegal access")

    for what in (1, 1):
        recordings.run("here", what, lambda tensors: tensors, [torch.ones(1)])
    assert count(recordings) == 1
    recordings.met["here", 2] = None
    with pytest.raises(RuntimeError, match="illegal access"):
        recordings.run("here", 2, fails, [torch.ones(1)])
    assert count(recordings) == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["allocator", "driver", "cublas"],
)
def test_without_memory_for_a_recording_the_call_runs(recordings, error):
    tried = []

    def record(call, values, beside):
        tried.append(len(values))
        raise error

    recordings.record = record
    for _ in range(4):
        (found,) = recordings.run("here", 1, lambda tensors: tensors, [torch.ones(1)])
        assert found.item() == 1
    assert tried == [1] and count(recordings) == 0


def test_recordings_make_room_for_a_call(recordings):
    """A call that finds no memory runs again without them; a second failure is the caller's."""
    tries = []

    def hungry(tensors):
        tries.append(count(recordings))
        if count(recordings):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tensors

    for _ in range(2):
        recordings.run("here", 1, lambda tensors: tensors, [torch.ones(1)])
    (y,) = recordings.run("here", 2, hungry, [torch.ones(1)])
    assert y.item() == 1 and tries == [1, 0] and recordings.size == 0

    def starving(tensors):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        recordings.run("here", 3, starving, [torch.ones(1)])


def test_recordings_of_a_place_share_memory():
    seen = []

    def record(call, values, beside):
        seen.append(beside)
        return imitate(call, values)

    recordings = graphs.Recordings(record)
    for where, what in (("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)):
        for _ in range(3):
            recordings.run(where, what, lambda tensors: tensors, [torch.ones(1)])
    first = {where: recordings.kept[where, 1] for where in ("a", "b")}
    assert [id(found) for found in seen] == [id(x) for x in (None, None, first["a"], first["b"], first["a"])]


def test_lengths_that_others_are_filled_up_to():
    found = [lengths.graph_length(T) for T in range(1, 4097)]
    assert found[:16] == list(range(1, 17)) and found[16:24] == [18, 18, 20, 20, 22, 22, 24, 24]
    for T, length in enumerate(found, start=1):
        assert T <= length < 1.125 * T and lengths.graph_length(length) == length
    assert len({length for length in found if 1024 < length <= 2048}) == lengths.PER_DOUBLING


def test_the_first_lengths_stay_as_they_are():
    cell = torch.nn.Linear(1, 1)
    for _ in range(2):
        assert all(lengths.keeps_length(cell, T) for T in (35, 19, 35, 77, 50, 19))
        assert not any(lengths.keeps_length(cell, T) for T in (51, 49, 52, 33))
        assert lengths.keeps_length(cell, 1)
    # Another cell has its own.
    assert lengths.keeps_length(torch.nn.Linear(1, 1), 51)


@pytest.mark.parametrize("name", RECORDED)
def test_lengths_share_recordings(name, recordings, monkeypatch):
    monkeypatch.setattr(lengths, "EXACT", 0)
    cell, T = _cell(name).train(), (17, 18, 19, 20, 18, 17, 20, 19)
    batches = [(torch.randn(n, 2, 4, dtype=torch.float64), None) for n in T]
    batches += [(x, torch.rand(x.shape[:2]) < 0.7) for x, _ in batches]
    found = _losses(cell, batches)
    # Forward and backward, for two lengths, with a mask or without; a HyperRHN is two networks.
    assert count(recordings) == (8 if name == "hyperrhn" else 4)
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    # 8.5e-14 was measured, and with torch 2.6 1.4e-13 for a gradient of 166, its last digit.
    for one, other in zip(found, _losses(cell, batches), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=1e-13)


def test_autocast_ends_where_the_recording_begins(recordings, monkeypatch):
    """What an operation does in float32 is not cast, and lengths are shared as elsewhere."""
    monkeypatch.setattr(lengths, "EXACT", 0)
    seen = []
    run = recordings.run

    def watched(where, what, call, values):
        def watching(tensors):
            seen.append(torch.is_autocast_enabled("cpu"))
            return call(tensors)

        return run(where, what, watching, values)

    monkeypatch.setattr(recordings, "run", watched)
    cell = _cell("ln_hyperlstm").float().train()
    for T in (17, 18):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = cell(torch.randn(T, 2, 4))
        assert y.shape == (T, 2, 5) and y.dtype == torch.bfloat16
        y.float().sum().backward()
    assert count(recordings) > 0 and seen and not any(seen)


def test_passes_that_are_not_recorded_are_not_filled_up(recordings, monkeypatch):
    monkeypatch.setattr(lengths, "EXACT", 0)
    x = torch.randn(17, 2, 4, dtype=torch.float64)

    def read(name, backend):
        read = []
        cell = _cell(name)
        project = cell.project
        monkeypatch.setattr(cell, "project", lambda x, **gemm: read.append(len(x)) or project(x, **gemm))
        monkeypatch.setenv("RHHN_KERNEL", backend)
        y, _ = cell(x)
        assert len(y) == 17
        return read

    assert read("ln_lstm", "aten") == [18]
    assert read("ln_lstm", "reference") == read("elman", "reference") == [17]
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    assert read("ln_lstm", "aten") == [17]


def test_what_differs_besides_values_is_recorded_apart(recordings):
    def body(*arguments):
        return (sum(leaf.sum() for leaf in library.flatten(arguments)[0] if isinstance(leaf, torch.Tensor)),)

    run = graphs.captured(body)
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(2)
    for _ in range(2):
        run(a, None, [b, c], [0.5, 1.0], "aten", [])
    assert count(recordings) == 1
    (total,) = run(2 * a, None, [3 * b, c], [0.5, 1.0], "aten", [])
    assert total == 15 and count(recordings) == 1
    others = [
        (a, b, [b, c], [0.5, 1.0], "aten", []),
        (a, None, [b, c], [0.5, 2.0], "aten", []),
        (a.double(), None, [b, c], [0.5, 1.0], "aten", []),
        (a, None, [b], [0.5, 1.0], "aten", [c]),
    ]
    for number, arguments in enumerate(others):
        for _ in range(2):
            run(*arguments)
        assert count(recordings) == 2 + number


def test_on_unless_turned_off(monkeypatch):
    for gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for value, expected in ((None, gpu), ("1", True), ("0", False)):
            monkeypatch.delenv(policy.CUDA_GRAPHS, raising=False)
            if value is not None:
                monkeypatch.setenv(policy.CUDA_GRAPHS, value)
            assert policy.current().graphs == expected
        # The CPU has none.
        assert not graphs.possible(torch.device("cpu"))
    monkeypatch.setenv(policy.CUDA_GRAPHS, "yes")
    with pytest.raises(UsageError, match="RHHN_CUDA_GRAPHS=yes is unknown, choose from 0, 1"):
        policy.current()


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream(monkeypatch):
    x, before = torch.ones(3, device="cuda"), torch.cuda.current_stream()
    # A value cannot leave the device meanwhile.
    with pytest.raises(RuntimeError):
        graphs.record(lambda values: (values[0] * values[0].sum().item(),), [x])
    assert torch.cuda.current_stream() == before
    assert graphs.record(lambda values: (values[0] * 2,), [x])([x])[0].tolist() == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECORDED)
def test_graphs_on_a_gpu_equal_the_loop(name, monkeypatch):
    """For some lengths, whose recordings take their memory from one pool."""
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    monkeypatch.setattr(lengths, "EXACT", 1)
    recordings = graphs.Recordings(graphs.record)
    monkeypatch.setattr(graphs, "_recordings", recordings)
    cell = _cell(name).cuda().train()
    T = (3, 20, 3, 17, 19, 3, 20, 18, 17)
    batches = [(torch.randn(n, 2, 4, dtype=torch.float64, device="cuda"), None) for n in T]
    found = _losses(cell, batches)
    assert count(recordings) >= 6
    assert len({recording.pool for recording in recordings.kept.values() if recording is not None}) == 1
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    for one, other in zip(found, _losses(cell, batches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
