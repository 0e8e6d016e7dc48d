"""Cutting a stream: every target once, the right input before each, whatever the sizes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhhn_fairseq.data.text.vocabulary import PAD
from rhhn_fairseq.tasks.lanes import Lanes, RandomWindows, Windows

FIRST = 2


def _stream(N):
    # Every symbol is its own position, so that a batch tells where it was read.
    return np.arange(100, 100 + N).astype(np.uint16)


def _check_inputs(batch):
    """Each input is the symbol before its target, and rows read without gaps."""
    real = np.ones_like(batch.targets, bool) if batch.mask is None else batch.mask
    assert (batch.inputs[~real] == PAD).all() and (batch.targets[~real] == PAD).all()
    before = np.where(batch.targets == 100, FIRST, batch.targets - 1)
    scored = batch.targets != PAD
    assert (batch.inputs[scored] == before[scored]).all()
    assert (scored <= real).all()
    # A group whose lanes have all ended still reads a step, of padding.
    assert batch.inputs.shape[1] >= 1


def _targets(cutter):
    found = []
    for i in range(len(cutter)):
        batch = cutter.batch(i)
        _check_inputs(batch)
        found.append(batch.targets[batch.targets != PAD])
    return np.sort(np.concatenate(found))


@settings(max_examples=300, deadline=None)
@given(
    N=st.integers(1, 200),
    B=st.integers(1, 5),
    groups=st.integers(1, 4),
    T=st.integers(1, 30),
    context=st.integers(0, 20),
)
def test_lanes_score_every_target_once(N, B, groups, T, context):
    lanes = Lanes(_stream(N), FIRST, B * groups, groups, T, context)
    assert (_targets(lanes) == _stream(N)).all()
    assert len(lanes) % groups == 0


@settings(max_examples=300, deadline=None)
@given(N=st.integers(1, 200), length=st.integers(1, 40), context=st.integers(0, 39), B=st.integers(1, 7))
def test_windows_score_every_target_once(N, length, context, B):
    windows = Windows(_stream(N), FIRST, length, context % length, B)
    assert (_targets(windows) == _stream(N)).all()


def test_lanes_go_on_from_chunk_to_chunk_without_a_gap():
    lanes = Lanes(_stream(103), FIRST, lanes=6, groups=3, T=4)
    for group in range(3):
        batches = [lanes.batch(i) for i in range(group, len(lanes), 3)]
        assert [batch.chunk for batch in batches] == list(range(lanes.chunks))
        assert all(batch.group == group for batch in batches)
        whole = np.concatenate([batch.inputs for batch in batches], axis=1)
        for row in whole:
            real = row[row != PAD]
            # The first input of lane 0 is FIRST; everywhere else inputs are consecutive, borders too.
            start = 1 if real[0] == FIRST else 0
            assert (np.diff(real[start:].astype(int)) == 1).all()


def test_context_is_read_before_a_lane_and_not_scored():
    lanes = Lanes(_stream(100), FIRST, lanes=2, groups=1, T=10, context=7)
    batch = lanes.batch(0)
    assert batch.inputs[1].tolist() == list(range(100 + 42, 100 + 52))
    assert (batch.targets[1, :7] == PAD).all() and batch.targets[1, 7] == 150
    assert batch.targets[0].tolist() == list(range(100, 110))


def test_windows_give_every_scored_symbol_its_context():
    windows = Windows(_stream(50), FIRST, length=10, context=6, B=3)
    batches = [windows.batch(i) for i in range(len(windows))]
    rows = [row for batch in batches for row in batch.targets]
    assert (rows[0] != PAD).all()
    for row in rows[1:]:
        assert (row[:6] == PAD).all() and (row[6:] != PAD).any()
    assert all(batch.chunk == 0 for batch in batches)


def test_random_windows_differ_by_epoch_and_repeat_by_seed():
    def epoch(windows, e):
        return np.concatenate([windows.batch(e * len(windows) + b).targets for b in range(len(windows))])

    windows = RandomWindows(_stream(500), FIRST, length=10, B=4, groups=3, seed=1)
    # Four updates of three batches of four windows are 480 symbols.
    assert len(windows) == 12
    first = epoch(windows, 1)
    assert (np.diff(first, axis=1) == 1).all()
    assert len({windows.batch(b).targets.tobytes() for b in range(24)}) == 24
    assert not (first == epoch(windows, 2)).all()
    assert (first == epoch(RandomWindows(_stream(500), FIRST, 10, 4, 3, seed=1), 1)).all()
    assert not (first == epoch(RandomWindows(_stream(500), FIRST, 10, 4, 3, seed=2), 1)).all()
    assert [windows.batch(b).group for b in range(4)] == [0, 1, 2, 0]
