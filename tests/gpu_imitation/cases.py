"""The imitated GPU, and models on it beside the same on the CPU; run by test_imitated_gpu.py."""

import math

import imitated_gpu
import pytest
import torch
from fairseq import utils
from fairseq.optim.adam import FairseqAdam
from fairseq.optim.amp_optimizer import AMPOptimizer
from helpers import tiny_char_lm, training_batches
from helpers.fused_cells import FUSED_CELLS
from omegaconf import OmegaConf

from rhhn_fairseq import plugin as compat
from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.cells.registry import CELLS
from rhhn_fairseq.ops import backends, policy
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.tasks.carry import Carry, gather_states

pytestmark = pytest.mark.gpu  # As the cases of other files that run beside these.

# ---- What is imitated ----


@pytest.fixture
def graph():
    """Captures a function of no arguments; the graph and what the function gave."""

    def capture(function, beside=None):
        found = torch.cuda.CUDAGraph()
        with torch.cuda.graph(found, pool=None if beside is None else beside.pool()):
            results = function()
        return found, results

    return capture


def test_a_tensor_of_the_host_is_refused():
    x = torch.ones(3, device="cuda")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([x, torch.ones(3)])
    with pytest.raises(TypeError):
        x.numpy()


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_a_capture_refuses_what_makes_the_host_wait(ask, graph):
    x = torch.ones(3, device="cuda")
    ask(x)
    with pytest.raises(RuntimeError, match="capturing"):
        graph(lambda: ask(x))
    assert not torch.cuda.is_current_stream_capturing()


def test_a_replay_reads_and_writes_where_the_capture_did(graph):
    x = torch.ones(3, device="cuda")
    found, y = graph(lambda: torch.cat([x, x]).mul_(2).relu())
    x.fill_(5)
    assert y.tolist() == [2] * 6
    found.replay()
    assert y.tolist() == [10] * 6


def test_graphs_of_a_pool_share_what_is_freed(graph):
    x = torch.ones(3, device="cuda")
    first, y = graph(lambda: x + 1)
    kept = y.data_ptr()
    del y
    second, z = graph(lambda: x + 2, beside=first)
    assert z.data_ptr() == kept
    first.replay()
    assert z.tolist() == [2, 2, 2]
    other, u = graph(lambda: x + 3)
    assert u.data_ptr() != kept and other.pool() != first.pool() == second.pool()


def test_a_replay_that_reaches_memory_that_is_gone(graph, capfd):
    inputs = [torch.ones(300, device="cuda")]
    found, _ = graph(lambda: inputs[0] + 1)
    found.replay()
    inputs.clear()
    with pytest.raises(RuntimeError, match="replay failed"):
        found.replay()
    assert "aten::add.out reaches memory that is gone" in capfd.readouterr().err


def test_the_end_of_a_graph_takes_the_work_space_of_its_stream(capfd):
    """As cuBLAS's; unless it is of the graph's own pool."""
    x, side = torch.ones(8, 8, device="cuda"), torch.cuda.Stream()
    for own in (False, True):
        found = []
        with torch.cuda.stream(side):
            x @ x
        for _ in range(2):
            if own:
                torch._C._cuda_clearCublasWorkspaces()
            found.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(found[-1], stream=side):
                y = x @ x
            if own:
                torch._C._cuda_clearCublasWorkspaces()
        del found[0]
        if own:
            found[0].replay()
            assert y.tolist() == [[8] * 8] * 8
        else:
            with pytest.raises(RuntimeError, match="replay failed"):
                found[0].replay()
            assert "aten::mm.out reaches memory that is gone" in capfd.readouterr().err


def test_new_memory_holds_no_numbers():
    assert all(math.isnan(number) for number in torch.empty(3, device="cuda").tolist())


# ---- Recordings ----


def test_recordings_that_stay_when_another_goes(monkeypatch):
    """Its work space goes, not theirs; and its memory, if all go."""
    recordings = graphs.Recordings(graphs.record, limit=2)
    w = torch.ones(64, 64, device="cuda")

    def run(rows):
        (y,) = recordings.run(
            "here", rows, lambda tensors: (tensors[0] @ w,), [torch.ones(rows, 64, device="cuda")]
        )
        assert y.eq(64).all()

    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    for rows in (2, 2, 3, 3, 2, 3):
        run(rows)
    assert len(recordings.kept) == 2
    assert min(recording.kernels for recording in recordings.kept.values()) == imitated_gpu.NODE
    other = graphs.record(lambda tensors: (tensors[0] @ w,), [w])
    del other
    for rows in (2, 3):
        run(rows)
    recordings._let_go()
    assert not recordings.kept and torch.cuda.memory_allocated() == before
    assert imitated_gpu.CUDAGraph.nodes == 0
    for rows in (2, 2, 2):
        run(rows)


# ---- Models on it ----


def test_a_model_goes_on_from_a_checkpoint_of_the_cpu(char_task):
    model, _, sample = training_batches.char_lm("ln_lstm", char_task)
    model, tokens, carry = model.cuda(), sample["net_input"]["src_tokens"].cuda(), Carry()
    model.eval()
    model(tokens, carry=carry.open(0))
    expected, _ = model(tokens, carry=carry.open(1))
    model(tokens, carry=(begun := Carry()).open(0))
    resumed = Carry(0, tuple(gather_states([begun], 1)[0]))
    found, _ = model(tokens, carry=resumed.open(1))
    assert found.is_cuda and torch.equal(found, expected)


def test_a_criterion_that_nobody_moves():
    """As in fairseq-validate."""
    model, criterion, sample = training_batches.problem("copying")
    _, _, expected = criterion(model.eval(), sample)
    _, _, found = criterion(model.cuda(), utils.move_to_cuda(sample))
    assert found["counted"] == expected["counted"] and found["correct"].item() == expected["correct"].item()


def test_amp_divides_by_the_scale_once():
    compat.apply()
    weight = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    config = {"optimizer": {"lr": [0.1], "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-8, "weight_decay": 0.0}}
    config["optimizer"] |= {"use_old_adam": True, "fp16_adam_stats": False, "_name": "adam"}
    config = OmegaConf.create(
        config
        | {
            "common": {
                "fp16_init_scale": 4,
                "amp_init_scale": 128,
                "amp_scale_window": 9,
                "min_loss_scale": 1e-4,
                "tpu": False,
            }
        }
    )
    adam = FairseqAdam(config.optimizer, [weight])
    optimizer = AMPOptimizer(config, [weight], adam)
    factors = torch.arange(1.0, 5.0, device="cuda")
    optimizer.backward((weight * factors).sum())
    assert weight.grad.tolist() == [128, 256, 384, 512]
    assert optimizer.scaler.get_growth_interval() == 9
    norm = optimizer.clip_grad_norm(0.0)
    assert norm.item() == pytest.approx(30**0.5)
    optimizer.step()
    (state,) = adam.optimizer.state.values()
    torch.testing.assert_close(state["exp_avg"], 0.1 * factors)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_gradients_without_training(name):
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        cell, x = build_cell(name, 3, 4).double().eval().to(device), torch.randn(5, 2, 3, dtype=torch.float64)
        y, _ = cell(x.to(device))
        y.square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in cell.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype, cudnn", [(torch.float16, True), (torch.bfloat16, False), (None, True)])
def test_autocast_and_cudnn(dtype, cudnn):
    """Which rounds to float16 under any autocast."""
    cell = build_cell("lstm", 3, 4).cuda()
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        x = torch.randn(5, 2, 3, device="cuda")
        assert (backends.select(cell.request(x)).backend == "torch_nn") == cudnn
        y, _ = cell(x)
    assert y.dtype == (dtype or torch.float32)


def _pass(model, criterion, sample):
    """Loss and gradients of one pass in training, with dropout of a seed."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = criterion(model, sample)[0]
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [part.detach().cpu() for part in (loss, *gradients) if part is not None]


def _assert_as_on_the_host(model, criterion, sample, monkeypatch):
    """Three passes with graphs, of which the third is a replay, beside one of the CPU."""
    model.train().double()
    sample = utils.apply_to_sample(lambda x: x.double() if x.is_floating_point() else x, sample)
    # Their noise is drawn on the device, here by the host's generators: the same for both.
    expected = _pass(model, criterion, sample)
    on_gpu = model.cuda(), criterion.cuda(), utils.move_to_cuda(sample)
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    before = imitated_gpu.CUDAGraph.replays
    for _ in range(3):
        found = _pass(*on_gpu)
        for one, other in zip(found, expected, strict=True):
            # Of float64 models, whose criteria compute in float32: measured up to 1.2e-7.
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    return imitated_gpu.CUDAGraph.replays - before


@pytest.mark.parametrize("cell", CELLS)
def test_char_lm(cell, char_task, monkeypatch):
    """Each by its best operation; the loops that the fused cells share with the others run in those."""
    fused = CELLS[cell].cell in FUSED_CELLS
    monkeypatch.setenv("RHHN_KERNEL", "aten" if fused else "reference")
    replays = _assert_as_on_the_host(*training_batches.char_lm(cell, char_task), monkeypatch)
    assert (replays > 0) == fused


@pytest.fixture(scope="module")
def char_task(tmp_path_factory):
    return tiny_char_lm.build_task(tiny_char_lm.write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.mark.parametrize("problem", ["copying", "digits"])
def test_problems(problem, monkeypatch):
    _assert_as_on_the_host(*training_batches.problem(problem), monkeypatch)


@pytest.mark.parametrize("window", [0, 2])
def test_handwriting(window, monkeypatch):
    _assert_as_on_the_host(*training_batches.handwriting(window), monkeypatch)


@pytest.mark.parametrize(
    "cell, attention", [("lstm", "paper"), ("ln_hyperlstm", "v2"), ("hyperrhn", "paper")]
)
def test_translation(cell, attention, monkeypatch):
    _assert_as_on_the_host(*training_batches.translation(cell, attention), monkeypatch)
