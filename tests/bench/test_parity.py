"""What the benchmark accepts as rounding."""

import pytest
import torch

from rhhn_fairseq.bench import parity
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy


def test_a_missing_gradient_is_an_infinite_error():
    exact = {"output": torch.ones(2), "gradient of weight": torch.ones(2)}
    error = parity.largest_error({"output": torch.ones(2)}, exact)
    assert error == (float("inf"), "gradient of weight")
    # What is zero on both sides is right, as the gradient of a recurrent matrix over a single step.
    zero = {"output": torch.zeros(2)}
    assert parity.largest_error(zero, zero) == (0.0, "output")


def test_in_a_narrow_type_a_model_may_err_as_much_as_the_loop(monkeypatch):
    monkeypatch.setitem(parity.TOLERANCES, "bfloat16", 0.1)
    errors = {"aten": 0.2}

    def collect(model):
        off = errors[policy.current().kernel] if model.weight.dtype == torch.bfloat16 else 0.0
        return {"output": model.weight.detach() * (1 + off)}

    models = {"deep": (torch.nn.Linear(8, 8), "aten")}
    errors["reference"] = 0.3
    assert parity.check_models(models, collect, "bfloat16")["deep"] == pytest.approx(0.2, abs=0.02)
    errors["reference"] = 0.15
    with pytest.raises(UsageError, match="^deep is wrong and will not be timed: in bfloat16 the output"):
        parity.check_models(models, collect, "bfloat16")
