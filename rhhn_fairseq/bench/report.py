"""Reports as tables, JSON and pictures.

A report is a dictionary of plain values: ``command``, ``machine``, ``settings``, ``rows`` (a dictionary for
each line of the table) and ``notes`` (sentences below it).
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rhhn_fairseq.bench.machine import BenchConfig, describe_machine
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.staging import replace_file


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading. keys: the keys of its values in a row, which are joined by "..". spec: the format
            specification of a value.
    """

    title: str
    keys: str
    spec: str = ""

    def text(self, row: dict) -> str:
        """Returns the value as text; a dash if the row has no such value."""
        values = [row.get(key) for key in self.keys.split()]
        return "-" if None in values else "..".join(format(value, self.spec) for value in values)


def make_report(command: str, config: BenchConfig, rows: list[dict], notes: Sequence[str] = ()) -> dict:
    """Returns the report of a run; must be called while the run's threads are set."""
    return {
        "command": command,
        "machine": describe_machine(config.device),
        "settings": asdict(config),
        "rows": rows,
        "notes": list(notes),
    }


def render(report: dict, columns: Sequence[Column]) -> str:
    """Returns the report as a Markdown table, under a line about the machine and one about the settings.

    Columns in which no row has a value are left out.
    """
    lines = [_listed(report["machine"]), _listed(report["settings"]), ""]
    table = [[column.title, *(column.text(row) for row in report["rows"])] for column in columns]
    table = [texts for texts in table if set(texts[1:]) != {"-"}]
    widths = [max(map(len, texts)) for texts in table]
    for number, row in enumerate(zip(*table, strict=True)):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, *([""] if report["notes"] else []), *report["notes"]])


def _listed(values: dict) -> str:
    texts = {key: ",".join(v) if isinstance(v, tuple | list) else v for key, v in values.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items() if text != "")


def write_json(report: dict, path: str) -> None:
    """Writes a report as JSON, replacing ``path``. Raises UsageError if the file system refuses."""
    with replace_file(path) as file:
        file.write((json.dumps(report, indent=2) + "\n").encode())


def write_picture(figure, path: str) -> None:
    """Writes a matplotlib figure as PNG. Raises UsageError if the file system refuses."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    with replace_file(path) as file:
        file.write(picture.getvalue())


def new_figure(width: float, height: float, columns: int = 1):
    """Returns a figure that needs no display, and its axes side by side."""
    with needed_for("pictures need"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def draw_bars(report: dict, label: Sequence[str], title: str, value: str = "ratio"):
    """Returns a figure with a bar for each row, and at its end a line from its smallest to its largest value.

    Args:
        label: keys of the row that name it. title: of the axis. value: key of the bar's length; with ``_min``
            and ``_max`` appended, the keys of the line's ends, if the row has them.
    """
    rows = [row for row in report["rows"] if row.get(value) is not None]
    figure, (axes,) = new_figure(8, 1.2 + 0.25 * len(rows))
    places = range(len(rows))
    lengths = [row[value] for row in rows]
    ends = [[row.get(f"{value}_{end}", row[value]) for row in rows] for end in ("min", "max")]
    spread = [[abs(end - length) for end, length in zip(side, lengths, strict=True)] for side in ends]
    axes.barh(places, lengths, xerr=spread, color="tab:blue", ecolor="black", height=0.7)
    axes.set_yticks(places, [" ".join(str(row[key]) for key in label) for row in rows])
    axes.invert_yaxis()
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_xlabel(title)
    axes.set_title(report["machine"].get("gpu", report["machine"]["cpu"]), fontsize="small")
    return figure
