"""Reports as text and pictures."""

import pytest
from matplotlib.container import ErrorbarContainer

from rhhn_fairseq.bench.report import Column, draw_bars, render

COLUMNS = (
    Column("cell", "name"),
    Column("ms", "ms", ".2f"),
    Column("min..max", "low high", "d"),
    Column("error", "error"),
)


def make_report(rows: list[dict], **changes) -> dict:
    machine = {"cpu": "one", "threads": 2, "gpu": ""}
    return {"machine": machine, "settings": {"cells": ("lstm", "rhn")}, "rows": rows, "notes": []} | changes


def test_a_missing_value_is_a_dash_and_a_column_without_values_is_left_out():
    rows = [{"name": "ln_lstm", "ms": 12.345, "low": 1, "high": 20}, {"name": "rhn", "low": 3}]
    assert render(make_report(rows), COLUMNS).splitlines() == [
        "cpu one, threads 2",
        "cells lstm,rhn",
        "",
        "| cell    |    ms | min..max |",
        "|---------|-------|----------|",
        "| ln_lstm | 12.35 |    1..20 |",
        "| rhn     |     - |        - |",
    ]


def test_notes_are_below_the_table():
    text = render(make_report([{"name": "rhn"}], notes=["one", "two"]), COLUMNS)
    assert text.splitlines()[2:] == ["", "| cell |", "|------|", "| rhn  |", "", "one", "two"]


def test_bars_and_their_spread():
    """From the first row at the top to the last; rows without a ratio are left out."""
    rows = [
        {"name": "base"},
        {"name": "lstm", "type": "float32", "ratio": 2.0, "ratio_min": 1.5, "ratio_max": 4.0},
        {"name": "rhn", "type": "bfloat16", "ratio": 3.0},
    ]
    axes = draw_bars(make_report(rows), ("name", "type"), "times as long").axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2.0, 3.0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["lstm float32", "rhn bfloat16"]
    assert axes.get_xlabel() == "times as long"
    errors = next(container for container in axes.containers if isinstance(container, ErrorbarContainer))
    (lines,) = errors.lines[2]
    spreads = [segment[:, 0].tolist() for segment in lines.get_segments()]
    assert spreads == [pytest.approx([1.5, 4.0]), pytest.approx([3.0, 3.0])]
    assert axes.yaxis_inverted()
    at_one = [line for line in axes.lines if list(line.get_xdata()) == [1.0, 1.0]]
    assert len(at_one) == 1


def test_the_title_is_the_processor_that_was_timed():
    for machine, title in (({"cpu": "one"}, "one"), ({"cpu": "one", "gpu": "other"}, "other")):
        report = make_report([{"name": "rhn", "ratio": 1.0}], machine=machine)
        assert draw_bars(report, ("name",), "ratio").axes[0].get_title() == title
