"""Options of character models that act on numbers, each where it should."""

import pytest
import torch
from helpers.tiny_char_lm import build_model, build_task, iterator, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_outputs_are_dropped_before_the_output_layer(corpus):
    model = build_model(build_task(corpus), output_dropout=0.5).train()
    logits, extra = model(torch.full((1, 6), 4))
    outputs, dropped = extra["outputs"], extra["dropped_outputs"]
    # No output of this model is zero before it is dropped.
    kept = dropped != 0
    assert 0 < kept.double().mean() < 1
    torch.testing.assert_close(dropped[kept], 2 * outputs[kept], rtol=0, atol=0)
    torch.testing.assert_close(logits, model.output(dropped).transpose(0, 1), rtol=0, atol=0)


def test_an_orthogonal_start_has_a_uniform_output_bias(corpus):
    bias = build_model(build_task(corpus), output_init="orthogonal").bias_out
    # The model is 12 wide.
    assert 0 < bias.abs().max() <= 12**-0.5 and bias.unique().numel() == bias.numel()
    assert not build_model(build_task(corpus)).bias_out.any()


def test_weight_drop_reaches_the_stack(corpus):
    assert build_model(build_task(corpus), weight_drop=0.5).stack.config.weight_drop == 0.5


def test_the_seed_decides_the_windows(corpus):
    options = {"batching": "windows", "tokens_per_sample": 5}
    first, again, other = (
        next(iter(iterator(build_task(corpus, seed=seed, **options)).next_epoch_itr()))["target"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
