"""CUDA graphs in the benchmark: they are contenders of their own, checked and timed as they are replayed.

On the CPU they are imitated, see graph_imitation.py.
"""

import pytest
from helpers.graph_imitation import count, imitated_graphs

from rhhn_fairseq.bench import cells, gnmt_train, lm, machine, memory
from rhhn_fairseq.bench.timing import interleave
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy


@pytest.fixture
def recordings(monkeypatch):
    monkeypatch.setattr(machine, "records", lambda device: True)
    return imitated_graphs(monkeypatch)


def smoke(module, **changes):
    return module.Config(**module.SMOKE | {"threads": 1} | changes)


def test_cells(recordings):
    report = cells.run(smoke(cells, cells=("ln_hyperlstm", "gru"), dtype=("float32", "bfloat16")))
    kinds = [(row["cell"], row["backend"]) for row in report["rows"] if row["dtype"] == "bfloat16"]
    at = kinds.index(("ln_hyperlstm", "aten+graphs"))
    # After what it is made of, and before what both are compared with.
    assert kinds.index(("ln_hyperlstm", "aten")) < at < kinds.index(("ln_hyperlstm", "reference"))
    assert ("ln_hyperlstm", "native+graphs") not in kinds and ("gru", "aten+graphs") not in kinds
    # Forward and backward in either type.
    assert count(recordings) == 4
    for row in report["rows"]:
        assert row["error"] < (1e-5 if row["dtype"] == "float32" else 0.2)


@pytest.mark.parametrize("module", [lm, gnmt_train])
def test_models(module, recordings):
    arch = {lm: "ln_hyperlstm_ptb", gnmt_train: "hyperlstm_gnmt_small"}[module]
    report = module.run(smoke(module, archs=(arch,), backends=("aten+graphs", "reference")))
    *_, own, reference = report["rows"]
    assert (own["backend"], reference["backend"]) == ("aten+graphs", "reference")
    assert own["error"] < 1e-4 and own["reference_ratio"] > 0
    assert count(recordings) >= 2


def test_translation_models_run_so_unasked_on_a_gpu(recordings):
    rows = gnmt_train.run(smoke(gnmt_train))["rows"]
    assert [row["backend"] for row in rows] == ["torch", "preferred", "aten+graphs", "reference"]


def test_what_is_replayed_is_what_is_checked(recordings, monkeypatch):
    replay = recordings.record

    def wrong(call, values, beside):
        recording = replay(call, values, beside)
        again = recording.replay

        def spoilt():
            again()
            recording.outputs[0].mul_(1.5)

        recording.replay = spoilt
        return recording

    recordings.record = wrong
    config = smoke(cells, cells=("ln_lstm",), backends=("aten", "aten+graphs"))
    with pytest.raises(UsageError, match="^ln_lstm is wrong and will not be timed: in float32 the"):
        cells.run(config)


def test_they_are_wanted_for_their_contenders_alone(monkeypatch):
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    monkeypatch.delenv("RHHN_KERNEL", raising=False)

    def settings():
        return policy.current().kernel, policy.current().graphs

    forced = {"aten": ("aten", False), "aten+graphs": ("aten", True), None: (None, False)}
    for backend, expected in forced.items():
        with machine.forced(backend):
            assert settings() == expected
        assert settings() == (None, True)


def test_on_the_cpu_there_are_none():
    assert machine.in_graphs(("native", "aten", "reference"), "cpu") == ()
    assert machine.in_graphs(("aten", "triton", "reference"), "cuda") == ("aten+graphs", "triton+graphs")
    with pytest.raises(UsageError, match=r"--backends aten\+graphs: ln_lstm in float32 runs on"):
        cells.run(smoke(cells, cells=("ln_lstm",), backends=("aten+graphs",)))
    with pytest.raises(UsageError, match=r"--backends aten\+graphs does not run all"):
        gnmt_train.run(smoke(gnmt_train, backends=("aten+graphs",)))


def test_the_round_that_records_does_not_count():
    order, keys = [], [("lstm", "aten+graphs"), ("lstm", "aten")]

    def measure(key):
        order.append(key)
        return len(order)

    assert interleave(keys, 2, measure)[keys[0]].tolist() == [5, 7]


def test_all_contenders_keep_theirs(recordings, monkeypatch):
    """However many there are; afterwards there are no more than in training."""
    recordings.limit = 1
    made = []
    record = recordings.record
    recordings.record = lambda *arguments: made.append(1) or record(*arguments)
    names = ("lstm", "ln_lstm", "ln_hyperlstm", "rhn")
    cells.run(smoke(cells, cells=names, backends=("aten+graphs",)))
    assert len(made) == 2 * len(names)
    assert recordings.limit == 1 and count(recordings) == 0


def test_memory_is_measured_without_them(recordings, monkeypatch):
    config = smoke(memory, repeats=1)
    monkeypatch.setattr(memory, "peak_of", lambda contender, config: 1e6)
    assert not any("graphs" in row["backend"] for row in memory.run(config)["rows"])
    with pytest.raises(UsageError, match=r"--backends aten\+graphs: what a graph holds stays"):
        smoke(memory, backends=("aten", "aten+graphs"))
