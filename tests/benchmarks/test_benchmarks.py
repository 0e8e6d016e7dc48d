"""The benchmarks: the order of the contenders, what is counted, what is checked, and what is reported."""

import json

import numpy as np
import pytest
import torch
from helpers.graph_imitation import imitated_graphs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    cells,
    lm,
    machine,
    memory,
    parity,
    report,
    timing,
    translation,
)
from benchmarks.contenders import (
    BASELINE,
    batch_for,
    build_layer,
    check_contenders,
    contenders_of,
    pass_results,
)
from benchmarks.floors import Floor, products_of
from benchmarks.machine import forced, measuring
from rhhn_fairseq.cells import CELLS
from rhhn_fairseq.cells.lstm import LSTM
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy

MODULES = (cells, lm, memory, translation)


def smoke(module, **changes):
    return module.Config(**module.SMOKE | {"threads": 1} | changes)


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch):
    order = []

    def measure(name):
        order.append(name)
        return len(order) - 1, 10 * (len(order) - 1)

    # As in training: fresh memory would slow the contender that happens to run first.
    monkeypatch.setattr(timing, "keep_freed_memory", lambda: order.append("kept"))
    results = timing.interleave(["a", "b", "c"], 2, measure)
    assert order == ["kept"] + ["a", "b", "c"] * 3
    assert results["a"].tolist() == [[4, 40], [7, 70]]
    assert results["c"].tolist() == [[6, 60], [9, 90]]
    # CUDA graphs are recorded in the second call, so two rounds do not count.
    order.clear()
    keys = [("lstm", "aten+graphs"), ("lstm", "aten")]
    assert timing.interleave(keys, 2, lambda key: measure(key)[0])[keys[0]].tolist() == [5, 7]


def test_forward_and_backward_are_timed_from_no_gradients(monkeypatch):
    clock = iter([1.0, 4.0, 11.0] * 2)
    monkeypatch.setattr(timing, "now", lambda device: next(clock))
    layer, gradients = nn.LSTM(2, 3), []
    for _ in range(2):
        assert timing.time_pass(layer, torch.ones(4, 1, 2), torch.ones(4, 1, 3)) == (3.0, 7.0)
        gradients.append(layer.weight_hh_l0.grad.clone())
    assert torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize("name, rank", [*((name, 1) for name in CELLS), ("hyperrhn", 3), ("ln_hyperlstm", 2)])
def test_flop_of_the_equations_and_of_the_floor_are_what_torch_counts(name, rank):
    config = smoke(cells, hyper_rank=rank)
    with torch.device("meta"):
        own = products_of(build_layer(name, config), config.batch)
    flop = sum(product.flop(config.length) for product in own)
    x = torch.randn(config.length, config.batch, config.input)
    with forced("reference"), FlopCounterMode(display=False) as counter:
        build_layer(name, config)(x)
    assert 3 * counter.get_total_flops() == flop
    floor = Floor(own, config.length, "cpu", torch.float32)
    with FlopCounterMode(display=False) as counter:
        forward, backward = floor.time()
    assert counter.get_total_flops() == flop and forward > 0 and backward > 0


def test_figures_of_the_report(monkeypatch):
    seconds = {
        (BASELINE, "torch", "float32"): [[1, 1], [2, 2], [3, 5]],
        ("lstm", "aten", "float32"): [[2, 4], [3, 1], [1, 9]],
        ("lstm", "reference", "float32"): [[2, 1], [2, 2], [4, 16]],
        (BASELINE, "float32"): [[1, 2], [1, 1], [1, 4]],
        ("lstm", "float32"): [[1, 2], [1, 1], [1, 4]],
    }
    seconds = {key: np.array(rounds, dtype=float) for key, rounds in seconds.items()}
    monkeypatch.setattr(cells, "interleave", lambda keys, repeats, measure: seconds)
    rows = cells.run(smoke(cells, cells=("lstm",), backends=("aten", "reference")))["rows"]
    base, lstm, reference = rows
    assert (base["name"], base["/ nn.LSTM"]) == (BASELINE, [1.0, 1.0, 1.0])
    assert (lstm["forward ms"], lstm["backward ms"], lstm["total ms"]) == (2000, 4000, 6000)
    assert lstm["/ nn.LSTM"] == [1.25, 1.0, 3.0]
    # Of 2, 1 and 0.5.
    assert lstm["/ reference"] == 1.0 and reference["/ reference"] is base["/ reference"] is None
    assert lstm["GFLOP/s"] == pytest.approx(29_952 / 1e9 / 6)
    # Of the seconds 6, 4 and 10; the floor takes 3, 2 and 5.
    assert lstm["% of floor"] == 50.0
    # torch's LSTM has two biases.
    assert lstm["parameters"] == 5 * 32 + 8 * 32 + 32 == base["parameters"] - 32
    assert lstm[report.ROUNDS] == [[2, 4], [3, 1], [1, 9]]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("changes", [{}, pytest.param({"what": "decode"}, marks=pytest.mark.slow)], ids=str)
def test_every_benchmark_checks_times_and_reports(module, changes, tmp_path, capsys, monkeypatch):
    if changes and module is not translation:
        pytest.skip("is no option of it")
    monkeypatch.setattr(translation, "DECODED", (1, 2))
    options = [f"--{name}={value}" for name, value in changes.items()]
    path = tmp_path / "report.json"
    report.main(module, ["--smoke", "--threads", "1", "--repeats", "1", "--json", str(path), *options])
    results = json.loads(path.read_text())
    _, settings, _, header, line, *shown = capsys.readouterr().out.splitlines()
    assert "threads 1" in settings and len({len(text) for text in (header, line, shown[0])}) == 1
    assert results["machine"]["torch"] == torch.__version__ and "commit" in results["machine"]
    assert results["rows"] and list(tmp_path.iterdir()) == [path]
    for row in results["rows"]:
        assert 0 <= row["error"] < 1e-4 and np.min(row[report.ROUNDS]) > 0
    by = ("name", "cell", "backend", "sentences")
    named = [tuple(row.get(key) for key in by) for row in results["rows"]]
    assert len(named) == len(results["rows"])
    if module is cells:
        assert {row["name"] for row in results["rows"]} == {BASELINE, *CELLS}
        assert {row["backend"] for row in results["rows"] if row["name"] == "lstm"} >= {
            "torch_nn", "aten", "reference"
        }  # fmt: skip
    if module is translation:
        count = results["rows"][-1]["sentences"] * 3 * (1 if changes else 2)
        assert results["rows"][-1]["tokens/s"] == pytest.approx(1e3 * count / results["rows"][-1]["total ms"])


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (cells, ["--cells", "lstm,lstmm"], "--cells lstmm is unknown, choose from elman, grid_rhn, gru, "),
        (cells, ["--backends", "aten"], "--backends aten: grid_rhn in float32 runs on reference only"),
        (cells, ["--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no directory /nowhere"),
    ],
)
def test_mistakes_end_in_one_line(module, arguments, message, capsys):
    assert cli.run(lambda: report.main(module, ["--smoke", *arguments])) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "fault, dtype",
    [("doubled", torch.bfloat16), ("no gradient", torch.float32), ("not finite", torch.float32)],
)
def test_a_wrong_cell_is_not_timed(dtype, fault, monkeypatch):
    """Wrong in one type only, as a kernel would be."""
    spoil = {
        "doubled": lambda y: 2 * y,
        "no gradient": lambda y: y.detach() + 0 * y,
        "not finite": lambda y: torch.cat([y[:-1], y[-1:] * float("nan")]),
    }[fault]
    forward = LSTM.forward

    def wrong(self, x_TBC, *rest):
        y, state = forward(self, x_TBC, *rest)
        return (spoil(y) if x_TBC.dtype == dtype and policy.current().kernel != "reference" else y), state

    monkeypatch.setattr(LSTM, "forward", wrong)
    monkeypatch.setattr(cells, "time_pass", None)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UsageError, match=f"^lstm aten .* is wrong and will not be timed: in {name} the "):
        cells.run(smoke(cells, cells=("gru", "lstm"), dtype=("bfloat16",), backends=("aten", "reference")))


def test_the_check_reaches_every_parameter():
    """Also those behind maps that start at zero: each gradient of each contender is different from zero."""
    config = smoke(cells)
    x, gradient = batch_for(config, "float32")
    for name in (BASELINE, *CELLS):
        module = build_layer(name, config)
        results = pass_results(module, x, gradient, rows=2)
        assert len(results) == 2 + len(list(module.parameters()))
        assert all(part.any() for part in results.values()), name


def test_narrow_types_are_checked_in_float32_too_and_a_deep_model_may_err_as_the_loop(monkeypatch):
    config = smoke(cells, dtype=("bfloat16",))
    assert min(check_contenders(contenders_of("ln_lstm", config), config).values()) > 1e-5
    monkeypatch.setitem(parity.TOLERANCES, "bfloat16", 0.1)
    errors = {"aten": 0.2, "reference": 0.3}

    def collect(model):
        off = errors[policy.current().kernel] if model.weight.dtype == torch.bfloat16 else 0.0
        return {"output": model.weight.detach() * (1 + off)}

    model = nn.Linear(8, 8)
    deep = parity.Contender(("deep", "aten"), model, nn.Linear(8, 8).bfloat16(), "bfloat16", "aten")
    deep.module.load_state_dict(model.state_dict())
    assert parity.check([deep], collect)[deep.key] == pytest.approx(0.2, abs=0.02)
    errors["reference"] = 0.15
    with pytest.raises(UsageError, match="^deep aten is wrong and will not be timed: in bfloat16 the output"):
        parity.check([deep], collect)


def test_a_run_leaves_the_settings_as_they_were():
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    drawn = []
    for _ in range(2):
        with measuring(smoke(cells, threads=before[0] + 1)):
            assert torch.get_num_threads() == before[0] + 1
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]
    assert before == (torch.get_num_threads(), torch.backends.cudnn.allow_tf32)


def test_cuda_graphs_are_contenders_of_their_own(monkeypatch):
    monkeypatch.setattr(machine, "records", lambda device: device == "cpu")
    recordings = imitated_graphs(monkeypatch)
    config = smoke(cells, cells=("ln_hyperlstm", "gru"))
    contenders = contenders_of("ln_hyperlstm", config)
    backends = [contender.key[1] for contender in contenders]
    assert backends.index("aten") < backends.index("aten+graphs") < backends.index("reference")
    assert max(check_contenders(contenders, config).values()) < 1e-5 and len(recordings.kept) == 2


def test_a_training_step_trains_every_parameter_and_carries_the_state():
    config = smoke(lm)
    contenders = lm.build_contenders("ln_hyperlstm_ptb", config)
    assert contenders[0].key[0] == BASELINE and contenders[-1].key[1] == "reference"
    for contender in contenders:
        trainee, before = lm.Trainee(contender, config), [p.clone() for p in contender.module.parameters()]
        assert trainee.time_step() > 0 and any(part.any() for part in trainee.carry.after)
        assert trainee.time_step() > 0 and trainee.carry.chunk == 1
        for old, new in zip(before, contender.module.parameters(), strict=True):
            assert not torch.equal(old, new)


def test_the_peak_is_what_a_pass_holds():
    """A pass that fills 64 MB, lets them go and fills 32: the peak is 64, whatever was held before it."""
    held = torch.ones(96 << 20, dtype=torch.uint8)

    def fill():
        for size in (64, 32):
            torch.ones(size << 20, dtype=torch.uint8)

    assert memory.peak_of(fill, held.device) == 64 << 20
