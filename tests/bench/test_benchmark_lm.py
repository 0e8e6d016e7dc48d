"""The benchmark of character language models: a step is all of a training step, for every model alike."""

import pytest
import torch

from rhhn_fairseq.bench import lm
from rhhn_fairseq.bench.contenders import BASELINE
from rhhn_fairseq.bench.report import render
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig


def smoke(**changes) -> lm.Config:
    return lm.Config(**lm.SMOKE | {"threads": 1} | changes)


@pytest.fixture(scope="module")
def trainees():
    return {
        t.backend if t.layer != BASELINE else BASELINE: t
        for t in lm.build_trainees("ln_hyperlstm_ptb", smoke())
    }


def test_backends_start_from_equal_weights(trainees):
    assert list(trainees)[0] == BASELINE and list(trainees)[-1] == "reference" and "aten" in trainees
    reference = dict(trainees["reference"].model.named_parameters())
    for name, parameter in trainees["aten"].model.named_parameters():
        assert torch.equal(parameter, reference[name])


def test_a_step_trains_every_parameter_and_carries_the_state(trainees):
    for trainee in trainees.values():
        before = {name: p.detach().clone() for name, p in trainee.model.named_parameters()}
        assert trainee.time_step() > 0
        # The second step starts from the first one's state.
        assert trainee.chunk == 1 and any(part.any() for part in trainee.carry.after)
        assert trainee.time_step() > 0 and trainee.carry.chunk == 1
        for name, parameter in trainee.model.named_parameters():
            assert not torch.equal(parameter, before[name]), name


def test_torchs_layers_are_those_of_the_stack():
    config = StackConfig(
        cell="lstm", input_size=5, hidden_size=8, layers=2, layer_dropout=0.5, input_dropout=0.5
    )
    stack = lm.TorchStack(config)
    assert (stack.lstm.input_size, stack.lstm.hidden_size) == (5, 8)
    assert (stack.lstm.num_layers, stack.lstm.dropout) == (2, 0.5)
    x = torch.randn(6, 3, 5)
    assert not torch.equal(stack(x)[0], stack(x)[0])
    stack.eval()
    whole, _ = stack(x)
    first, state = stack(x[:4])
    rest, _ = stack(x[4:], state)
    assert torch.allclose(torch.cat([first, rest]), whole, atol=1e-6)


def test_text_is_of_the_vocabulary():
    text = lm.draw_text(smoke(vocab_size=3, batch=4, length=20))
    assert text.shape == (4, 21) and text.unique().tolist() == [4, 5, 6]


def test_report():
    report = lm.run(smoke(archs=("lstm_ptb", "rhn_ptb"), backends=("reference",)))
    assert [(row["arch"], row["layer"], row["backend"]) for row in report["rows"]] == [
        ("lstm_ptb", BASELINE, "oneDNN"),
        ("lstm_ptb", "lstm", "reference"),
        ("rhn_ptb", BASELINE, "oneDNN"),
        ("rhn_ptb", "rhn", "reference"),
    ]
    for row in report["rows"]:
        assert row["characters_per_second"] == pytest.approx(3 * 5 * 1e3 / row["step_ms"])
        assert row["error"] < 1e-4
    base, lstm, *_ = report["rows"]
    assert base["speed_ratio"] == 1.0
    assert lstm["speed_ratio"] == pytest.approx(base["seconds"][0] / lstm["seconds"][0])
    # torch's LSTM has a second bias.
    assert base["parameters"] == lstm["parameters"] + 4 * 16
    assert "speed / nn.LSTM" in render(report, lm.COLUMNS)
    assert lm.draw(report).axes


def test_a_wrong_model_is_not_timed(monkeypatch):
    from rhhn_fairseq.cells.rhn import RHN

    forward = RHN.forward

    def wrong(self, x_TBC, *rest):
        y, state = forward(self, x_TBC, *rest)
        return (y if x_TBC.dtype == torch.float64 else 1.5 * y), state

    monkeypatch.setattr(RHN, "forward", wrong)
    with pytest.raises(UsageError, match="^rhn_ptb rhn reference is wrong and will not be timed: in float32"):
        lm.run(smoke(archs=("rhn_ptb",), hyper_size=0, backends=("reference",)))


def test_unknown_architectures_are_refused():
    with pytest.raises(
        UsageError, match="--archs gnmt is not a character language model; choose from char_lm, "
    ):
        lm.Config(archs=("gnmt",))


def test_types():
    report = lm.run(smoke(dtype="bfloat16"))
    assert all(row["dtype"] == "bfloat16" and 1e-4 < row["error"] < 0.5 for row in report["rows"])
