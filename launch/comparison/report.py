"""The tables of a comparison, printed as aligned columns, and its CSV and JSON files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap

from launch.comparison.differences import Comparison, Spread, spread
from vitscale.config.errors import not_written
from vitscale.config.outside import csv_cell
from vitscale.config.redaction import printable
from vitscale.distributed.atomic_files import write_text

ABSENT = "-"
MAX_CELL = 60
GROUP_ORDER = ("val", "train")
SPENT = {"steps": ",.0f", "samples": ",.0f", "hours": ",.3g", "flops": ".3g"}
CSV_HEADER = ("run", "metric", "better", "final", "equal", "best")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(comparison: Comparison) -> list[Table]:
    """Runs, metrics, spread over seeds, differing parameters; empty tables are left out."""
    labels = tuple(run.label for run in comparison.runs)
    title = "Differing parameters" if len(labels) > 1 else "Parameters"
    if comparison.num_equal_params:
        title += f" ({comparison.num_equal_params} equal ones left out)"
    params = Table(
        title=title,
        header=("parameter", *labels),
        rows=tuple(
            (key, *(ABSENT if value is None else value for value in values))
            for key, values in comparison.params
        ),
    )
    at = "" if comparison.budget is None else f" {comparison.budget.title},"
    metrics = Table(
        title=f"Metrics: final,{at} difference to the first run{at and ' there'}, best",
        header=("metric", "", *labels),
        rows=tuple(_metric_rows(comparison)),
    )
    origins = Table(
        title="Origin",
        header=("run", "made"),
        rows=tuple((run.label, run.origin) for run in comparison.runs if run.origin),
    )
    found = [
        _runs_table(comparison),
        metrics,
        _seeds_table(comparison),
        params,
        origins,
    ]
    return [table for table in found if table.rows]


def _runs_table(comparison: Comparison) -> Table:
    rows = []
    for run in comparison.runs:
        spent = (
            f"{run.totals[axis][-1]:{form}}" if axis in run.totals else ABSENT
            for axis, form in SPENT.items()
        )
        rows.append((run.label, *spent, run.status or ABSENT, run.source))
    header = ("run", "steps", "samples", "hours", "FLOPs", "status", "read from")
    return Table(title="Runs", header=header, rows=tuple(rows))


def _metric_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for line in sorted(comparison.metrics, key=lambda line: metric_place(line.key)):
        # Such as counts of what never happened. A result of 0 is one.
        if line.better is None and not any(line.final):
            continue
        yield line.key, "final", *map(format_value, line.final)
        if line.equal != line.final:
            yield "", "equal", *map(format_value, line.equal)
        if len(line.final) > 1:
            cells = (
                ABSENT
                if delta is None
                else f"{delta:+.5g} {line.change(delta) or ''}".strip()
                for delta in line.deltas
            )
            yield "", "delta", *cells
        if line.better is not None:
            yield "", "best", *map(format_value, line.best)


def metric_place(key: str) -> tuple[int, str]:
    """Sort key of a metric: results first, then training, then the rest."""
    group = key.split("/")[0]
    return GROUP_ORDER.index(group) if group in GROUP_ORDER else len(GROUP_ORDER), key


def _seeds_table(comparison: Comparison) -> Table:
    """Metrics at the end of each run, over seeds."""
    rows = []
    for line in comparison.metrics:
        groups = [
            spread(line.final[i] for i in each) for each in comparison.seeds.values()
        ]
        if line.better is not None and any(groups):
            cells = (ABSENT if over is None else format_spread(over) for over in groups)
            rows.append((line.key, *cells))
    return Table(
        title="Over seeds: final, mean and standard deviation",
        header=("metric", *comparison.seeds),
        rows=tuple(rows),
    )


def format_value(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.5g}"


def format_spread(over: Spread) -> str:
    return f"{over.mean:.5g}" + (
        "" if over.deviation is None else f" ± {over.deviation:.2g}"
    )


def plain_text(table: Table) -> str:
    """Columns padded to their widest cell; long cells on several lines, control characters
    replaced."""
    cells: list[tuple[str, ...]] = []
    for row in (table.header, *table.rows):
        parts = [wrap(printable(cell), MAX_CELL) for cell in row]
        cells += zip_longest(*parts, fillvalue="")
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.header))]
    lines = [table.title]
    for row in cells:
        padded = "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        )
        lines.append(f"  {padded}".rstrip())
    return "\n".join(lines) + "\n"


# ---- files ------------------------------------------------------------------------------------


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write one row per run and metric. Raises UserError if the file cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for i, run in enumerate(comparison.runs):
        for line in comparison.metrics:
            values = (line.final[i], line.equal[i], line.best[i])
            writer.writerow(map(csv_cell, (run.label, line.key, line.better, *values)))
    write_file(path, text.getvalue())


def write_json(comparison: Comparison, path: Path) -> None:
    """Write runs, parameters, budget and metrics. Raises UserError if it cannot."""
    runs = [
        {
            "label": run.label,
            "source": run.source,
            "status": run.status,
            "params": run.params,
            **{axis: totals[-1] for axis, totals in run.totals.items()},
        }
        for run in comparison.runs
    ]
    values = {
        "runs": runs,
        "budget": None if comparison.budget is None else asdict(comparison.budget),
        "metrics": [asdict(line) for line in comparison.metrics],
    }
    # Numbers that are not finite become strings, as in journals.
    strict = json.loads(json.dumps(values), parse_constant=str)
    write_file(path, json.dumps(strict, indent=1) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write the file atomically, in a folder made for it. Raises UserError if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise not_written(error, str(path)) from None
