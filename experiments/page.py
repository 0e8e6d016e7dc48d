"""The page of a table: the paper's figures, ours, what they cost, and the curves."""

import itertools
import json
from collections import defaultdict
from collections.abc import Set
from pathlib import Path

from experiments.plan import SCALING_RULE, recipe_of
from experiments.records import Cost, Record
from experiments.tables import Row, Table
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import replace_file
from rhhn_fairseq.inspection import plotting
from rhhn_fairseq.inspection.curves import Curve
from rhhn_fairseq.inspection.pictures import draw_curves

Group = tuple[str, float, str, int, tuple[str, ...]]
"""Row, scale, type, updates, and options of fairseq-train beyond the row's."""


def render(table: Table, records_dir: Path, pages: Path) -> Path:
    """Writes PAGES/TABLE.md and its pictures from the records in RECORDS_DIR; returns the page.

    Raises:
        UsageError: a record cannot be read, or a file cannot be written.
    """
    pages.mkdir(parents=True, exist_ok=True)
    records, page = read_records(table, records_dir), pages / f"{table.name}.md"
    curves = _curves(table, records)
    for scale, lines in curves.items():
        scaled = "" if scale == 1 else f" scaled by {scale:g}"
        title = f"{table.title}{scaled}, validation during training"
        with replace_file(pages / _picture(table, scale), follow=False) as file:
            file.write(plotting.encode(draw_curves(lines, table.scoring.metric, title), "png"))
    with replace_file(page, follow=False) as file:
        file.write(text(table, records, costs_of(records, records_dir), set(curves)).encode("utf-8"))
    return page


def _picture(table: Table, scale: float) -> str:
    return f"{table.name}.png" if scale == 1 else f"{table.name}-x{scale:g}.png"


def read_records(table: Table, directory: Path) -> list[Record]:
    """Reads the records of a table, ordered by row and seed. Raises UsageError for an unknown row."""
    order, records = [row.name for row in table.rows], []
    for path in sorted(directory.glob("*.json")):
        records.append(Record.load(path))
        if records[-1].row not in order:
            raise UsageError(f"{path}: {table.name} has no row {records[-1].row}")
    return sorted(records, key=lambda record: (order.index(record.row), -record.scale, record.seed))


def costs_of(records: list[Record], directory: Path) -> dict[str, Cost]:
    """Returns what an update takes, by row: as a run measured, else as a file of ``costs`` says."""
    paths = sorted((directory / "costs").glob("*.json"))
    costs = {path.stem: Cost(**json.loads(path.read_text())) for path in paths}
    runs = {record.row: record for record in records if record.scale == 1}
    return costs | {name: cost for name, record in runs.items() if (cost := record.cost()) is not None}


def text(table: Table, records: list[Record], costs: dict[str, Cost], pictured: Set[float]) -> str:
    """Returns the page as Markdown.

    Args:
        pictured: the scales that have a picture.
    """
    lines = [f"# {table.title}", ""]
    if table.notes:
        lines += [table.notes, ""]
    lines += [
        "Read each row with its share of the paper's budget: below 100 %, it was trained for less than the "
        "paper's model. Ours is the mean over seeds, with the range where there are several.",
        "",
    ]
    # Seeds that were trained with other options or for other budgets stand in rows of their own.
    groups: dict[Group, list[Record]] = defaultdict(list)
    for record in records:
        options = tuple(record.options.get("extra", ()))
        groups[record.row, record.scale, record.precision, record.updates, options].append(record)
    for scale in sorted({1.0, *(record.scale for record in records)}, reverse=True):
        members = {key: group for key, group in groups.items() if key[1] == scale}
        rows = table.rows
        if scale < 1:
            rule = f"This checks the order of the systems, not the figures. The rule: {SCALING_RULE}."
            lines += [f"## Scaled by {scale:g}", "", rule, ""]
            rows = tuple(row for row in rows if any(key[0] == row.name for key in members))
        lines += _table(table, members, rows) + [""]
        if scale in pictured:
            lines += [f"![validation during training]({_picture(table, scale)})", ""]
    lines += _costs(table, records, costs)
    if records:
        lines += _provenance(table, records)
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table, groups: dict[Group, list[Record]], rows: tuple[Row, ...]) -> list[str]:
    known = {name for row in rows for name in row.reported}
    known |= {name for group in groups.values() for record in group for name in record.figures}
    figures = [name for name, _, _ in table.scoring.figures() if name in known]
    head = ["system", "parameters", *(f"{name}: paper | ours | difference" for name in figures)]
    head += ["epochs", "updates", "hours", "share of the paper's budget", "type"]
    columns = 2 + 3 * len(figures) + 5
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * columns]
    for row in rows:
        matching = [group for key, group in groups.items() if key[0] == row.name]
        for group in matching or [[]]:
            lines.append("| " + " | ".join(_cells(table, row, group, figures)) + " |")
    return lines


def _cells(table: Table, row: Row, group: list[Record], figures: list[str]) -> list[str]:
    digits = table.scoring.decimals
    count = next((record.parameters for record in group if record.parameters), row.parameters)
    cells = [row.name, f"{count:,}"]
    for name in figures:
        paper = row.reported.get(name)
        values = [record.figures[name] for record in group if name in record.figures]
        cells.append("" if paper is None else f"{paper:g}")
        if not values:
            cells += ["", ""]
            continue
        mean = sum(values) / len(values)
        spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f}, {len(values)} seeds)"
        cells.append(f"{mean:.{digits}f}" + (spread if len(values) > 1 else ""))
        cells.append("" if paper is None else f"{mean - paper:+.{digits}f}")
    if not group:
        return [*cells, "not run", "", "", "", ""]
    last = group[0]
    share = budget_share(row, last)
    budget = "unknown" if share is None else _percent(share)
    return [
        *cells,
        f"{last.epochs:g}",
        f"{last.updates:,}",
        f"{sum(record.seconds for record in group) / len(group) / 3600:.2f}",
        # The epochs of a smaller training say nothing about the paper's budget.
        "" if last.scale < 1 else budget,
        last.precision,
    ]


def _percent(share: float) -> str:
    """Returns a share in percent, with two digits below ten percent."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def budget_share(row: Row, record: Record) -> float | None:
    """Returns the share of the paper's training that a run did; None if the paper does not say.

    Updates of smaller batches than the row's count for less.
    """
    if row.updates:
        return record.updates * _share_of_batch(row, record) / row.updates
    return record.epochs / row.epochs if row.epochs else None


def _share_of_batch(row: Row, record: Record) -> float:
    """Returns the sequences of an update of a run over those of its row."""
    own, words = recipe_of(row)["batch_size"], record.options.get("extra", [])
    given = dict(itertools.pairwise(words))
    try:
        return int(given.get("--batch-size", own)) * int(given.get("--update-freq", 1)) / own
    except ValueError:
        return 1.0  # The number of batches in an update changes from epoch to epoch.


def _costs(table: Table, records: list[Record], costs: dict[str, Cost]) -> list[str]:
    """Returns what a row takes here, and what the paper's budget would, from measured seconds per update."""
    done = {record.row: record for record in records if record.scale == 1}
    head = ["system", "type and machine", "seconds per update", "updates per epoch", "hours per epoch"]
    head += ["time for the rest of the paper's budget"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|---|---|"]
    for row in table.rows:
        if row.name not in costs:
            continue
        cost = costs[row.name]
        epoch, seconds = cost.updates_per_epoch, cost.seconds_per_update
        total = row.updates or (row.epochs * epoch if row.epochs and epoch else None)
        if run := done.get(row.name):
            total = row.updates / _share_of_batch(row, run) if row.updates else total
        left = None if total is None else max(0, total - (run.updates if run else 0))
        rest = "unknown" if left is None else f"{left * seconds / 3600:,.0f} hours"
        hours = "" if epoch is None else f"{epoch * seconds / 3600:.2f}"
        threads = {0: "", 1: ", 1 thread"}.get(cost.threads, f", {cost.threads} threads")
        where = f"{cost.precision}, {cost.device}{threads}"
        cells = [row.name, where, f"{seconds:.3g}", "" if epoch is None else f"{epoch:,}", hours, rest]
        lines.append("| " + " | ".join(cells) + " |")
    if len(lines) == 2:
        return []
    source = "Seconds per update are from a run's median epoch (with fewer than three epochs, their mean), "
    source += "or the median of a few updates."
    return ["## Cost", "", source, "", *lines, ""]


def _provenance(table: Table, records: list[Record]) -> list[str]:
    """Returns where the runs' commands, versions and curves are, and what is remarked on them."""
    place = f"experiments/records/{table.name}/ROW-sSEED.json"
    lines = ["## How it was made", ""]
    lines += [f"Every run is a file `{place}` of the repository: its command, commit, versions and curve."]
    lines += [f"`python -m experiments.reproduce {table.name} ROW --recipe published` runs it again.", ""]
    remarked: dict[str, list[str]] = defaultdict(list)
    for record in records:
        # Text of the user's in the place of the table's.
        other = record.corpus if record.corpus.startswith("user text") else ""
        remark = "; ".join(filter(None, [record.problem, other, " ".join(record.remark.split())]))
        if remark:
            remarked[remark].append(record.row)
    return lines + [f"- {', '.join(dict.fromkeys(rows))}: {remark}" for remark, rows in remarked.items()]


def _curves(table: Table, records: list[Record]) -> dict[float, list[Curve]]:
    """Returns the curves of the runs by their scale; no scale at which none has two points."""
    curves: dict[float, list[Curve]] = defaultdict(list)
    for record in records:
        points = [
            (entry["updates"], entry["valid"][table.scoring.metric])
            for entry in record.curve
            if table.scoring.metric in entry["valid"]
        ]
        if points:
            size = "" if record.scale == 1 else f" x{record.scale:g}"
            name = f"{record.row}{size}-s{record.seed}"
            updates, values = [update for update, _ in points], [value for _, value in points]
            curves[record.scale].append(Curve(name, "valid", updates, values))
    return {scale: lines for scale, lines in curves.items() if any(len(line.updates) > 1 for line in lines)}
