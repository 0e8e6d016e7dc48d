"""The page of a table: the paper's figures and ours, the curves, and what the other rows would cost."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from experiments.plan import recipe_of
from experiments.records import Cost, Record
from experiments.tables import Row, Table
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json, replace_file
from rhhn_fairseq.inspection import plotting
from rhhn_fairseq.inspection.curves import Curve
from rhhn_fairseq.inspection.pictures import draw_curves


def render(table: Table, records_dir: Path, pages: Path) -> Path:
    """Writes PAGES/TABLE.md and its pictures from the records in RECORDS_DIR; returns the page.

    Raises UsageError if a record cannot be read, or a file cannot be written.
    """
    pages.mkdir(parents=True, exist_ok=True)
    records, page = read_records(table, records_dir), pages / f"{table.name}.md"
    paragraphs = [f"# {table.title}", table.notes]
    if records:
        how = "Ours is the mean over seeds; in brackets, its difference from the paper, and the range."
        paragraphs += [f"{how} Trainings may have shared their machine."]
    for scale in sorted({record.scale for record in records}, reverse=True):
        runs = [record for record in records if record.scale == scale]
        if scale < 1:
            paragraphs += [
                f"## Scaled by {scale:g}",
                "This checks the order of the systems, not the figures.",
            ]
        paragraphs += [*_runs(table, runs), _picture(table, runs, scale, pages)]
    paragraphs += [*_not_run(table, records, costs_of(records, records_dir)), *_provenance(table, records)]
    with replace_file(page, follow=False) as file:
        file.write(("\n\n".join(filter(None, paragraphs)) + "\n").encode("utf-8"))
    return page


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
    costs = {path.stem: Cost(**read_json(path)) for path in (directory / "costs").glob("*.json")}
    runs = {record.row: record for record in records if record.scale == 1}
    return costs | {name: cost for name, record in runs.items() if (cost := record.cost()) is not None}


def _table(rows: list[dict[str, str]]) -> list[str]:
    """Returns a table without its empty columns; values that all rows share stand above it."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if any(row[name] for row in rows)}
    shared = {name: cells[0] for name, cells in columns.items() if len({*cells}) == 1 < len(cells)}
    shared.pop("system", None)
    shown = [name for name in columns if name not in shared]
    lines = [f"| {' | '.join(shown)} |", "|" + "---|" * len(shown)]
    lines += [f"| {' | '.join(row[name] for name in shown)} |" for row in rows]
    above = "; ".join(f"{name} {value}" for name, value in shared.items())
    return [f"In every row: {above}." if above else "", "\n".join(lines)]


def _cell(value: float | None, spec: str, missing: str = "") -> str:
    return missing if value is None else format(value, spec).replace("%", " %")


def _machine(run: Record | Cost) -> str:
    return f"{run.precision}, {run.device}" + (f", threads: {run.threads}" if run.threads else "")


def _runs(table: Table, records: list[Record]) -> list[str]:
    """Returns the table of the runs of one scale."""
    # Seeds that were trained with other options or for other budgets stand in rows of their own.
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for run in records:
        groups[run.row, run.precision, run.updates, str(run.options.get("extra", []))].append(run)
    rows, digits = [], f".{table.scoring.decimals}f"
    for group in groups.values():
        run, row = group[0], table.row(group[0].row)
        cells = {"system": row.name, "parameters": f"{run.parameters or row.parameters:,}"}
        for name, _, _ in table.scoring.figures():
            # A smaller training says nothing about the paper's figures and budget.
            paper = row.reported.get(name) if run.scale == 1 else None
            values = [record.figures[name] for record in group if name in record.figures]
            mean = sum(values) / len(values) if values else None
            more = [] if None in (mean, paper) else [f"{mean - paper:+{digits}}"]
            more += [f"{min(values):{digits}} to {max(values):{digits}}"] if len(values) > 1 else []
            more += [f"{len(values)} of {len(group)} seeds"] if 0 < len(values) < len(group) else []
            cells[f"{name}: paper"] = _cell(paper, "g")
            cells[f"{name}: ours"] = _cell(mean, digits) + (f" ({', '.join(more)})" if more else "")
        cells |= {"seeds": f"{len(group)}", "epochs": f"{run.epochs:g}", "updates": f"{run.updates:,}"}
        if run.scale == 1:
            cells["hours"] = f"{sum(record.seconds for record in group) / len(group) / 3600:.2f}"
            cells["share of the paper's budget"] = _cell(budget_share(row, run), ".1%", "unknown")
        rows.append(cells | {"type and machine": _machine(run)})
    return _table(rows)


def budget_share(row: Row, record: Record) -> float | None:
    """Returns the share of the paper's training that a run did; None if the paper does not say.

    Updates of smaller batches than the row's count for less.
    """
    if not row.updates:
        return record.epochs / row.epochs if row.epochs else None
    words = [word for option in record.options.get("extra", ()) for word in option.split("=", 1)]
    own, given = recipe_of(row)["batch_size"], dict(pairwise(words))
    # A list is the number of batches in an update by epoch, of which the first counts.
    batches = str(given.get("--update-freq", 1)).partition(",")[0]
    return record.updates * int(given.get("--batch-size", own)) * int(batches) / own / row.updates


def _not_run(table: Table, records: list[Record], costs: dict[str, Cost]) -> list[str]:
    """Returns the rows without a run, and how long the paper's training would take by measured updates."""
    run, rows = {record.row for record in records if record.scale == 1}, []
    for row in (row for row in table.rows if row.name not in run):
        cells = {"system": row.name, "parameters": f"{row.parameters:,}"}
        for name, _, _ in table.scoring.figures():
            cells[f"{name}: paper"] = _cell(row.reported.get(name), "g")
        cost = costs.get(row.name)
        epoch, seconds = (cost.updates_per_epoch, cost.seconds_per_update) if cost else (None, None)
        total = seconds and (row.updates or (epoch and row.epochs and row.epochs * epoch))
        cells["seconds per update"] = _cell(seconds, ".3g")
        cells["hours per epoch"] = _cell(epoch and epoch * seconds / 3600, ".2f")
        cells["hours for the paper's budget"] = _cell(total and total * seconds / 3600, ",.0f", "unknown")
        rows.append(cells | {"type and machine": _machine(cost) if cost else ""})
    return ["## Not run, with its cost", *_table(rows)] if rows else []


def _provenance(table: Table, records: list[Record]) -> list[str]:
    """Returns the command, where the records are, and the remarks on runs up to their first semicolon."""
    remarked: dict[str, list[str]] = defaultdict(list)
    for record in records:
        # Text of the user's in the place of the table's.
        other = record.corpus if record.corpus.startswith("user text") else ""
        remark = "; ".join(filter(None, [record.problem, other, record.remark.partition(";")[0]]))
        remarked[" ".join(remark.split())].append(record.row)
    remarks = [f"- {', '.join(dict.fromkeys(rows))}: {remark}" for remark, rows in remarked.items() if remark]
    command = f"python -m experiments.reproduce {table.name} ROW{' --recipe published' if records else ''}"
    how = f"`{command}` trains a row. Commands, curves and remarks: `experiments/records/{table.name}`."
    return ["## How it was made", how, "\n".join(remarks)]


def _picture(table: Table, records: list[Record], scale: float, pages: Path) -> str:
    """Draws the curves of the runs of one scale; returns the picture's link, "" if no run has two points."""
    metric, curves = table.scoring.metric, []
    size, scaled = ("", "") if scale == 1 else (f"-x{scale:g}", f" scaled by {scale:g}")
    for record in records:
        points = [(e["updates"], e["valid"][metric]) for e in record.curve if metric in e["valid"]]
        if points:
            name = f"{record.row}{size.replace('-', ' ')}-s{record.seed}"
            curves.append(Curve(name, "valid", *map(list, zip(*points, strict=True))))
    if not any(len(curve.updates) > 1 for curve in curves):
        return ""
    name = f"{table.name}{size}.png"
    with replace_file(pages / name, follow=False) as file:
        file.write(plotting.encode(draw_curves(curves, metric, table.title + scaled), "png"))
    return f"![validation during training]({name})"
