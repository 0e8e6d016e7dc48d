"""The optimizer whose clip uses the L1 norm."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import optim
from helpers.cli import fairseq_train, json_log, lstm
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.optim.adam import AdamL1


def build(params, **settings):
    config = {"_name": "adam_l1", "lr": [0.01], **settings}
    return optim.build_optimizer(OmegaConf.create(config), params)


def parameters(seed: int = 0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (5,), (1,))
    return [torch.nn.Parameter(torch.randn(s, generator=draw, dtype=dtype)) for s in shapes]


def set_gradients(params, seed: int):
    draw = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=draw, dtype=param.dtype)


def test_equals_the_written_out_update():
    """Three clipped steps in numpy: L1 norm over everything, L2 penalty, bias-corrected Adam."""
    params = parameters()
    settings = {"adam_betas": (0.8, 0.95), "adam_eps": 1e-6, "weight_decay": 0.1}
    optimizer = build(params, **settings)
    theta = np.concatenate([p.detach().numpy().ravel() for p in params])
    mean, square = np.zeros_like(theta), np.zeros_like(theta)
    for step in range(1, 4):
        set_gradients(params, seed=step)
        gradient = np.concatenate([p.grad.numpy().ravel() for p in params])
        norm = np.abs(gradient).sum()
        gradient = gradient * min(1, 2.5 / (norm + 1e-6)) + 0.1 * theta
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        corrected = np.sqrt(square / (1 - 0.95**step)) + 1e-6
        theta = theta - 0.01 * mean / (1 - 0.8**step) / corrected

        assert optimizer.clip_grad_norm(2.5).item() == pytest.approx(norm, rel=1e-14)
        optimizer.step()
        ours = np.concatenate([p.detach().numpy().ravel() for p in params])
        # The same float64 operations in another order; 2e-16 was measured.
        np.testing.assert_allclose(ours, theta, rtol=0, atol=1e-14)


def test_small_gradients_and_no_clip_are_left_alone():
    params = parameters()
    optimizer = build(params)
    for limit in (0.0, 1e6):
        set_gradients(params, seed=7)
        before = [param.grad.clone() for param in params]
        norm = optimizer.clip_grad_norm(limit)
        assert norm.item() == pytest.approx(sum(g.abs().sum().item() for g in before))
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


@pytest.mark.parametrize("betas", [(0.8, 0.95), "(0.8, 0.95)", [0.8, 0.95]])
def test_betas_from_text_and_lists(betas):
    assert build(parameters(), adam_betas=betas).param_groups[0]["betas"] == (0.8, 0.95)


@pytest.mark.parametrize("settings", [{"lr": [-1.0]}, {"adam_betas": (0.9, 1)}, {"adam_betas": "open('x')"}])
def test_impossible_values_are_refused(settings):
    with pytest.raises(ValueError, match="Invalid|malformed|learning rate"):
        build(parameters(), **settings)


def test_smallest_values_and_the_first_rate():
    group = build(parameters(), lr=[0.0, 0.1], adam_betas=(0, 0)).param_groups[0]
    assert group["lr"] == 0 and group["betas"] == (0, 0)


def test_norms_that_cannot_be_combined_are_refused():
    with pytest.raises(UsageError, match="fully_sharded"):
        build(parameters()).clip_grad_norm(1.0, aggregate_norm_fn=lambda norm: norm)


def mixed_precision_config(flat=False, **common):
    return SimpleNamespace(
        optimizer=OmegaConf.create({"_name": "adam_l1", "lr": [0.01]}),
        common=SimpleNamespace(fp16_no_flatten_grads=not flat, fp16_scale_window=1, **common),
        optimization=SimpleNamespace(update_freq=[1]),
        distributed_training=SimpleNamespace(distributed_world_size=1),
    )


@pytest.mark.parametrize("flat", [False, True])
def test_bf16_wrapper_clips_by_the_l1_norm(flat):
    """fairseq's wrapper takes the norm from the optimizer it wraps and scales by it."""
    params = parameters(dtype=torch.bfloat16)
    wrapped = optim.FP16Optimizer.build_optimizer(mixed_precision_config(flat, bf16=True), params)
    assert isinstance(wrapped.fp32_optimizer, AdamL1)
    wrapped.zero_grad()
    set_gradients(params, seed=3)
    wrapped._needs_sync = True  # What backward() sets after it has made the gradients.
    expected = sum(p.grad.float().abs().sum() for p in params)
    assert wrapped.clip_grad_norm(2.0).item() == pytest.approx(expected.item(), rel=1e-6)
    wrapped._unscale_grads()
    clipped = sum(p.grad.abs().sum() for p in wrapped.fp32_optimizer.params)
    assert clipped.item() == pytest.approx(2.0, rel=1e-5)


def test_memory_efficient_wrapper_is_refused():
    with pytest.raises(ValueError, match="Unsupported optimizer: AdamL1"):
        optim.MemoryEfficientFP16Optimizer.build_optimizer(
            mixed_precision_config(bf16=True), parameters(dtype=torch.bfloat16)
        )


def test_command_line(tiny_corpus, tmp_path):
    """--optimizer adam_l1 trains with --bf16 as well; gnorm is the L1 norm, several times the L2 norm."""
    options = ["--lr", 0.01, "--clip-norm", 0.1, "--adam-betas", "(0.8, 0.99)", "--max-update", 3]
    result = fairseq_train([*lstm(tiny_corpus, tmp_path, "--optimizer", "adam_l1"), *options, "--bf16"])
    steps = [record for record in json_log(result.stdout) if record["tag"] == "train_inner"]
    assert [step["num_updates"] for step in steps] == [1, 2, 3]
    assert all(step["gnorm"] > 0.5 and step["clip"] == 100 for step in steps)
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert saved["last_optimizer_state"]["param_groups"][0]["betas"] == (0.8, 0.99)
    assert saved["optimizer_history"][0]["optimizer_name"] == "FP16Optimizer"


def test_command_line_refuses_in_one_line(tiny_corpus, tmp_path):
    result = fairseq_train([*lstm(tiny_corpus, tmp_path, "--optimizer", "adam_l1"), "--lr", -1], check=False)
    assert result.returncode == 1
    assert result.stderr == "error: --lr -1.0 is not possible: more than 0\n"
