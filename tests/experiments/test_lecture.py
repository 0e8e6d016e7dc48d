"""The lecture and the conditioned filter: what is cheap is drawn, and the pages name what exists."""

import json
import re
from pathlib import Path

import numpy as np
import torch

from experiments import conditioned_filter, lecture

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_and_the_notebook_show_every_picture():
    page = (ROOT / "docs/tutorials/lecture.md").read_text()
    assert re.findall(r"^python -m experiments\.lecture (\w+)$", page, re.MULTILINE) == list(lecture.PICTURES)
    notebook = json.loads((ROOT / "docs/tutorials/lecture.ipynb").read_text())
    cells = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    assert re.findall(r"^show\(lecture\.(\w+)\)$", cells, re.MULTILINE) == list(lecture.PICTURES)
    assert {path.stem for path in (ROOT / "docs/tutorials/lecture").glob("*.png")} == set(lecture.PICTURES)


def test_a_picture_is_written(tmp_path):
    lecture.main(["dropout", "--output", str(tmp_path)])
    assert (tmp_path / "dropout.png").read_bytes().startswith(b"\x89PNG")


def test_the_filter_turns_its_knob(monkeypatch):
    """With the knob at rest, what is below the cutoff passes, what is far above it does not."""
    for low, passes in ((200.0, False), (6400.0, True)):
        monkeypatch.setattr(conditioned_filter, "LOWEST", low)
        monkeypatch.setattr(conditioned_filter, "HIGHEST", low)
        x, _, y = conditioned_filter.sounds(np.random.default_rng(1), 4096, 1)
        noise, filtered = (torch.fft.rfft(wave[:, 0, 0]).abs() for wave in (x, y))
        # 1,500 to 2,500 Hz; two poles at 200 Hz leave about (200 / 2000)^2 of it, and the ends of the
        # recording leak some of the resonance.
        band = slice(4096 * 1500 // 16000, 4096 * 2500 // 16000)
        share = float(filtered[band].norm() / noise[band].norm())
        assert 0.9 < share < 1.3 if passes else share < 0.1, share


def test_trainings_are_recorded_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(conditioned_filter, "RATES", (0.01,))
    monkeypatch.setattr(conditioned_filter, "SEEDS", (1,))
    record = tmp_path / "record.json"
    for picture in ([], ["--picture", str(tmp_path / "filter.png")]):
        conditioned_filter.main(["--record", str(record), "--updates", "1", *picture])
        runs = json.loads(record.read_text())
        assert [run["system"] for run in runs] == list(conditioned_filter.SYSTEMS)
    # Equal parameters are the point of the comparison.
    sizes = [run["parameters"] for run in runs]
    assert max(sizes) / min(sizes) < 1.05
    assert f"| HyperLSTM | {sizes[-1]:,} | 0.01 |" in capsys.readouterr().out
    assert (tmp_path / "filter.png").read_bytes().startswith(b"\x89PNG")
