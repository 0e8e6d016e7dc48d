"""``--optimizer fused_adam`` against fairseq's ``adam``."""

import copy

import pytest
import torch
from fairseq import optim
from helpers.cli import fairseq_train, json_log, lstm
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401


def build(name, params, **settings):
    return optim.build_optimizer(OmegaConf.create({"_name": name, "lr": [0.01], **settings}), params)


def parameters(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=draw, dtype=dtype)) for s in ((3, 4), (5,), (1,))]


def update(optimizer, params, seed, size=1.0):
    draw = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = size * torch.randn(param.shape, generator=draw, dtype=param.dtype)
    optimizer.multiply_grads(0.5)
    optimizer.step()


SETTINGS = dict(adam_betas="(0.8, 0.98)", adam_eps=1e-3, weight_decay=0.1)


# Gradients near epsilon are where its place shows.
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_updates_are_those_of_fairseqs_adam(size):
    ours, theirs = parameters(), parameters()
    one = build("fused_adam", ours, **SETTINGS)
    other = build("adam", theirs, **SETTINGS, fp16_adam_stats=False, use_old_adam=False, tpu=False)
    for seed in range(6):
        update(one, ours, seed, size)
        update(other, theirs, seed, size)
        for mine, his in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, his, rtol=0, atol=1e-14)


def test_going_on_from_a_checkpoint_changes_nothing():
    straight, stopped = parameters(), parameters()
    one, first = build("fused_adam", straight, **SETTINGS), build("fused_adam", stopped, **SETTINGS)
    for seed in range(4):
        update(one, straight, seed)
    for seed in range(2):
        update(first, stopped, seed)
    saved = {"state": first.state_dict(), "weights": [p.detach().clone() for p in stopped]}
    resumed = [torch.nn.Parameter(p) for p in saved["weights"]]
    second = build("fused_adam", resumed, **SETTINGS)
    second.load_state_dict(saved["state"], second.optimizer_config)
    for seed in range(2, 4):
        update(second, resumed, seed)
    for mine, other in zip(resumed, straight, strict=True):
        assert torch.equal(mine, other)
    assert second.param_groups[0]["eps"] == 1e-3


def test_a_training_with_adam_goes_on_with_fused_adam():
    """With --bf16, fairseq lets the one optimizer load the other's state."""
    theirs = parameters()
    other = build("adam", theirs, **SETTINGS, fp16_adam_stats=False, use_old_adam=False, tpu=False)
    for seed in range(3):
        update(other, theirs, seed)
    ours = [torch.nn.Parameter(param.detach().clone()) for param in theirs]
    one = build("fused_adam", ours, **SETTINGS)
    one.load_state_dict(copy.deepcopy(other.state_dict()), one.optimizer_config)
    for seed in range(3, 6):
        update(one, ours, seed)
        update(other, theirs, seed)
    assert one.param_groups[0]["fused"]
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his, rtol=0, atol=1e-14)


@pytest.mark.parametrize("stored", ["fused_adam", "adam_l1"])
@pytest.mark.parametrize("name", ["fused_adam", "adam_l1", "adam"])
def test_options_given_now_replace_stored_ones(name, stored):
    """Those of the other optimizer too: with --bf16, fairseq lets the one load the other's state."""
    first = build(stored, parameters(), **SETTINGS)
    update(first, first.params, 0)
    own = dict(fp16_adam_stats=False, use_old_adam=False, tpu=False) if name == "adam" else {}
    second = build(name, parameters(), weight_decay=0.5, adam_eps=1e-2, adam_betas="(0.7, 0.9)", **own)
    before = {key: value for key, value in second.param_groups[0].items() if key != "params"}
    second.load_state_dict(first.state_dict())
    after = {key: second.param_groups[0][key] for key in before}
    assert after == before | ({"updates": 1} if name == "fused_adam" else {})
    second.load_state_dict(first.state_dict(), {"weight_decay": 0.25})
    assert second.param_groups[0]["weight_decay"] == 0.25


def test_nag_resumes_with_the_rate_of_its_last_update():
    """nag scales its momentum by the ratio of the two rates."""
    whole, runs = parameters(), []
    optimizer = build("nag", whole, momentum=0.9, weight_decay=0.0)
    for seed in range(4):
        if seed == 2:
            state, again = optimizer.state_dict(), [p.detach().clone().requires_grad_() for p in whole]
            second = build("nag", again, momentum=0.9, weight_decay=0.0)
            second.load_state_dict(state)
            runs = [(second, again)]
        for current, weights in [(optimizer, whole), *runs]:
            current.set_lr(0.01 / (seed + 1))
            update(current, weights, seed)
    assert all(map(torch.equal, whole, again))


@pytest.mark.parametrize("updates", [(0, 0), (3, 0), (1, 3)])
def test_updates_are_counted_for_the_group(updates):
    """From a state of adam in which a parameter had fewer gradients than another, or none."""
    params = parameters()[:2]
    other = build("adam", params, **SETTINGS, fp16_adam_stats=False, use_old_adam=False, tpu=False)
    for n in range(max(updates)):
        for param, own in zip(params, updates, strict=True):
            param.grad = torch.ones_like(param) if n < own else None
        other.step()
    one = build("fused_adam", params, **SETTINGS)
    one.load_state_dict(copy.deepcopy(other.state_dict()), one.optimizer_config)
    assert one.param_groups[0]["updates"] == max(updates)


@pytest.mark.slow
def test_command_line(tiny_corpus, tmp_path):
    """The same losses as adam, with --bf16 as well, and a run that goes on."""
    options = ["--lr", 0.01, "--clip-norm", 0.1, "--adam-betas", "(0.8, 0.99)"]
    losses = {}
    for name, more in (("adam", []), ("fused_adam", []), ("fused_adam", ["--bf16"])):
        folder = tmp_path / "-".join([name, *more])
        arguments = [*lstm(tiny_corpus, folder, "--optimizer", name), *options, *more]
        first = fairseq_train([*arguments, "--max-update", 3])
        second = fairseq_train([*arguments, "--max-update", 5])
        steps = [r for run in (first, second) for r in json_log(run.stdout) if r["tag"] == "train_inner"]
        assert [step["num_updates"] for step in steps] == [1, 2, 3, 4, 5]
        losses[folder.name] = [step["loss"] for step in steps]
    assert losses["fused_adam"] == losses["adam"]
    assert losses["fused_adam---bf16"] == pytest.approx(losses["adam"], abs=0.02)
