"""Problems that need a long memory: what their examples are, and how they become batches."""

import numpy as np
import pytest
import torch
from fairseq.utils import apply_to_sample

from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.problems.generated import Adding, Copying, TemporalXor
from rhhn_fairseq.data.problems.images import digits
from rhhn_fairseq.data.problems.registry import PROBLEMS, build_problem
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.synthetic import (
    FreshBatches,
    StoredBatches,
    evaluation_set,
    problem_sample,
    training_set,
)

GENERATED = [Copying(7), Copying(7, "one_hot"), Adding(9), TemporalXor(11)]
every_generated = pytest.mark.parametrize("problem", GENERATED, ids=lambda p: f"{p.name}{p.input_size}")


def _rng(seed=0):
    return np.random.default_rng(seed)


@every_generated
def test_examples_have_the_shapes_the_problem_says(problem):
    inputs, targets = problem.render(problem.draw(_rng(), 5))
    assert inputs.shape == (5, problem.steps, problem.input_size) and inputs.dtype == np.float32
    assert targets.shape == ((5, problem.steps) if problem.per_step else (5,))
    if problem.classes:
        assert targets.dtype == np.int64 and 0 <= targets.min() and targets.max() < problem.classes
    else:
        assert targets.dtype == np.float32
    assert problem.counted is None or problem.counted.shape == (problem.steps,)
    assert problem.output_size == max(problem.classes, 1)


@pytest.mark.parametrize("delay", [1, 2, 30])
def test_copying_is_symbols_blanks_delimiter_blanks(delay):
    problem = Copying(delay)
    inputs, targets = problem.render(problem.draw(_rng(), 400))
    read = inputs[..., 0]
    assert problem.steps == delay + 20
    symbols = read[:, :10]
    assert set(np.unique(symbols)) == set(range(1, 9)), "each of the eight symbols occurs"
    assert (read[:, 10 : 9 + delay] == 0).all(), "delay - 1 blanks"
    assert (read[:, 9 + delay] == 9).all(), "the delimiter"
    assert read[:, 10 + delay :].shape[1] == 10 and (read[:, 10 + delay :] == 0).all()
    assert (targets[:, : delay + 10] == 0).all() and (targets[:, delay + 10 :] == symbols).all()
    assert problem.counted.sum() == 10 and problem.counted[-10:].all()


def test_one_hot_copying_reads_the_same_symbols():
    codes = Copying(5).draw(_rng(), 6)
    scalar, targets = Copying(5).render(codes)
    one_hot, same = Copying(5, "one_hot").render(codes)
    assert (one_hot.sum(axis=-1) == 1).all() and (one_hot.argmax(axis=-1) == scalar[..., 0]).all()
    assert (targets == same).all()


@pytest.mark.parametrize("steps", [2, 3, 50])
def test_adding_is_the_sum_of_one_number_of_each_half(steps):
    inputs, targets = Adding(steps).render(Adding(steps).draw(_rng(), 300))
    numbers, marks = inputs[..., 0], inputs[..., 1]
    half = steps // 2
    assert (marks[:, :half].sum(axis=1) == 1).all() and (marks[:, half:].sum(axis=1) == 1).all()
    assert 0 <= numbers.min() and numbers.max() < 1
    np.testing.assert_allclose(targets, (numbers * marks).sum(axis=1), rtol=0, atol=1e-6)
    assert marks[:, :half].any(axis=0).all() and marks[:, half:].any(axis=0).all(), (
        "every step is marked once"
    )


def test_half_precision_leaves_the_sums_to_predict_as_they_are():
    sample = problem_sample(FreshBatches(Adding(9), 50, 1, 1).batch(0))
    # As fairseq's trainer does with --bf16.
    halved = apply_to_sample(lambda x: x.bfloat16() if x.dtype == torch.float32 else x, sample)
    assert torch.equal(halved["target"], sample["target"])
    assert halved["net_input"]["inputs"].dtype == torch.bfloat16


def test_every_third_bit_is_the_exclusive_or_of_the_two_before_it():
    problem = TemporalXor(20)
    (bits,) = problem.draw(_rng(), 200)
    for k in range(2, 20, 3):
        assert (bits[:, k] == bits[:, k - 1] ^ bits[:, k - 2]).all()
    free = bits[:, [k for k in range(20) if k % 3 != 2]]
    assert abs(free.mean() - 0.5) < 0.05
    inputs, targets = problem.render((bits,))
    assert (inputs[:, 1:, 0] == targets[:, :-1]).all(), "the answer is the next bit"
    known = np.arange(1, 20)[problem.counted]
    assert known.tolist() == [2, 5, 8, 11, 14, 17]


def test_an_option_of_another_problem_is_refused():
    with pytest.raises(UsageError, match="--copying-input scalar is not an option of --problem adding, it"):
        build_problem("adding", {"copying_input": "scalar", "length": None})


def test_problems_have_their_defaults():
    copying = build_problem("copying", {"length": None})
    assert (copying.steps, copying.input_size) == (120, 1)
    assert build_problem("copying", {"length": 3, "copying_input": "one_hot"}).input_size == 10
    assert build_problem("adding", {}).steps == 100
    assert build_problem("xor", {}).steps == 29
    assert set(PROBLEMS) == {"copying", "adding", "xor", "digits", "pdigits", "mnist", "pmnist"}


@pytest.fixture(scope="module")
def digit_images():
    return digits("digits")


def test_digits_are_split_once_and_for_all(digit_images):
    sizes = [len(digit_images.splits[split][0]) for split in SPLITS]
    assert sizes == [1437, 180, 180] and digit_images.steps == 64 and digit_images.classes == 10
    rows = np.concatenate([digit_images.splits[split][0] for split in SPLITS])
    again = np.concatenate([digits("digits").splits[split][0] for split in SPLITS])
    assert (rows == again).all()
    from sklearn.datasets import load_digits

    ours, theirs = (sorted(map(bytes, pixels.astype(np.uint8))) for pixels in (rows, load_digits().data))
    assert ours == theirs, "every image is in one split"
    for split in SPLITS:
        assert set(digit_images.splits[split][1]) == set(range(10))
    inputs, targets = digit_images.render(tuple(part[:7] for part in digit_images.splits["valid"]))
    assert (
        inputs.shape == (7, 64, 1) and inputs.min() == 0 and inputs.max() == 1 and targets.dtype == np.int64
    )


def test_permutation_has_a_seed_of_its_own(digit_images):
    permuted, same, other = digits("pdigits", 0), digits("pdigits", 0), digits("pdigits", 1)
    assert sorted(permuted.order) == list(range(64)) and not (permuted.order == np.arange(64)).all()
    assert (permuted.order == same.order).all() and not (permuted.order == other.order).all()
    codes = tuple(part[:5] for part in digit_images.splits["train"])
    plain, _ = digit_images.render(codes)
    mixed, _ = permuted.render(codes)
    assert (mixed == plain[:, permuted.order]).all()


def _same(one, other):
    return (one.inputs == other.inputs).all() and (one.targets == other.targets).all()


@every_generated
def test_fresh_batches_follow_from_seed_epoch_and_number(problem):
    batches = FreshBatches(problem, B=4, count=3, seed=5)
    assert len(batches) == 3 and batches.batch(7).number == 1
    assert _same(batches.batch(7), FreshBatches(problem, 4, 3, 5).batch(7))
    found = [batches.batch(i) for i in range(9)] + [
        FreshBatches(problem, 4, 3, seed).batch(0) for seed in (6, 7)
    ]
    different = {(one.inputs.tobytes(), one.targets.tobytes()) for one in found}
    assert len(different) == len(found), "no two epochs, batches or seeds have the same examples"


@every_generated
def test_evaluation_sets_are_the_same_in_every_run_and_no_training_examples(problem):
    def inputs(codes):
        return problem.render(codes)[0]

    valid, test = evaluation_set(problem, "valid", 6), evaluation_set(problem, "test", 6)
    assert (inputs(valid) == inputs(evaluation_set(problem, "valid", 6))).all()
    assert not (inputs(valid) == inputs(test)).all()
    # Beyond the numbers with which the seeds of the valid and the test set begin.
    for seed in range(6):
        assert not (inputs(training_set(problem, 6, seed)) == inputs(valid)).all()
        assert not (FreshBatches(problem, 6, 1, seed).batch(0).inputs == inputs(valid)).all()
    assert not (inputs(training_set(problem, 6, 0)) == inputs(training_set(problem, 6, 1))).all()


def test_stored_batches_hold_every_example_once_an_epoch():
    problem = Adding(4)
    codes = problem.draw(_rng(), 10)
    whole, _ = problem.render(codes)
    in_order = StoredBatches(problem, codes, B=4)
    assert [len(in_order.batch(b).inputs) for b in range(len(in_order))] == [4, 4, 2]
    assert (np.concatenate([in_order.batch(b).inputs for b in range(3)]) == whole).all()
    assert _same(in_order.batch(1), in_order.batch(4)), "its own order does not change with the epoch"
    drawn = StoredBatches(problem, codes, B=4, seed=1)
    orders = []
    for epoch in (1, 2):
        rows = np.concatenate([drawn.batch(3 * epoch + b).inputs for b in range(3)])
        assert sorted(map(bytes, rows)) == sorted(map(bytes, whole))
        orders.append(rows.tobytes())
    assert orders[0] != orders[1]
    assert _same(drawn.batch(4), StoredBatches(problem, codes, 4, seed=1).batch(4))
    assert not _same(drawn.batch(4), StoredBatches(problem, codes, 4, seed=2).batch(4))


def test_examples_and_orders_are_those_of_earlier_versions(digit_images):
    """Published figures were measured on them, and resumed runs go on with them."""
    problem = Copying(2)
    fixed = [training_set(problem, 1, 1), *(evaluation_set(problem, split, 1) for split in ("valid", "test"))]
    assert [symbols[0].tolist() for (symbols,) in fixed] == [
        [1, 3, 7, 5, 7, 5, 8, 3, 4, 8],
        [8, 7, 6, 7, 5, 1, 8, 1, 8, 7],
        [3, 2, 8, 6, 8, 1, 4, 8, 6, 2],
    ]
    fresh = FreshBatches(problem, B=1, count=5, seed=1).batch(7)
    assert fresh.inputs[0, :10, 0].tolist() == [6, 6, 8, 7, 3, 4, 4, 7, 8, 2]
    numbered = np.repeat(np.arange(8, dtype=np.uint8)[:, None], 10, axis=1)
    ordered = StoredBatches(problem, (numbered,), B=8, seed=1).batch(2)
    assert ordered.inputs[:, 0, 0].tolist() == [5, 1, 3, 4, 7, 2, 0, 6]
    assert digit_images.splits["valid"][1][:10].tolist() == [5, 7, 9, 9, 4, 6, 4, 8, 6, 1]
    assert digits("pdigits", 0).order[:8].tolist() == [16, 36, 27, 8, 44, 23, 53, 4]
