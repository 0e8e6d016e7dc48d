"""The documentation: its tables agree with the source, its Python runs, and the site builds."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.cli.table import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[str]:
    """The blocks of Python in a page of the documentation."""
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks, f"{page} has no block of Python"
    return blocks


@pytest.fixture
def new_cells():
    """Takes the cells that a test registers away again."""
    known = set(CELLS)
    yield
    for name in set(CELLS) - known:
        del CELLS[name]


def test_the_table_has_every_variable_of_the_source():
    sources = [
        *(ROOT / "rhhn_fairseq").rglob("*.py"),
        ROOT / "rhhn_fairseq_autoload.py",
        ROOT / "setup.py",
        ROOT / "tests" / "conftest.py",
    ]
    read = {name for path in sources for name in re.findall(r"\bRHHN_[A-Z]+(?:_[A-Z]+)*\b", path.read_text())}
    listed = re.findall(r"^\| `(RHHN_[A-Z_]+)` \|", (DOCS / "environment.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(read)


def test_every_page_is_in_the_navigation_under_its_title():
    named = re.findall(r'^ +- "?(.*?)"?: (\S+\.md)$', (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
    titles = {name: re.search(r"^# (.*)$", text, re.MULTILINE).group(1) for name, text in pages.items()}
    assert sorted((page, title) for title, page in named) == sorted(titles.items())


@pytest.mark.parametrize(
    ("query", "guide"),
    [
        ("train on my own text", "tutorials/own_text.md"),
        ("replace nn.LSTM", "tutorials/replace_lstm.md"),
        ("truncated bptt", "tutorials/lecture.md"),
        ("kneser-ney", "tutorials/lecture.md"),
    ],
)
def test_a_search_leads_to_the_guide(query, guide):
    # The site's search shows a page if it has every word.
    words = set(re.findall(r"[\w.-]+", (DOCS / guide).read_text().lower()))
    assert set(query.lower().split()) <= words


def test_the_page_of_commands_has_every_command():
    page = (DOCS / "reference/commands.md").read_text()
    assert re.findall(r"^\| `rhhn ([a-z-]+)` \|", page, re.MULTILINE) == list(COMMANDS)


# Exporting takes most of the time of the page of layers.
PAGES = ["../README.md", "index.md", "tutorials/replace_lstm.md"]
PAGES.append(pytest.param("layers.md", marks=pytest.mark.slow))


@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_page_runs(page, tmp_path, monkeypatch):
    if page == "layers.md":
        pytest.importorskip("onnxscript")
    blocks, names = blocks_of(page), {}
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for number, block in enumerate(blocks):
        # The blocks of a page share their names, as for a reader who pastes one after another.
        exec(compile(block, f"{page}, block {number}", "exec"), names)


def test_the_cell_of_the_tutorial_computes_its_equations(new_cells):
    torch.manual_seed(0)
    definition, use = blocks_of("tutorials/add_cell.md")
    # In the package, its file is imported while this one is not complete.
    assert "from rhhn_fairseq.cells import" not in definition
    exec(compile(definition, "add_cell.md", "exec"), {"__name__": "add_cell"})
    exec(compile(use, "add_cell.md, its use", "exec"), {})
    for options in ({}, *CELLS["ugrnn"].tests):
        cell = build_cell("ugrnn", 3, 4, **options).double()
        x, state = torch.randn(6, 2, 3, dtype=torch.float64), (torch.randn(2, 4, dtype=torch.float64),)
        noise = cell.sample_noise(6, 2)
        y, final = cell(x, state, noise=noise)
        y.sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in cell.parameters())
        values = {name: value.detach().numpy() for name, value in cell.state_dict().items()}
        for b in range(2):
            one = {name: n[:, b if n.shape[1] > 1 else 0].double().numpy() for name, n in noise.items()}
            expected, last = CELLS["ugrnn"].naive(
                values, cell.config, x[:, b].numpy(), (state[0][b].numpy(),), one
            )
            # Sums of fewer than ten terms of order one.
            np.testing.assert_allclose(y[:, b].detach().numpy(), expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(final[0][b].detach().numpy(), last[0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    for name in ("docs", "rhhn_fairseq"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    site = tmp_path / "build/site"
    assert "LNHyperLSTM" in (site / "reference/nn.html").read_text()
    assert '<math display="block"' in (site / "concepts.html").read_text()
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
