"""Print a comparison as aligned columns, and write it as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from launch.comparison.differences import Comparison, Dependence, Spread, dependences, spread
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_text
from vitscale.tracking.console import format_duration

ABSENT = "-"
MAX_CELL = 60
GROUP_ORDER = ("val", "train")
CSV_HEADER = ("run", "metric", "better", "final", "equal", "best")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(comparison: Comparison) -> list[Table]:
    """Runs, metrics, spread over seeds, differing parameters; empty tables are left out."""
    labels = tuple(run.label for run in comparison.runs)
    runs = Table(
        title="Runs",
        header=("run", "last step", "wall time", "status", "read from"),
        rows=tuple(
            (
                run.label,
                str(run.last_step),
                format_duration(run.wall_s),
                run.status or ABSENT,
                run.source,
            )
            for run in comparison.runs
        ),
    )
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
    varied = map(_dependence_table, dependences(comparison))
    found = [runs, metrics, _seeds_table(comparison), *varied, params]
    return [table for table in found if table.rows]


def _metric_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    rows = []
    for line in sorted(comparison.metrics, key=lambda line: metric_place(line.key)):
        if not any(line.final + line.best):
            continue
        rows.append((line.key, "final", *map(format_value, line.final)))
        if line.equal is not None and line.equal != line.final:
            rows.append(("", "equal", *map(format_value, line.equal)))
        if len(line.final) > 1:
            cells = [
                ABSENT if delta is None else f"{delta:+.5g} {line.change(delta) or ''}".strip()
                for delta in line.deltas
            ]
            rows.append(("", "delta", *cells))
        if line.better is not None:
            rows.append(("", "best", *map(format_value, line.best)))
    return rows


def metric_place(key: str) -> tuple[int, str]:
    """Results first, then the training, then the rest."""
    group = key.split("/")[0]
    return GROUP_ORDER.index(group) if group in GROUP_ORDER else len(GROUP_ORDER), key


def _seeds_table(comparison: Comparison) -> Table:
    """Metrics at the end of each run, over seeds."""
    rows = []
    for line in comparison.metrics:
        groups = [spread([line.final[i] for i in group.members]) for group in comparison.seeds]
        if line.better is not None and any(groups):
            rows.append((line.key, *map(_format_spread, groups)))
    return Table(
        title="Over seeds: final, mean and standard deviation",
        header=("metric", *(group.label for group in comparison.seeds)),
        rows=tuple(rows),
    )


def _dependence_table(found: Dependence) -> Table:
    numbers = sorted({number for points in found.series.values() for number, _, _ in points})
    rows = []
    for name, points in found.series.items():
        cells = {
            number: format_value(mean) + ("" if deviation is None else f" +- {deviation:.2g}")
            for number, mean, deviation in points
        }
        rows.append((name or found.metric, *(cells.get(number, ABSENT) for number in numbers)))
    return Table(
        title=f"Final {found.metric} over {found.key}, mean and standard deviation over seeds",
        header=(found.key, *(f"{number:g}" for number in numbers)),
        rows=tuple(rows),
    )


def format_value(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.5g}"


def _format_spread(value: Spread | None) -> str:
    return ABSENT if value is None else f"{value.mean:.5g} +- {value.deviation:.2g} ({value.count})"


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
        padded = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {padded}".rstrip())
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


# ---- files ------------------------------------------------------------------------------------


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write one row per run and metric. Raises UserError if the file cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for i, run in enumerate(comparison.runs):
        for line in comparison.metrics:
            equal = None if line.equal is None else line.equal[i]
            values = ("" if v is None else repr(v) for v in (line.final[i], equal, line.best[i]))
            writer.writerow((run.label, line.key, line.better or "", *values))
    write_file(path, text.getvalue())


def write_json(comparison: Comparison, path: Path) -> None:
    """Write runs, parameters, metrics, budget and spread. Raises UserError if it cannot."""
    write_file(path, json.dumps(as_values(comparison), indent=1, allow_nan=False) + "\n")


def as_values(comparison: Comparison) -> dict[str, Any]:
    """Values for JSON, in the order of the runs. What is not finite is a string, as in journals."""
    budget = comparison.budget
    return {
        "runs": [
            {
                "label": run.label,
                "source": run.source,
                "status": run.status,
                "last_step": run.last_step,
                "wall_s": run.wall_s,
                "params": run.params,
            }
            for run in comparison.runs
        ],
        "budget": None
        if budget is None
        else {"axis": budget.axis, "total": budget.total, "steps": budget.steps},
        "metrics": [
            {
                "key": line.key,
                "better": line.better,
                "final": [_number(value) for value in line.final],
                "equal": None if line.equal is None else [_number(value) for value in line.equal],
                "best": [_number(value) for value in line.best],
            }
            for line in comparison.metrics
        ],
        "seeds": [
            {
                "runs": [comparison.runs[i].label for i in group.members],
                "metrics": {
                    line.key: {"mean": over.mean, "deviation": over.deviation, "runs": over.count}
                    for line in comparison.metrics
                    if (over := spread([line.final[i] for i in group.members])) is not None
                },
            }
            for group in comparison.seeds
        ],
        "dependences": [
            {"key": each.key, "metric": each.metric, "series": each.series}
            for each in dependences(comparison)
        ],
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def write_file(path: Path, text: str) -> None:
    """Write the file atomically. Raises UserError if it cannot be written."""
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            next_step="choose another file",
        ) from None
