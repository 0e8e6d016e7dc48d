"""The loss straight from the output layer's input, against fairseq's criterion on the logits."""

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.distributed import ModuleProxyWrapper
from omegaconf import OmegaConf

from rhhn_fairseq.criterions.chunked_cross_entropy import ChunkedCrossEntropy
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers import output_loss
from rhhn_fairseq.layers.output_loss import linear_cross_entropy
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig

P, H, V, PAD = 13, 5, 7, 1


class _Distributed(torch.nn.Module):
    """The form of DistributedDataParallel: it calls the network, and has none of its attributes."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments, **keywords):
        return self.module(*arguments, **keywords)


def _factors(dtype=torch.float64):
    torch.manual_seed(0)
    y, weight, bias = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((P, H), (V, H), (V,))
    )
    target = torch.randint(2, V, (P,))
    target[[3, 7]] = PAD
    return y, weight, bias, target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_loss_and_gradients_are_fairseqs(smoothing, chunk):
    y, weight, bias, target = _factors()
    logits = y @ weight.t() + bias
    exact = label_smoothed_nll_loss(logits.log_softmax(-1), target, smoothing, ignore_index=PAD)
    found = linear_cross_entropy(y, weight, bias, target, target != PAD, smoothing, chunk)
    for one, other in zip(found[:2], exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert found[2] == ((logits.argmax(-1) == target) & (target != PAD)).sum()
    # Scaled, as a loss scaler or several workers would.
    gradients = torch.autograd.grad(3 * found[0], (y, weight, bias))
    for one, other in zip(gradients, torch.autograd.grad(3 * exact[0], (y, weight, bias)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


# What is summed has eight or eleven bits of mantissa.
@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("method", ["model", "autocast", "autocast after a loop"])
def test_half_precision_sums_in_float32(dtype, bits, method):
    y, weight, bias, target = _factors()
    exact = linear_cross_entropy(y, weight, bias, target, target != PAD, 0.1)
    exact[0].backward()
    # Under autocast what comes from a fused layer has the narrow type, what comes from a loop has not.
    narrow = {"model": (y, weight, bias), "autocast": (y,), "autocast after a loop": ()}[method]
    types = [dtype if factor in set(narrow) else torch.float32 for factor in (y, weight, bias)]
    factors = [p.detach().to(t).requires_grad_() for p, t in zip((y, weight, bias), types, strict=True)]
    with torch.autocast("cpu", dtype=dtype, enabled=method != "model"):
        found = linear_cross_entropy(*factors, target, target != PAD, 0.1, 4)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), exact[0], rtol=2.0 ** (1 - bits), atol=0)
    # As a loss scaler would, so that what is handed on loses nothing by its range.
    (1024 * found[0]).backward()
    for one, other, kind in zip(factors, (y, weight, bias), types, strict=True):
        assert one.grad.dtype == kind
        assert (one.grad.double() / 1024 - other.grad).norm() <= 2.0 ** (3 - bits) * other.grad.norm()


def test_small_probabilities_count_in_float16():
    """Of a symbol of probability 2e-8; alone, float16 has steps of 6e-8."""
    y, weight, bias, target = _factors()
    with torch.no_grad():
        bias[V - 1] -= 13.0
    target.clamp_(max=V - 2)
    half = [factor.detach().half().requires_grad_() for factor in (y, weight, bias)]
    rounded = [factor.detach().double().requires_grad_() for factor in half]
    linear_cross_entropy(*rounded, target, target != PAD)[0].backward()
    assert 1e-8 < rounded[2].grad[V - 1] / P < 3e-8
    (4096 * linear_cross_entropy(*half, target, target != PAD)[0]).backward()
    found, exact = half[1].grad[V - 1].double() / 4096, rounded[1].grad[V - 1]
    # Measured: 0.03, and 0.43 without a scale.
    assert (found - exact).norm() <= 0.1 * exact.norm()


class _Task:
    """What a criterion reads of a task."""

    class target_dictionary:
        @staticmethod
        def pad():
            return PAD


@pytest.mark.parametrize("share", ["none", "decoder"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_criterion_is_fairseqs(share, prefix):
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

    torch.manual_seed(0)
    sizes = dict(hidden_size=6, embed_dim=4, encoder_layers=2, decoder_layers=2, residual_from=0, dropout=0.0)
    config = OmegaConf.structured(GNMTConfig(cell="lstm", share_embeddings=share, init_range=0.5, **sizes))
    model = GNMT.for_vocabulary(OmegaConf.to_object(config), V).double()
    target = torch.tensor([[3, 4, 2], [5, 2, PAD]])
    before = torch.tensor([[2, 3, 4], [2, 5, PAD]])
    source = torch.tensor([[4, 5, 2], [6, 4, 2]])
    inputs = {"src_tokens": source, "src_lengths": torch.tensor([3, 3]), "prev_output_tokens": before}
    sample = {"net_input": inputs, "target": target, "ntokens": 5}
    options = dict(ignore_prefix_size=prefix, report_accuracy=True)
    ours = ChunkedCrossEntropy(_Task, False, 0.1, output_chunk=2, **options)
    theirs = LabelSmoothedCrossEntropyCriterion(_Task, False, 0.1, **options)
    results = []
    for criterion in (ours, theirs):
        model.zero_grad()
        loss, size, logged = criterion(model, sample)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((loss.detach(), size, {key: float(value) for key, value in logged.items()}, gradients))
    assert results[0][1] == results[1][1] == 5
    # fairseq's takes the logarithm of the softmax in float32 whatever the model's type.
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-6, atol=0)
    for one, other in zip(results[0][3], results[1][3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    loss, _, _ = ours(ModuleProxyWrapper(_Distributed(model)), sample)
    assert torch.equal(loss.detach(), results[0][0])


def test_without_a_gradient_none_is_computed(monkeypatch):
    y, weight, bias, target = _factors()
    expected = linear_cross_entropy(y, weight, bias, target, target != PAD)[0]
    chunks, computed = output_loss._chunks, []

    def watched(*arguments):
        sums, gradients = chunks(*arguments)
        computed.append(len(gradients))
        return sums, gradients

    monkeypatch.setattr(output_loss, "_chunks", watched)
    with torch.no_grad():
        loss = linear_cross_entropy(y, weight, bias, target, target != PAD)[0]
    linear_cross_entropy(y, weight, bias, target, target != PAD)
    assert torch.equal(loss, expected) and computed == [0, 3]


def test_second_derivatives_are_refused():
    y, weight, bias, target = _factors()
    loss = linear_cross_entropy(y, weight, bias, target, target != PAD)[0]
    with pytest.raises(UsageError, match="the gradients of linear_cross_entropy cannot be differentiated"):
        torch.autograd.grad(loss, y, create_graph=True)
