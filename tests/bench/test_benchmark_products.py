"""The benchmark of matrix products: what is timed, its report, and what is refused."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from rhhn_fairseq.bench import products
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.matmul.gemm import available

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"

NAMES = ["x w", "x w packed", "dy w'", "dy w' packed", "x' dy"]


def test_report(tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    path, picture = tmp_path / "report.json", tmp_path / "report.png"
    main(["products", "--smoke", "--threads", "1", "--json", str(path), "--png", str(picture)])
    report = json.loads(path.read_text())
    keys = [(row["shape"], row["product"], row["by"]) for row in report["rows"]]
    shapes = products.SMOKE["shapes"]
    assert keys == [(shape, name, by) for shape in shapes for name in NAMES for by in available()]
    for row in report["rows"]:
        M, K, N = map(int, row["shape"].split("x"))
        assert row["error"] < 1e-6
        assert row["gflop_per_s"] * row["ms"] == pytest.approx(2 * M * K * N / 1e6)
        assert (row["ratio"] == 1.0) == (row["by"] == "torch")
    assert capsys.readouterr().out.splitlines()[3].startswith("| shape ")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_is_made_by_what_it_is_said_to_be_made_by(monkeypatch):
    made = []
    for name in ("mm", "addmm"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, original=original, **k: made.append(a[0].shape) or original(*a, **k)
        )
    for (name, by), (call, _) in products._products(6, 40, 50).items():
        made.clear()
        call()
        rows = {"x": (6, 40), "d": (6, 50)}[name[0]] if name != "x' dy" else (40, 6)
        assert made == ([rows] if by == "torch" else [])


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setattr(products.gemm, "mm", lambda x, w, out: torch.mm(x, w, out=out).mul_(1.01))
    with pytest.raises(UsageError, match="x w of 8x16x48 by .* is wrong and will not be timed"):
        products.run(products.Config(**products.SMOKE, threads=1))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(shapes=("8x9",)), "shapes='8x9' is not a shape; write 128x1000x4000 for example"),
        (dict(shapes=("0x9x9",)), "shapes='0x9x9' is not a shape"),
        (dict(shapes=("8x9x9", "8x9x9")), "--shapes 8x9x9,8x9x9 names one twice"),
        (dict(shapes=(f"{2**64}x1x1",)), "x1x1' is too large, the largest size is 1000000"),
        (dict(repeats=0), "repeats=0 is too small"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        products.Config(**changes)


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="device='cuda', but these products run on the CPU"):
        products.Config(device="cuda")
