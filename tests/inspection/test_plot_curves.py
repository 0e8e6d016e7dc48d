"""rhhn plot curves: reading fairseq's logs, the table and the picture."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers import script_cli

from rhhn_fairseq.cli.running import run
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.curves import Curve, default_better, read_curves, run_names, table
from rhhn_fairseq.inspection.pictures import band, draw_curves
from rhhn_fairseq.inspection.training_logs import parse_line

plot = script_cli.load("plot")

TIME = "2026-01-02 03:04:05 | INFO | "
HYDRA = "[2026-01-02 03:04:05,678]"
VALID = (
    "epoch 002 | valid on 'valid' subset | loss 0.475 | accuracy 99.5 | wps 0 | num_updates 250 | best_loss 1"
)
TRAIN = "epoch 002 | loss 0.5 | accuracy 90 | num_updates 250 | train_wall 2"
INNER = "epoch 002:     50 / 250 loss=0.4, accuracy=98, gnorm=nan, num_updates=300, train_wall=1"
JSON_VALID = '{"epoch": 2, "valid_loss": "0.475", "valid_accuracy": "99.5", "valid_num_updates": "250"}'
JSON_TEST = JSON_VALID.replace("valid", "my_test")
JSON_TRAIN = '{"epoch": 2, "train_loss": "0.5", "train_train_wall": "2", "train_num_updates": "250"}'
JSON_INNER = '{"epoch": 2, "update": 1.2, "loss": "0.4", "num_updates": "300", "lr": null}'


@pytest.mark.parametrize("before", [TIME + "{tag} | ", HYDRA + "[{tag}][INFO] - ", ""])
@pytest.mark.parametrize(
    "tag, text, expected",
    [
        ("valid", VALID, ("valid", 250, {"loss": 0.475, "accuracy": 99.5, "best_loss": 1})),
        ("train", TRAIN, ("train", 250, {"loss": 0.5, "accuracy": 90})),
        ("train_inner", INNER, ("train_inner", 300, {"loss": 0.4, "accuracy": 98})),
        ("valid", JSON_VALID, ("valid", 250, {"loss": 0.475, "accuracy": 99.5})),
        ("my_test", JSON_TEST, ("my_test", 250, {"loss": 0.475})),
        ("train", JSON_TRAIN, ("train", 250, {"loss": 0.5, "train_wall": 2})),
        ("train_inner", JSON_INNER, ("train_inner", 300, {"loss": 0.4})),
    ],
)
def test_every_form_of_a_line_is_read(before, tag, text, expected):
    record = parse_line(before.format(tag=tag) + text + "\n")
    assert (record.subset, record.update) == expected[:2]
    assert {key: record.figures[key] for key in expected[2]} == expected[2]
    assert "num_updates" not in record.figures and "lr" not in record.figures


@pytest.mark.parametrize(
    "line",
    [
        "",
        TIME + 'fairseq_cli.train | begin validation on "valid" subset',
        TIME + 'valid | {"epoch": 2, "valid_loss": "0.4',
        JSON_INNER.replace("300", "nan"),
        '{"num_updates": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=range(5),
)
def test_other_lines_are_passed_over(line):
    assert parse_line(line) is None


def test_lines_of_training_say_how_many_epochs_are_done():
    lines = (JSON_INNER, INNER, JSON_TRAIN, TRAIN, JSON_VALID, VALID)
    assert [parse_line(line).epochs_done for line in lines] == [1.2, 1.2, 2.0, 2.0, None, None]
    assert [parse_line(line).epoch for line in lines] == [2] * 6
    # Of an epoch whose length is unknown, nothing counts.
    assert parse_line(INNER.replace("50 / 250", "0 / 0")).epochs_done == 1.0


def _log(path, values, subset="valid", metric="accuracy", step=100):
    """A log of validations after every ``step`` updates, in one of the formats."""
    lines = ["fairseq says something else"]
    for n, value in enumerate(values, start=1):
        if n % 2:
            figures = f"{metric} {value} | num_updates {n * step}"
            lines.append(f"{TIME}{subset} | epoch {n:03d} | valid on '{subset}' subset | {figures}")
        else:
            keys = {f"{subset}_{metric}": str(value), f"{subset}_num_updates": str(n * step)}
            lines.append(f"{TIME}{subset} | {json.dumps({'epoch': n} | keys)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_after_a_restart_the_later_line_of_an_update_holds(tmp_path):
    path = Path(_log(tmp_path / "a.log", [1, 2, 3]))
    again = Path(_log(tmp_path / "b.log", [1, 5]))
    path.write_text(path.read_text() + again.read_text())
    (curve,) = read_curves([str(path)], "accuracy", ["valid"])
    assert curve.updates == [100, 200, 300] and curve.values == [1, 5, 3]


def test_names_of_runs():
    assert run_names(["x/lstm_s1.log", "y/h.log"]) == ["lstm_s1", "h"]
    assert run_names(["x/train.log", "y/train.log"]) == ["x/train", "y/train"]
    assert run_names(["a/x/train.log", "b/x/train.log"]) == ["a/x/train.log", "b/x/train.log"]
    assert run_names(["x/a.log", "x/a.log"]) == ["x/a.log", "x/a.log"]


@pytest.mark.parametrize(
    "name, group",
    [
        ("lstm_s1", "lstm"),
        ("h.detach_seed_3", "h.detach"),
        ("copying_T100", "copying_T100"),
    ],
)
def test_runs_that_differ_in_the_seed_belong_together(name, group):
    assert Curve(name, "valid", [1], [1.0]).group == group


def test_best_last_and_first_update():
    curve = Curve("a", "valid", [1, 2, 3, 4], [5.0, math.nan, 9.0, 9.0])
    assert curve.best("max") == (9.0, 3) and curve.best("min") == (5.0, 1)
    assert curve.reached(6, "max") == 3 and curve.reached(10, "max") is None and curve.reached(5, "min") == 1
    assert math.isnan(Curve("a", "valid", [1], [math.nan]).best("max")[0])
    assert Curve("a", "valid", [1, 2], [math.nan, 3.0]).best("min") == (3.0, 2)
    better = dict.fromkeys(("accuracy", "best_accuracy", "bleu", "rank_z"), "max")
    better |= dict.fromkeys(("mse", "loss", "bpc"), "min")
    assert {name: default_better(name) for name in better} == better


def _curves(values):
    return [
        Curve(name, "valid", [100 * (n + 1) for n in range(len(row))], list(map(float, row)))
        for name, row in values.items()
    ]


def test_the_table_says_best_last_and_what_seeds_have_in_common():
    curves = _curves({"lstm_s1": [10, 60, 50], "h_s1": [50, 99.5], "lstm_s2": [20, 80, 70]})
    assert table(curves, "accuracy", "max", threshold=80) == (
        "| run | updates | best accuracy | at update | last accuracy | first update ≥ 80 |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| lstm_s1 | 300 | 60 | 200 | 50 | never |\n"
        "| lstm_s2 | 300 | 80 | 200 | 70 | 200 |\n"
        "| **lstm**, 2 runs |  | 70 (60 to 80) |  | 60 (50 to 70) | 1 of 2 |\n"
        "| h_s1 | 200 | 99.5 | 200 | 99.5 | 200 |\n"
    )
    plain = table(_curves({"a|b": [3, 2]}), "loss", "min")
    assert plain.splitlines()[2] == "| a\\|b | 200 | 2 | 200 | 2 |"


def test_picture_and_table_are_written(tmp_path, capsys):
    logs = [_log(tmp_path / f"{name}.log", values) for name, values in (("a_s1", [1, 2]), ("a_s2", [3, 4]))]
    for path in logs:
        _add_inner(path)
    png, markdown = tmp_path / "curves.png", tmp_path / "table.md"
    options = ["--png", str(png), "--table", str(markdown), "--threshold", "2", "--title", "Copying"]
    plot.main(["curves", *logs, *options, "--subsets", "valid,train_inner", "--log-scale"])
    assert capsys.readouterr().out == markdown.read_text(encoding="utf-8")
    assert "| a_s1 | valid | 200 | 2 | 200 | 2 | 200 |" in markdown.read_text(encoding="utf-8")
    image = png.read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 5000
    arrays = np.load(tmp_path / "curves.npz")
    assert arrays["a_s1.valid.accuracy"].tolist() == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {
        "a_s1.log", "a_s2.log", "curves.npz", "curves.png", "table.md",
    }  # fmt: skip


def _add_inner(path):
    with open(path, "a") as file:
        file.write(f"{TIME}train_inner | {INNER}\n")


def _drawn(figure):
    """The lines and bands of a picture: colour, style, marker and label of each; the number of bands."""
    axes = figure.axes[0]
    look = [
        (line.get_color(), line.get_linestyle(), line.get_marker(), line.get_label()) for line in axes.lines
    ]
    return look, len(axes.collections)


def test_seeds_are_a_line_in_a_band():
    curves = _curves({"lstm_s1": [1, 2], "lstm_s2": [1, 3], "h_s1": [2, 3]})
    look, bands = _drawn(draw_curves([*curves, Curve("h_s1", "train", [100], [2.0])], "accuracy"))
    blue, red = "#0072B2", "#D55E00"
    assert look == [
        (blue, "-", "o", "lstm, valid (2 runs)"),
        (red, "-", "o", "h, valid"),
        (red, "--", "o", "h, train"),
    ]
    assert bands == 1


def test_a_band_holds_mean_lowest_and_highest_where_all_runs_are():
    x, mean, low, high = band(
        [
            Curve("a_s1", "valid", [100, 200, 300], [1.0, 2.0, 3.0]),
            Curve("a_s2", "valid", [50, 250], [0.0, 4.0]),
        ]
    )
    # The second run stands at 1 and 3 after 100 and 200 updates; the first at 2.5 after 250.
    assert x.tolist() == [100, 200, 250]
    assert (low.tolist(), high.tolist()) == ([1, 2, 2.5], [1, 3, 4])
    assert mean.tolist() == [1, 2.5, 3.25]


def test_seeds_that_share_no_place_have_lines_of_their_own():
    look, bands = _drawn(draw_curves([Curve("a_s1", "v", [1], [1.0]), Curve("a_s2", "v", [2], [2.0])], "bpc"))
    assert bands == 0 and [line[2:] for line in look] == [("o", "a, a_s1"), ("s", "a, a_s2")]


LINES = """
{"epoch": 1, "update": 0.5, "bpc": "3", "wall": "1800", "num_updates": "100"}
{"epoch": 1, "valid_bpc": "2.5", "valid_num_updates": "150"}
{"epoch": 1, "train_bpc": "2.4", "train_train_wall": "9", "train_wall": "3600", "train_num_updates": "200"}
{"epoch": 1, "valid_bpc": "2", "valid_num_updates": "200"}
epoch 002:     50 / 200 loss=0.4, wall=900, num_updates=250
{"epoch": 2, "valid_bpc": "1.5", "valid_num_updates": "250"}
"""


def test_epochs_and_hours_come_from_the_lines_of_training(tmp_path):
    (tmp_path / "a.log").write_text(LINES)
    for axis, expected in (
        ("epochs", [0.75, 1.0, 1.25]),
        ("hours", [0.75, 1.0, 1.25]),
        ("updates", [150, 200, 250]),
    ):
        (curve,) = read_curves([str(tmp_path / "a.log")], "bpc", ["valid"], axis)
        # After the second start the clock is at 900 s again, 1.25 hours after the first.
        assert curve.x == pytest.approx(expected) and curve.updates == [150, 200, 250]
    bare = [_log(tmp_path / "bare.log", [1, 2])]
    for axis, reason in (("epochs", "the epoch"), ("hours", "the elapsed time")):
        with pytest.raises(UsageError, match=f"bare.log: its training lines do not record {reason}"):
            read_curves(bare, "accuracy", ["valid"], axis)


def test_hours_do_not_count_the_updates_that_a_restart_repeated(tmp_path):
    line = '{{"epoch": 1, "bpc": "{}", "wall": "{}", "num_updates": "{}"}}\n'
    entries = [(4, 1800, 100), (3, 3600, 200), (3, 3000, 150), (2, 3700, 200), (1, 5400, 300)]
    (tmp_path / "a.log").write_text("".join(line.format(*entry) for entry in entries))
    (curve,) = read_curves([str(tmp_path / "a.log")], "bpc", ["train_inner"], "hours")
    assert curve.values == [4, 3, 2, 1]
    assert curve.x == pytest.approx([0.5, 3000 / 3600, 3700 / 3600, 1.5])


def test_hours_never_run_backwards(tmp_path):
    """The first process reached update 200 after an hour, the one that repeated it update 220 before that."""
    line = '{{"epoch": 1, "bpc": "{}", "wall": "{}", "num_updates": "{}"}}\n'
    entries = [(4, 1800, 100), (3, 3600, 200), (3.5, 1900, 120), (2, 3500, 220)]
    (tmp_path / "a.log").write_text("".join(line.format(*entry) for entry in entries))
    (curve,) = read_curves([str(tmp_path / "a.log")], "bpc", ["train_inner"], "hours")
    assert curve.updates == [100, 120, 200, 220]
    assert curve.x == pytest.approx([0.5, 1900 / 3600, 3500 / 3600, 3500 / 3600])


def test_names_are_shown_as_they_are(tmp_path):
    """Not as formulas, and those that matplotlib would leave out of a legend, too."""
    logs = [_log(tmp_path / f"{name}.log", [3, 2]) for name in ("_a", "$b$")]
    figure = draw_curves(read_curves(logs, "accuracy", ["valid"]), "accuracy", title="from $1 to $2")
    (axes,), (legend,) = figure.axes, figure.legends
    labels = legend.get_texts()
    assert [text._preprocess_math(text.get_text()) for text in (axes.title, *labels)] == [
        ("from $1 to $2", False),
        (" _a", False),
        ("$b$", False),
    ]


def test_the_metric_is_one_that_all_logs_have(tmp_path, capsys):
    logs = [_log(tmp_path / "a.log", [3, 2], metric="bpc"), _log(tmp_path / "b.log", [3, 2], metric="loss")]
    plot.main(["curves", *logs[:1]])
    assert "best bpc" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the logs share none of bleu, bpc, accuracy, mse, loss: name"):
        plot.main(["curves", *logs])


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["{empty}"], "empty.log: contains no training metrics"),
        (["{good}", "--metric", "bleu"], "has no metric 'bleu' in valid, it has accuracy"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, reason):
    (tmp_path / "empty.log").write_text("nothing\n")
    good = _log(tmp_path / "good.log", [1])
    names = {"empty": tmp_path / "empty.log", "good": good}
    assert run(lambda: plot.main(["curves", *(argument.format(**names) for argument in arguments)])) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and reason in captured.err and captured.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"empty.log", "good.log"}
