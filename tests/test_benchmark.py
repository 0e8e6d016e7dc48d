"""The benchmark of the cells: what is counted, in which order, what is reported and what is refused."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rhhn_fairseq import benchmark, cli
from rhhn_fairseq.benchmark import BASELINE, SMOKE, BenchConfig, build_contenders, interleave, matrix_flop
from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.cells.lstm import LSTM
from rhhn_fairseq.errors import UsageError

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_cells.py"

spec = importlib.util.spec_from_file_location("bench_cells", SCRIPT)
bench_cells = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_cells)


def smoke(**changes) -> BenchConfig:
    return BenchConfig(**SMOKE | {"threads": 1} | changes)


def test_flop_of_an_lstm_by_hand():
    # Four gates, each with an input matrix of 5x8 and a recurrent one of 8x8, for 4 steps of 3 sequences:
    # 2 operations a weight and row forward, 4 backward.
    by_hand = 6 * (4 * 3) * 4 * (5 * 8 + 8 * 8)
    assert by_hand == 29_952
    assert matrix_flop(nn.LSTM(5, 8), T=4, B=3) == by_hand
    assert matrix_flop(build_cell("lstm", 5, 8), T=4, B=3) == by_hand
    # Normalisation has parameters but multiplies no matrix.
    assert matrix_flop(build_cell("ln_lstm", 5, 8), T=4, B=3) == by_hand


def test_flop_of_a_highway_network_by_hand():
    # One input matrix of 5x16 and a recurrent one of 8x16 in each of 2 layers.
    by_hand = 6 * (4 * 3) * (5 * 16 + 2 * 8 * 16)
    assert by_hand == 24_192
    assert matrix_flop(build_cell("rhn", 5, 8, rhn_depth=2), T=4, B=3) == by_hand


def test_flop_at_the_papers_size():
    """0.31 T for the recurrent part of the LSTM and 1.2 times as much for the LN HyperLSTM."""
    with torch.device("meta"):
        lstm = matrix_flop(build_cell("lstm", 50, 1000), T=100, B=128)
        hyper = matrix_flop(build_cell("ln_hyperlstm", 50, 1000, hyper_embed_size=16), T=100, B=128)
    assert lstm == 6 * 12_800 * 4_200_000
    assert 1.19 < hyper / lstm < 1.25


@pytest.mark.parametrize("name", [BASELINE, *CELLS])
def test_flop_is_what_torch_counts(name):
    """In the plain loop; a kernel may merge products and so multiply zeros too, which is no work done."""
    config = smoke()
    module = build_contenders(config)[name]
    x = torch.randn(config.length, config.batch, config.input)
    if name == BASELINE:
        # torch counts nothing inside its own LSTM on the CPU, so one is put together from linear maps.
        linear = [
            nn.Linear(w.shape[1], w.shape[0], bias=False) for w in (module.weight_ih_l0, module.weight_hh_l0)
        ]

        def module_forward(x):
            return linear[0](x), linear[1](torch.zeros(config.length, config.batch, config.hidden))
    else:
        module_forward = module
    with benchmark.reference_backend(), FlopCounterMode(display=False) as counter:
        module_forward(x)
    assert 3 * counter.get_total_flops() == matrix_flop(module, config.length, config.batch)


def test_contenders_take_turns_and_the_first_round_does_not_count():
    order = []

    def measure(name):
        order.append(name)
        return len(order), 10 * len(order)

    found = interleave(["a", "b", "c"], 2, measure)
    assert order == ["a", "b", "c"] * 3
    assert found["a"].tolist() == [[4, 40], [7, 70]]
    assert found["c"].tolist() == [[6, 60], [9, 90]]


def test_figures_of_the_report(monkeypatch):
    """Medians of the rounds; ratios are taken within a round before their median is."""
    seconds = {BASELINE: [[1, 1], [2, 2], [3, 5]], "lstm": [[2, 4], [3, 1], [1, 9]]}
    seconds = {name: np.array(rounds, dtype=float) for name, rounds in seconds.items()}
    monkeypatch.setattr(benchmark, "interleave", lambda names, repeats, measure: seconds)
    report = benchmark.run(smoke(cells=("lstm",)))
    base, lstm = report["timings"]
    assert (base["cell"], base["ratio"], base["ratio_min"], base["ratio_max"]) == (BASELINE, 1.0, 1.0, 1.0)
    assert (lstm["forward_ms"], lstm["backward_ms"], lstm["total_ms"]) == (2000, 4000, 6000)
    assert (lstm["ratio_min"], lstm["ratio"], lstm["ratio_max"]) == (1.0, 1.25, 3.0)
    assert lstm["gflop"] == 29_952 / 1e9
    assert lstm["gflop_per_s"] == pytest.approx(29_952 / 1e9 / 6)
    # W_x, W_h and b; torch's LSTM has two biases.
    assert lstm["parameters"] == 5 * 32 + 8 * 32 + 32 == base["parameters"] - 32
    assert lstm["seconds"] == [[2, 4], [3, 1], [1, 9]]


def test_every_cell_is_checked_and_timed():
    report = benchmark.run(smoke())
    assert [timing["cell"] for timing in report["timings"]] == [BASELINE, *CELLS]
    for timing in report["timings"]:
        assert 0 < timing["errors"]["float32"] < 1e-5
        assert np.shape(timing["seconds"]) == (SMOKE["repeats"], 2)
        assert np.min(timing["seconds"]) > 0
    assert report["machine"]["threads"] == 1
    assert report["machine"]["torch"] == torch.__version__
    assert report["settings"] == json.loads(json.dumps(vars(smoke()))) | {"cells": tuple(CELLS)}


def test_bfloat16_is_checked_in_both_types():
    report = benchmark.run(smoke(cells=("lstm", "hyperrnn_full"), dtype="bfloat16"))
    assert [timing["cell"] for timing in report["timings"]] == [BASELINE, "lstm", "hyperrnn_full"]
    for timing in report["timings"]:
        assert timing["errors"]["float32"] < 1e-5 < timing["errors"]["bfloat16"]


def test_program_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "report.json"
    bench_cells.main(["--smoke", "--threads", "1", "--cells", "gru,ln_hyperlstm", "--json", str(path)])
    machine, sizes, header, *rows = capsys.readouterr().out.splitlines()
    report = json.loads(path.read_text())
    # No half-written file is left beside it.
    assert list(tmp_path.iterdir()) == [path]
    assert f"torch {torch.__version__}, date {report['machine']['date']}" in machine
    assert "threads 1" in machine and report["machine"]["cpu"] in machine
    assert sizes.startswith("hidden 8, input 5, batch 3, length 4,")
    assert header.split()[:3] == ["cell", "backend", "parameters"]
    assert len({len(line) for line in (header, *rows)}) == 1
    for row, timing in zip(rows, report["timings"], strict=True):
        texts = row.split()
        assert texts[0] == timing["cell"]
        assert texts[1] == ("torch" if timing["cell"] == BASELINE else timing["backend"])
        assert int(texts[2].replace(",", "")) == timing["parameters"]
        assert texts[6] == f"{timing['ratio']:.2f}"
        assert texts[7] == f"{timing['ratio_min']:.2f}..{timing['ratio_max']:.2f}"
        assert float(texts[10]) == pytest.approx(timing["errors"]["float32"], rel=0.1)
    assert [row.split()[0] for row in rows] == [BASELINE, "gru", "ln_hyperlstm"]


def test_smoke_leaves_given_sizes_alone(capsys):
    bench_cells.main(["--smoke", "--threads", "1", "--cells", "elman", "--batch", "2", "--repeats", "1"])
    assert "hidden 8, input 5, batch 2, length 4," in capsys.readouterr().out


def test_program_as_its_users_start_it():
    command = [sys.executable, SCRIPT, "--smoke"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()[3:]] == [BASELINE, *CELLS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "0"], "hidden=0 is too small, the smallest is 1"),
        (["--repeats", "0"], "repeats=0 is too small, the smallest is 1"),
        (["--threads", "-1"], "threads=-1 is too small, the smallest is 0"),
        (["--hyper-size", "9"], "hyper_size=9 is larger than hidden_size=8"),
        (["--length", "1000000000000"], "not enough memory"),
        (["--cells", "lstm,lstmm"], "unknown cell 'lstmm', choose from elman, gru, "),
        (["--cells", ""], "unknown cell ''"),
        (["--cells", "gru,gru"], "cells=gru,gru names a cell twice"),
        (["--dtype", "float16"], "dtype='float16' is unknown, choose from float32, bfloat16"),
        (["--device", "tpu"], "device='tpu' is unknown, choose from cpu, cuda"),
        (["--device", "meta"], "device='meta' is unknown, choose from cpu, cuda"),
        (["--device", "cuda:99"], "device='cuda:99', but torch finds"),
        (["--json", "/nowhere/report.json"], "--json /nowhere/report.json: there is no directory /nowhere"),
        (["--json", "/"], "--json / is a directory"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, message, capsys):
    assert cli.run(lambda: bench_cells.main(["--smoke", *arguments])) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_unwritable_json_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UsageError, match="cannot be written .No space left on device"):
        benchmark.write_json({}, tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []


def _off_by_one_percent(y):
    return y * 1.01


def _doubled(y):
    return 2 * y


def _without_gradient(y):
    return y.detach() + 0 * y


def _not_finite(y):
    return torch.cat([y[:-1], y[-1:] * float("nan")])


@pytest.mark.parametrize(
    ("dtype", "spoil"),
    [
        (torch.float32, _off_by_one_percent),
        (torch.float32, _without_gradient),
        (torch.float32, _not_finite),
        (torch.bfloat16, _doubled),
        (torch.bfloat16, _without_gradient),
        (torch.bfloat16, _not_finite),
    ],
)
def test_a_wrong_cell_is_not_timed(dtype, spoil, monkeypatch):
    """Wrong in one type only, as a kernel would be; bfloat16 itself is off by more than a percent."""
    forward = LSTM.forward

    def wrong(self, x_TBC, *rest):
        y, state = forward(self, x_TBC, *rest)
        return (spoil(y) if x_TBC.dtype == dtype else y), state

    def never(*arguments):
        raise AssertionError("a wrong cell was timed")

    monkeypatch.setattr(LSTM, "forward", wrong)
    monkeypatch.setattr(benchmark, "time_once", never)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UsageError, match=f"^lstm is wrong and will not be timed: in {name} the "):
        benchmark.run(smoke(cells=("gru", "lstm"), dtype="bfloat16"))


def test_a_missing_gradient_is_an_infinite_error():
    exact = {"output": torch.ones(2), "gradient of weight": torch.ones(2)}
    error = benchmark.largest_error({"output": torch.ones(2)}, exact)
    assert error == (float("inf"), "gradient of weight")
    # What is zero on both sides is right, as the gradient of a recurrent matrix over a single step.
    zero = {"output": torch.zeros(2)}
    assert benchmark.largest_error(zero, zero) == (0.0, "output")


def test_the_check_reaches_every_parameter():
    """Also those behind maps that start at zero: each gradient of each contender is different from zero."""
    config = smoke(cells=(*CELLS, "hyperrnn_full"))
    x, gradient = benchmark.draw_batch(config, torch.float32)
    for name, module in build_contenders(config).items():
        found = benchmark.results(module, x, gradient, rows=2)
        assert len(found) == 2 + len(list(module.parameters()))
        assert all(part.any() for part in found.values()), name


def test_nothing_is_left_changed(monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    before = torch.get_num_threads(), torch.get_rng_state(), torch.backends.cudnn.allow_tf32
    benchmark.run(smoke(cells=("elman",)))
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.backends.cudnn.allow_tf32 == before[2]
    assert os.environ["RHHN_KERNEL"] == "reference"
    monkeypatch.delenv("RHHN_KERNEL")
    benchmark.run(smoke(cells=("elman",)))
    assert "RHHN_KERNEL" not in os.environ
