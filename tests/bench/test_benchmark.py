"""The benchmarks of single layers: what is counted, in which order, what is reported and what is refused."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import script_cli
from helpers.cli import HANGS
from helpers.graph_imitation import imitate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rhhn_fairseq import cli
from rhhn_fairseq.bench import cells, floors, parity, report
from rhhn_fairseq.bench.cells import SMOKE, Config
from rhhn_fairseq.bench.contenders import BASELINE, batch_for, build_layer, check_contenders, contenders_of
from rhhn_fairseq.bench.external import EXTERNALS, External, find_externals
from rhhn_fairseq.bench.floors import Product, SequentialFloor, matrix_flop, products_of
from rhhn_fairseq.bench.machine import forced, lstm_algorithm, measuring, name_algorithm
from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.cells.lstm import LSTM
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy

SCRIPT = script_cli.SCRIPTS / "bench.py"
bench = script_cli.load("bench")


def smoke(**changes) -> Config:
    return Config(**SMOKE | {"threads": 1} | changes)


def rows_of(results: dict) -> list[tuple[str, str, str]]:
    return [(row["cell"], row["backend"], row["dtype"]) for row in results["rows"]]


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
    module = build_layer(name, config)
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
    with forced("reference"), FlopCounterMode(display=False) as counter:
        module_forward(x)
    assert 3 * counter.get_total_flops() == matrix_flop(module, config.length, config.batch)


def test_products_of_an_lstm_by_hand():
    with torch.device("meta"):
        cell = build_cell("lstm", 5, 8)
    assert products_of(cell, B=3) == [
        Product(1, rows=3, inner=5, columns=32, hoisted=True),
        Product(1, rows=3, inner=8, columns=32, hoisted=False),
    ]


@pytest.mark.parametrize("name, rank", [*((name, 1) for name in CELLS), ("hyperrhn", 3), ("ln_hyperlstm", 2)])
def test_the_products_that_are_timed_are_those_that_are_counted(name, rank):
    """The sequential floor's products have the operations of the formula, and torch counts as many in it."""
    config = smoke(hyper_rank=rank)
    with torch.device("meta"):
        cell = build_layer(name, config)
    products = products_of(cell, config.batch)
    flop = matrix_flop(cell, config.length, config.batch)
    assert sum(product.flop(config.length) for product in products) == flop
    floor = SequentialFloor(products, config.length, "cpu", torch.float32)
    with FlopCounterMode(display=False) as counter:
        forward, backward = floor.time()
    assert counter.get_total_flops() == flop
    assert forward > 0 and backward > 0


def test_floors_on_a_gpu_are_graphs_and_long_enough_to_time(monkeypatch):
    """As far as the CPU can show it, where graphs are imitated."""
    recorded = []

    def record(call, values):
        recorded.append(call)
        return imitate(call, values)

    monkeypatch.setattr(floors, "records", lambda device: True)
    monkeypatch.setattr(floors.graphs, "record", record)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    floor = SequentialFloor([Product(1, 3, 5, 8, hoisted=False)], 4, "cpu", torch.float32)
    with FlopCounterMode(display=False) as counter:
        floor.time()
    assert len(recorded) == 2 and counter.get_total_flops() == Product(1, 3, 5, 8, hoisted=False).flop(4)
    ceiling = floors.Ceiling(16, "cpu", torch.float32)
    with FlopCounterMode(display=False) as counter:
        seconds, backward = ceiling.time()
    assert counter.get_total_flops() == 20 * ceiling.flop and seconds > 0 and backward == 0
    # The twenty took 40 seconds.
    times = iter((2.0, 42.0))
    monkeypatch.setattr(floors, "now", lambda device: next(times))
    assert ceiling.time() == (2.0, 0.0)


def test_figures_of_the_report(monkeypatch):
    """Medians of the rounds; ratios are taken within a round before their median is."""
    seconds = {
        (BASELINE, "oneDNN", "float32"): [[1, 1], [2, 2], [3, 5]],
        ("lstm", "aten", "float32"): [[2, 4], [3, 1], [1, 9]],
        ("lstm", "reference", "float32"): [[2, 1], [2, 2], [4, 16]],
        # A ceiling of 2 * 64**3 operations in 0.5 s.
        ("GEMM", "float32"): [[0.5, 0]] * 3,
        ("lstm", "float32"): [[1, 2], [1, 1], [1, 4]],
    }
    seconds = {key: np.array(rounds, dtype=float) for key, rounds in seconds.items()}
    monkeypatch.setattr(cells, "interleave", lambda keys, repeats, measure: seconds)
    monkeypatch.setattr("rhhn_fairseq.bench.contenders.lstm_algorithm", lambda module, x: "oneDNN")
    base, lstm, reference = cells.run(smoke(cells=("lstm",), backends=("aten", "reference")))["rows"]
    assert (base["cell"], base["ratio"], base["ratio_min"], base["ratio_max"]) == (BASELINE, 1.0, 1.0, 1.0)
    assert (lstm["forward_ms"], lstm["backward_ms"], lstm["total_ms"]) == (2000, 4000, 6000)
    assert (lstm["ratio_min"], lstm["ratio"], lstm["ratio_max"]) == (1.0, 1.25, 3.0)
    # Of 2, 1 and 0.5.
    assert lstm["reference_ratio"] == 1.0
    assert reference["reference_ratio"] is base["reference_ratio"] is lstm["dtype_ratio"] is None
    assert lstm["gflop"] == 29_952 / 1e9
    assert lstm["gflop_per_s"] == pytest.approx(29_952 / 1e9 / 6)
    # Of the seconds 6, 4 and 10; the sequential floor takes 3, 2 and 5.
    assert lstm["gemm_percent"] == pytest.approx(100 * 0.5 * 29_952 / (2 * 64**3) / 6)
    assert lstm["sequential_percent"] == 50.0
    # W_x, W_h and b; torch's LSTM has two biases.
    assert lstm["parameters"] == 5 * 32 + 8 * 32 + 32 == base["parameters"] - 32
    assert lstm["seconds"] == [[2, 4], [3, 1], [1, 9]]


def test_every_cell_is_checked_and_timed_on_every_backend():
    results = cells.run(smoke())
    names = list(dict.fromkeys(row["cell"] for row in results["rows"]))
    assert names == [BASELINE, *CELLS]
    for row in results["rows"]:
        assert 0 < row["errors"]["float32"] == row["error"] < 1e-5
        assert np.shape(row["seconds"]) == (SMOKE["repeats"], 2)
        assert np.min(row["seconds"]) > 0
        assert row["gemm_percent"] > 0 and row["sequential_percent"] > 0
    for name in CELLS:
        own = [row["backend"] for row in results["rows"] if row["cell"] == name]
        assert own[-1] == "reference" and len(set(own)) == len(own)
    for backend in ("torch_nn", "aten", "reference"):
        assert ("lstm", backend, "float32") in rows_of(results)
    assert results["machine"]["threads"] == 1
    assert results["machine"]["torch"] == torch.__version__
    assert results["settings"] == vars(smoke())
    assert results["notes"][-1].startswith("GEMM of 64 in float32: ")


def test_a_loop_is_forced_where_something_else_would_run():
    def forces(name, hidden):
        results = contenders_of(name, smoke(hidden=hidden, backends=("reference",)))
        return [contender.forces for contender in results]

    assert forces("gru", 8) == ["reference"] and forces("gru", 400) == [None]
    assert forces("elman", 8) == [None] and forces("rhn", 8) == ["reference"]


def test_types_stand_beside_each_other():
    names, dtypes = ("lstm", "hyperrnn_full"), ("float32", "bfloat16")
    results = cells.run(smoke(cells=names, dtype=dtypes, backends=("reference",)))
    layers = {(row["cell"], row["dtype"]): row for row in results["rows"]}
    assert list(layers) == [(name, dtype) for name in (BASELINE, *names) for dtype in dtypes]
    for (_, dtype), row in layers.items():
        assert row["errors"]["float32"] < 1e-5
        assert row["error"] == row["errors"][dtype]
        assert (row["dtype_ratio"] is None) == (dtype == "float32")
    assert layers["lstm", "bfloat16"]["error"] > 1e-5


def test_one_type_alone_is_checked_in_float32_too():
    results = contenders_of("ln_lstm", smoke(dtype=("bfloat16",)))
    for errors in check_contenders(results, smoke(dtype=("bfloat16",))).values():
        assert errors["float32"] < 1e-5 < errors["bfloat16"]


def test_detached_cells_are_checked_with_the_same_coins():
    config = smoke(h_detach=0.5, length=9)
    results = contenders_of("ln_lstm", config)
    assert [contender.module.config.h_detach for contender in results] == [0.5] * len(results)
    for errors in check_contenders(results, config).values():
        assert errors["float32"] < 1e-5


class Double(nn.Module):
    """Somebody else's LSTM: in float64 as it should be, otherwise as wrong as it is told to be."""

    def __init__(self, config, factor):
        super().__init__()
        self.lstm, self.factor = nn.LSTM(config.input, config.hidden), factor

    def forward(self, x):
        y, state = self.lstm(x)
        return (y if x.dtype == torch.float64 else self.factor * y), state


def test_other_packages_take_part_where_they_work(tmp_path, monkeypatch):
    (tmp_path / "somebodys").mkdir()
    (tmp_path / "somebodys" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setitem(EXTERNALS, "good", External("somebodys", "lstm", lambda c: Double(c, 1)))
    monkeypatch.setitem(EXTERNALS, "wrong", External("somebodys", "lstm", lambda c: Double(c, 2)))
    monkeypatch.setitem(EXTERNALS, "broken", External("somebodys", "lstm", lambda c: 1 / 0))
    monkeypatch.setitem(EXTERNALS, "gpu", External("somebodys", "lstm", None, devices=("cuda",)))
    assert "good" not in find_externals("cpu")
    results = cells.run(smoke(cells=("elman",), external_path=str(tmp_path)))
    names = [row["cell"] for row in results["rows"]]
    assert "good" in names and not {"wrong", "broken", "gpu"} & set(names)
    good, base = (results["rows"][names.index(name)] for name in ("good", BASELINE))
    assert good["gflop"] == base["gflop"] and good["sequential_percent"] > 0
    left_out = [note for note in results["notes"] if "was left out" in note]
    assert left_out[0].startswith("wrong was left out: wrong is wrong and will not be timed")
    assert left_out[1] == "broken was left out: division by zero"


def test_the_algorithm_of_torchs_lstm_is_named():
    assert lstm_algorithm(nn.LSTM(5, 8).double(), torch.randn(4, 3, 5).double()) == "ATen"
    assert name_algorithm({"lstm", "mkldnn_rnn_layer"}, set()) == "oneDNN"
    assert name_algorithm({"_cudnn_rnn"}, {"ampere_sgemm_128x64_nn"}) == "cuDNN standard"
    assert name_algorithm({"_cudnn_rnn"}, {"RNN_blockPersist_fp_LSTM"}) == "cuDNN persistent"
    assert name_algorithm({"_cudnn_rnn", "empty"}, set()) == "cuDNN, algorithm unknown"


def test_program_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    path, picture = tmp_path / "report.json", tmp_path / "report.png"
    options = ["--threads", "1", "--cells", "gru,ln_hyperlstm", "--backends", "reference"]
    bench.main(["cells", "--smoke", *options, "--json", str(path), "--png", str(picture)])
    machine, settings, _, header, line, *rows, _, note = capsys.readouterr().out.splitlines()
    results = json.loads(path.read_text())
    assert path.read_text().endswith("}\n")
    # No half-written file is left beside them.
    assert sorted(tmp_path.iterdir()) == [path, picture]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"torch {torch.__version__}," in machine and f"date {results['machine']['date']}" in machine
    assert "threads 1" in machine and results["machine"]["cpu"] in machine
    assert "hidden 8, input 5, batch 3, length 4," in settings and "cells gru,ln_hyperlstm" in settings
    # A single type is beside no other.
    assert "/ nn.LSTM" in header and "/ first type" not in header
    assert len({len(text) for text in (header, line, *rows)}) == 1
    titles = [text.strip() for text in header.split("|")[1:-1]]
    for text, row in zip(rows, results["rows"], strict=True):
        shown = dict(zip(titles, (cell.strip() for cell in text.split("|")[1:-1]), strict=True))
        assert (shown["cell"], shown["backend"]) == (row["cell"], row["backend"])
        assert int(shown["parameters"].replace(",", "")) == row["parameters"]
        assert shown["/ nn.LSTM"] == f"{row['ratio']:.2f}"
        assert shown["min..max"] == f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}"
        assert float(shown["error"]) == pytest.approx(row["error"], rel=0.1)
    assert [row["cell"] for row in results["rows"]] == [BASELINE, "gru", "ln_hyperlstm"]
    assert note == results["notes"][0]


def test_smoke_leaves_given_sizes_alone(capsys):
    bench.main(["cells", "--smoke", "--threads", "1", "--cells", "elman", "--batch", "2", "--repeats", "1"])
    assert "hidden 8, input 5, batch 2, length 4," in capsys.readouterr().out


def test_program_as_its_users_start_it():
    command = [sys.executable, SCRIPT, "cells", "--smoke", "--cells", "irnn,rhn", "--backends", "reference"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [text.split("|")[1].strip() for text in result.stdout.splitlines() if text.startswith("| ")]
    assert rows == ["cell", BASELINE, "irnn", "rhn"]


def test_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--help"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    for name in ("cells", "lm", "gnmt-train", "gnmt-decode", "memory", "products", "scaling"):
        assert f"    {name}" in listed
    with pytest.raises(SystemExit):
        bench.main(["cells", "--help"])
    assert "--ceiling CEILING" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "0"], "error: hidden=0 is too small, the smallest is 1"),
        (["--repeats", "0"], "repeats=0 is too small, the smallest is 1"),
        (["--threads", "-1"], "threads=-1 is too small, the smallest is 0"),
        (["--hyper-size", "9"], "hyper_size=9 is larger than hidden_size=8"),
        (["--length", "1000000", "--batch", "1000000"], "not enough memory"),
        (["--length", "1000000000000"], "length=1000000000000 is too large, the largest is 1000000"),
        (["--cells", "lstm,lstmm"], "--cells lstmm is unknown, choose from elman, grid_rhn, gru, "),
        (["--cells", ""], "--cells '' is unknown"),
        (["--cells", "gru,gru"], "--cells gru,gru names one twice"),
        (["--dtype", "float16"], "--dtype float16 is unknown, choose from float32, bfloat16"),
        (["--backends", "natve,reference"], "--backends natve: there is no such backend, choose from native"),
        (["--backends", "aten"], "--backends aten: grid_rhn in float32 runs on reference only"),
        (["--compile", "all"], "compile='all' is unknown, choose from none, step, sequence"),
        (["--external-path", "/nowhere"], "--external-path /nowhere: is not a directory"),
        (
            ["--external-path", "/dev"],
            "--external-path /dev: holds none of flashrnn, haste_pytorch, labml_nn",
        ),
        (["--device", "tpu"], "device='tpu' is unknown, choose from cpu, cuda"),
        (["--device", "meta"], "device='meta' is unknown, choose from cpu, cuda"),
        (["--device", "cpu:5"], "device='cpu:5' is unknown, choose from cpu, cuda"),
        (["--device", "cuda:99"], "device='cuda:99', but torch finds"),
        (["--json", "/nowhere/report.json"], "--json /nowhere/report.json: there is no directory /nowhere"),
        (["--png", "/"], "--png / is a directory"),
        (["--png", "a.svg"], "--png a.svg: the name of the picture ends in .png"),
        (["--json", "a.png", "--png", "./a.png"], "--png ./a.png: is the file of --json, name another"),
        (["--threads", "99999999999"], "threads=99999999999 is too large, the largest is 4096"),
        (["--hidden", "99999999999999999999"], "hidden=99999999999999999999 is too large"),
        (["--backends", "aten,aten"], "--backends aten,aten names one twice"),
        (["--smok"], "unrecognized arguments: --smok: no such option here, did you mean --smoke"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, message, capsys):
    assert cli.run(lambda: bench.main(["cells", "--smoke", *arguments])) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_backend_from_the_environment_is_refused():
    with policy.using(kernel="aten"), pytest.raises(UsageError, match="RHHN_KERNEL=aten: benchmarks force"):
        bench.main(["cells", "--smoke"])


@pytest.mark.parametrize("variable", ["RHHN_MATMUL", "RHHN_MATMUL_PRECISION"])
def test_products_that_are_unknown_are_one_line(variable, monkeypatch, capsys):
    """Also where none is large enough for a choice."""
    monkeypatch.setenv(variable, "nope")
    assert cli.run(lambda: bench.main(["cells", "--smoke", "--cells", "lstm"])) == 1
    assert capsys.readouterr().err.startswith(f"error: {variable}=nope is unknown, choose from ")


def test_products_are_as_precise_as_asked_for(monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setenv("RHHN_MATMUL_PRECISION", "medium")
    try:
        report = cells.run(smoke(cells=("lstm",)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert report["machine"]["float32 products"] == "medium"


def test_unwritable_json_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UsageError, match="cannot be written .No space left on device"):
        report.write_json({}, tmp_path / "report.json")
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
    monkeypatch.setattr(cells, "time_pass", never)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UsageError, match=f"^lstm is wrong and will not be timed: in {name} the "):
        cells.run(smoke(cells=("gru", "lstm"), dtype=("bfloat16",), backends=("reference",)))


def test_the_check_reaches_every_parameter():
    """Also those behind maps that start at zero: each gradient of each contender is different from zero."""
    config = smoke()
    x, gradient = batch_for(config, "float32")
    for name in (BASELINE, *CELLS, "hyperrnn_full"):
        module = build_layer(name, config)
        results = parity.pass_results(module, x, gradient, rows=2)
        assert len(results) == 2 + len(list(module.parameters()))
        assert all(part.any() for part in results.values()), name


def test_cudnn_multiplies_narrow_types_by_matrix_units(monkeypatch):
    """Which it does in bfloat16 only where it may round float32, and that it may not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    config, results = smoke(dtype=("float32", "bfloat16")), {}
    with measuring(config):
        for contender in contenders_of(BASELINE, config):
            for other in (None, "float32"):
                with contender.running(other):
                    results[contender.dtype, other] = torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    assert results == {
        ("float32", None): False,
        ("float32", "float32"): False,
        ("bfloat16", None): True,
        ("bfloat16", "float32"): False,
    }


def test_every_run_draws_the_same_numbers():
    drawn = []
    for _ in range(2):
        with measuring(smoke()):
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


def test_nothing_is_left_changed(monkeypatch):
    monkeypatch.setenv("RHHN_MATMUL", "torch")
    before = torch.get_num_threads(), torch.get_rng_state(), torch.backends.cudnn.allow_tf32
    report = cells.run(smoke(cells=("elman",), threads=before[0] + 1))
    assert report["machine"]["threads"] == before[0] + 1
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.backends.cudnn.allow_tf32 == before[2]
    assert os.environ["RHHN_MATMUL"] == "torch"
    monkeypatch.delenv("RHHN_MATMUL")
    cells.run(smoke(cells=("elman",)))
    assert "RHHN_KERNEL" not in os.environ
