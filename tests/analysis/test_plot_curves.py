"""scripts/plot_curves.py: reading fairseq's logs, the table and the picture."""

import json
import math
from pathlib import Path

import pytest
from helpers import script_cli

from rhhn_fairseq.analysis.curves import Curve, default_better, read_curves, run_names, table
from rhhn_fairseq.analysis.training_logs import Record, parse_line, read_log
from rhhn_fairseq.cli import run
from rhhn_fairseq.errors import UsageError

SCRIPT = script_cli.SCRIPTS / "plot_curves.py"
plot_curves = script_cli.load("plot_curves")

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
        TIME + "fairseq.trainer | Loaded checkpoint a.pt (epoch 2 @ 250 updates)",
        TIME + 'valid | {"epoch": 2, "valid_loss": "0.4',
        TIME + "fairseq_cli.train | {'_name': None, 'common': {'seed': 1}}",
        TIME + 'valid | {"epoch": 2, "valid_loss": "0.4"}',
        TIME + "valid | valid on 'test' subset | loss 0.4 | accuracy 3",
    ],
)
def test_other_lines_are_passed_over(line):
    assert parse_line(line) is None


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


def test_a_log_is_read_in_order(tmp_path):
    records = read_log(_log(tmp_path / "a.log", [10, 20]))
    assert records == [Record("valid", 100, {"accuracy": 10}, 1), Record("valid", 200, {"accuracy": 20}, 2)]


def test_after_a_restart_the_later_line_of_an_update_holds(tmp_path):
    path = Path(_log(tmp_path / "a.log", [1, 2, 3]))
    again = Path(_log(tmp_path / "b.log", [1, 5]))
    path.write_text(path.read_text() + again.read_text())
    (curve,) = read_curves([str(path)], "accuracy", ["valid"])
    assert curve.updates == [100, 200, 300] and curve.values == [1, 5, 3]


def test_damaged_bytes_do_no_harm(tmp_path):
    path = Path(_log(tmp_path / "a.log", [1]))
    path.write_bytes(b"\xff\xfe\0 not text\r" + path.read_bytes())
    assert len(read_log(path)) == 1


def test_names_of_runs():
    assert run_names(["x/lstm_s1.log", "y/h.log"]) == ["lstm_s1", "h"]
    assert run_names(["x/train.log", "y/train.log"]) == ["x/train", "y/train"]
    assert run_names(["a/x/train.log", "b/x/train.log"]) == ["a/x/train.log", "b/x/train.log"]
    with pytest.raises(UsageError, match="x/a.log: is given twice"):
        run_names(["x/a.log", "x/a.log"])


@pytest.mark.parametrize(
    "name, group",
    [
        ("lstm_s1", "lstm"),
        ("lstm-seed2", "lstm"),
        ("h.detach_seed_3", "h.detach"),
        ("lstm_S12", "lstm"),
        ("copying_T100", "copying_T100"),
        ("runs2", "runs2"),
    ],
)
def test_runs_that_differ_in_the_seed_belong_together(name, group):
    assert Curve(name, "valid", [1], [1.0]).group == group


def test_best_last_and_first_update():
    curve = Curve("a", "valid", [1, 2, 3, 4], [5.0, math.nan, 9.0, 9.0])
    assert curve.best("max") == (9.0, 3) and curve.best("min") == (5.0, 1)
    assert curve.reached(6, "max") == 3 and curve.reached(10, "max") is None and curve.reached(5, "min") == 1
    assert math.isnan(Curve("a", "valid", [1], [math.nan]).best("max")[0])
    assert [default_better(name) for name in ("accuracy", "best_accuracy", "bleu", "mse", "loss", "bpc")] == [
        "max", "max", "max", "min", "min", "min",
    ]  # fmt: skip


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
    plot_curves.main([*logs, *options, "--subsets", "valid,train_inner", "--log-scale"])
    assert capsys.readouterr().out == markdown.read_text(encoding="utf-8")
    assert "| a_s1 | valid | 200 | 2 | 200 | 2 | 200 |" in markdown.read_text(encoding="utf-8")
    image = png.read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 5000
    assert {path.name for path in tmp_path.iterdir()} == {"a_s1.log", "a_s2.log", "curves.png", "table.md"}


def _add_inner(path):
    with open(path, "a") as file:
        file.write(f"{TIME}train_inner | {INNER}\n")


def test_curves_are_drawn_with_one_colour_a_group(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    from rhhn_fairseq.analysis.curves import picture

    drawn = []
    plot = Axes.plot

    def recorded(axes, *args, **kwargs):
        drawn.append((kwargs["color"], kwargs["linestyle"], kwargs["marker"], kwargs["label"]))
        return plot(axes, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", recorded)
    curves = _curves({"lstm_s1": [1, 2], "lstm_s2": [1, 3], "h_s1": [2, 3]})
    picture([*curves, Curve("h_s1", "train", [100], [2.0])], "accuracy")
    assert drawn == [
        ("C0", "-", "o", "lstm, valid (2 runs)"),
        ("C0", "-", "s", None),
        ("C1", "-", "o", "h, valid"),
        ("C1", "--", "o", "h, train"),
    ]


def test_many_points_of_one_run_have_no_markers(monkeypatch):
    from matplotlib.axes import Axes

    from rhhn_fairseq.analysis.curves import picture

    drawn = {}
    plot, line = Axes.plot, Axes.axhline
    monkeypatch.setattr(Axes, "plot", lambda *a, **k: drawn.update(plot=k) or plot(*a, **k))
    monkeypatch.setattr(Axes, "axhline", lambda *a, **k: drawn.update(line=k) or line(*a, **k))
    picture([Curve("a", "valid", list(range(100)), [1.0] * 100)], "bpc", threshold=1.25)
    assert drawn["plot"]["marker"] is None
    assert drawn["line"]["label"] == "threshold 1.25"


def test_the_metric_is_one_that_all_logs_have(tmp_path, capsys):
    logs = [_log(tmp_path / "a.log", [3, 2], metric="bpc"), _log(tmp_path / "b.log", [3, 2], metric="loss")]
    plot_curves.main(logs[:1])
    assert "best bpc" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the logs share none of bleu, bpc, accuracy, mse, loss: name"):
        plot_curves.main(logs)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["nowhere.log"], "nowhere.log: cannot be read (No such file or directory)"),
        (["{empty}"], "empty.log: has no line with figures of a training"),
        (["{good}", "--metric", "bleu"], "has no metric 'bleu' in valid, it has accuracy"),
        (["{good}", "--subsets", "test"], "has no subset 'test', it has valid"),
        (["{good}", "--subsets", ","], "--subsets names no subset"),
        (["{good}", "{good}"], "good.log: is given twice"),
        (["{good}", "--png", "{folder}/no/curves.png"], "no/curves.png: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, reason):
    (tmp_path / "empty.log").write_text("nothing\n")
    good = _log(tmp_path / "good.log", [1])
    names = {"empty": tmp_path / "empty.log", "good": good, "folder": tmp_path}
    assert run(lambda: plot_curves.main([argument.format(**names) for argument in arguments])) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and reason in captured.err and captured.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"empty.log", "good.log"}
