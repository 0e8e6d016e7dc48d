"""The mixture of Gaussians and its criterion: against torch.distributions, by integration, at extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as d

from rhhn_fairseq import plugin  # noqa: F401  (registers the criterion)
from rhhn_fairseq.criterions.mixture_density import MixtureDensity
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.mixture import Mixture, output_size

M = 3


def _raw(*shape, components=M, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, output_size(components), generator=generator, dtype=dtype)


def _reference(raw):
    """The distribution of the offset and that of the pen bit by torch.distributions, in float64."""
    pen, weight, mean, scale, twist = raw.double().split((1, M, 2 * M, 2 * M, M), dim=-1)
    mean, scale, rho = mean.unflatten(-1, (M, 2)), scale.unflatten(-1, (M, 2)).exp(), twist.tanh()
    covariance = torch.diag_embed(scale.square())
    off = rho * scale.prod(dim=-1)
    covariance[..., 0, 1], covariance[..., 1, 0] = off, off
    components = d.MultivariateNormal(mean, covariance)
    offset = d.MixtureSameFamily(d.Categorical(logits=weight), components)
    return offset, d.Bernoulli(logits=pen.squeeze(-1))


def test_log_density_equals_torch_distributions():
    raw = _raw(50, 4)
    points = 2 * torch.randn(50, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pens = (torch.arange(200).view(50, 4) % 2).double()
    offset, pen = _reference(raw)
    mixture = Mixture.of(raw)
    # Both are float64; the reference factorises the covariance, whose condition here is up to 1e4.
    torch.testing.assert_close(mixture.log_density(points), offset.log_prob(points), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(mixture.pen_log_prob(pens), pen.log_prob(pens), rtol=1e-13, atol=1e-14)


def test_gradients_by_finite_differences():
    raw = _raw(4, components=2).requires_grad_()
    points = torch.randn(4, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    points.requires_grad_()
    pens = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)

    def loss(raw, points):
        mixture = Mixture.of(raw)
        return mixture.log_density(points) + mixture.pen_log_prob(pens)

    assert torch.autograd.gradcheck(loss, (raw, points))


def test_float32_keeps_its_digits_where_the_correlation_is_nearly_one():
    """With r = 9, 1 - correlation^2 is 6e-8: computed as that, float32 would have no digit left of it."""
    raw = torch.zeros(1, output_size(1), dtype=torch.float64)
    raw[0, -1] = 9.0
    for point in ((1.0, 1.0), (1.0, 1.0001), (0.5, 0.5)):
        exact = Mixture.of(raw).log_density(torch.tensor([point], dtype=torch.float64))
        found = Mixture.of(raw.float()).log_density(torch.tensor([point]))
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)
    # On the diagonal a = b, and the exponent is -1 / (1 + correlation).
    expected = -math.log(2 * math.pi / math.cosh(9.0)) - 1 / (1 + math.tanh(9.0))
    found = Mixture.of(raw).log_density(torch.tensor([[1.0, 1.0]], dtype=torch.float64))
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_the_density_integrates_to_one():
    raw = _raw(1, seed=4)
    grid = torch.linspace(-30, 30, 801, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    total = Mixture.of(raw).log_density(points).exp().sum() * (grid[1] - grid[0]) ** 2
    # Scales here are 0.2 at least, of which the grid takes three steps.
    assert total.item() == pytest.approx(1.0, abs=1e-6)


wild = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(wild, min_size=output_size(2), max_size=output_size(2)),
    st.tuples(wild, wild, st.sampled_from([0.0, 1.0])),
)
def test_loss_and_gradient_are_finite_for_every_finite_output(numbers, point):
    raw = torch.tensor([numbers]).requires_grad_()
    target = torch.tensor([point])
    mixture = Mixture.of(raw)
    nats = -mixture.log_density(target[:, :2])
    assert nats.isfinite().all()
    pen_nats = -mixture.pen_log_prob(target[:, 2])
    assert pen_nats.isfinite().all()
    (gradient,) = torch.autograd.grad(nats.sum() + pen_nats.sum(), raw)
    assert gradient.isfinite().all()


def test_drawn_points_have_the_moments_of_the_mixture():
    torch.manual_seed(0)
    count = 200_000
    raw = _raw(seed=5, scale=0.8)
    noise = torch.cat([torch.rand(count, 1), torch.randn(count, 2), torch.rand(count, 1)], dim=1).double()
    drawn = Mixture.of(raw.expand(count, -1)).draw(noise)
    offset, pen = _reference(raw)
    error = drawn[:, :2].std(dim=0) / count**0.5
    # Six standard errors of the mean.
    assert ((drawn[:, :2].mean(dim=0) - offset.mean).abs() < 6 * error).all()
    torch.testing.assert_close(drawn[:, :2].var(dim=0), offset.variance, rtol=0.05, atol=0)
    assert drawn[:, 2].mean().item() == pytest.approx(pen.probs.item(), abs=0.01)
    assert set(drawn[:, 2].unique().tolist()) == {0.0, 1.0}
    # The cross-moment is what the correlations make of it.
    samples = offset.sample((count,))
    torch.testing.assert_close(torch.cov(drawn[:, :2].T), torch.cov(samples.T), rtol=0.1, atol=0.05)


def test_bias_and_temperature_are_the_papers():
    raw = _raw(5)
    pen, weight, _, scale, _ = raw.split((1, M, 2 * M, 2 * M, M), dim=-1)
    same = Mixture.of(raw).sharpened()
    for one, other in zip(same, Mixture.of(raw), strict=True):
        torch.testing.assert_close(one, other)
    biased = Mixture.of(raw).sharpened(bias=0.7)
    torch.testing.assert_close(biased.log_weight.exp(), (weight * 1.7).softmax(-1))
    torch.testing.assert_close(biased.log_scale.flatten(-2), scale - 0.7)
    torch.testing.assert_close(biased.pen_logit, pen.squeeze(-1))
    cool = Mixture.of(raw).sharpened(temperature=0.4)
    torch.testing.assert_close(cool.log_weight.exp(), (weight / 0.4).softmax(-1))
    torch.testing.assert_close(cool.log_scale.flatten(-2).exp().square(), 0.4 * scale.exp().square())
    torch.testing.assert_close(cool.pen_logit, pen.squeeze(-1) / 0.4)
    with pytest.raises(UsageError, match="--temperature 0.0 is not a number above 0"):
        Mixture.of(raw).sharpened(temperature=0.0)


class Given(torch.nn.Module):
    """A model whose outputs are given."""

    def __init__(self, raw):
        super().__init__()
        self.raw = torch.nn.Parameter(raw)

    def forward(self, points, mask):
        return self.raw, {}


def _sample(lengths, T=6):
    B = len(lengths)
    mask = torch.arange(T) < torch.tensor(lengths).unsqueeze(1)
    target = torch.randn(B, T, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    target[..., 2] = (target[..., 2] > 0).double()
    net_input = {"points": torch.zeros(B, T, 3), "mask": None if bool(mask.all()) else mask}
    return {"net_input": net_input, "target": target, "ntokens": sum(lengths), "nsentences": B}


@pytest.mark.parametrize("average", ["point", "sequence"])
@pytest.mark.parametrize("lengths", [[6, 6], [6, 2, 4]])
def test_criterion_sums_the_log_densities_of_real_points(average, lengths):
    raw, sample = _raw(len(lengths), 6), _sample(lengths)
    loss, size, logged = MixtureDensity(None, average)(Given(raw), sample)
    offset, pen = _reference(raw)
    target = sample["target"]
    pen_nats = -pen.log_prob(target[..., 2])
    nats = pen_nats - offset.log_prob(target[..., :2])
    expected = sum(nats[b, :length].sum() for b, length in enumerate(lengths))
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert size == {"point": sum(lengths), "sequence": len(lengths)}[average]
    expected_pen = sum(pen_nats[b, :length].sum() for b, length in enumerate(lengths))
    torch.testing.assert_close(logged["pen_loss"], expected_pen, rtol=1e-10, atol=0)
    wrong = sum(
        ((pen.probs[b, :length] > 0.5) != (target[b, :length, 2] > 0.5)).sum().item()
        for b, length in enumerate(lengths)
    )
    assert logged["pen_wrong"].item() == wrong
    each, _, _ = MixtureDensity(None, average)(Given(raw), sample, reduce=False)
    assert each.shape == (len(lengths), 6)
    torch.testing.assert_close(each.sum(), loss)


def test_nan_at_padding_reaches_no_gradient():
    sample, raw = _sample([6, 2]), _raw(2, 6)
    clean = Given(raw.clone())
    MixtureDensity(None, "point")(clean, sample)[0].backward()
    raw[1, 2:] = float("nan")
    sample["target"][1, 2:] = float("nan")
    dirty = Given(raw)
    loss, _, _ = MixtureDensity(None, "point")(dirty, sample)
    loss.backward()
    assert loss.isfinite()
    torch.testing.assert_close(dirty.raw.grad, clean.raw.grad)
    assert (dirty.raw.grad[1, 2:] == 0).all()


def test_half_precision_outputs_are_summed_in_float32():
    raw, sample = _raw(2, 6, dtype=torch.float32), _sample([6, 2])
    exact, _, _ = MixtureDensity(None, "point")(Given(raw.bfloat16().float()), sample)
    half, _, _ = MixtureDensity(None, "point")(Given(raw.bfloat16()), sample)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact)


@pytest.mark.parametrize("average", ["point", "sequence"])
def test_logged_figures(average):
    from fairseq.logging import metrics

    criterion = MixtureDensity(None, average)
    samples = [_sample([6, 6]), _sample([6, 2, 4])]
    outputs = [criterion(Given(_raw(s["nsentences"], 6)), s)[2] for s in samples]
    total = sum(output["loss"] for output in outputs).item()
    with metrics.aggregate() as meters:
        MixtureDensity.reduce_metrics(outputs)
    found = meters.get_smoothed_values()
    assert found["nats_seq"] == pytest.approx(total / 5, abs=0.01)
    assert found["nats_point"] == pytest.approx(total / 24, abs=1e-4)
    assert found["loss"] == pytest.approx(total / (24 if average == "point" else 5), abs=1e-4)
    assert found["pen_nats"] == pytest.approx(sum(o["pen_loss"] for o in outputs).item() / 24, abs=1e-4)
    wrong = sum(output["pen_wrong"] for output in outputs).item()
    assert found["pen_errors"] == pytest.approx(100 * wrong / 24, abs=0.01)
    # A worker without a batch has nothing to log.
    MixtureDensity.reduce_metrics([])
