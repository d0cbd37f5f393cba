"""The tables of a comparison, printed as aligned columns, and its JSON file.

Owns: how values read: percent, minutes, few digits. Leaves out: which run is better (`verdict`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from launch.comparison.differences import (
    Comparison,
    MetricLine,
    Point,
    Points,
    Spread,
    finite,
    spread,
)
from launch.comparison.runs import ComparedRun
from launch.jobs.status_text import aligned
from vitscale.checkpoint.folders import AT_STEP
from vitscale.config.errors import not_written
from vitscale.config.redaction import printable
from vitscale.distributed.atomic_files import write_text
from vitscale.evaluation.metric_texts import format_value, metric_place, shares

ABSENT = "-"
MAX_CELL = 60
# The best value of a row.
MARK = " *"
# What a run costs, and not how good it is.
VITALS = ("vitals/", "perf/")
MINUTES_BELOW_HOURS = 2


# Tables of interest to few.
OTHERS_TITLE = "Other metrics at the end"
COSTS_TITLE = "Cost and origin"


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


# ---- values -----------------------------------------------------------------------------------


def format_point(key: str, point: Point, *, with_place: bool = False) -> str:
    if not point.steps:
        return ABSENT
    text = format_value(key, point.value)
    if with_place:
        text += f" ({point.place})"
    return text


def format_spread(key: str, over: Spread | None) -> str:
    if over is None:
        return ABSENT
    text = format_value(key, over.mean)
    if over.deviation is not None:
        text += f" ± {format_value(key, over.deviation)}"
    return text


def format_spent(axis: str, total: float) -> str:
    """So many steps, samples, minutes or hours, or FLOPs, with their unit."""
    if math.isnan(total):
        return ABSENT
    if axis == "flops":
        return f"{total / 1e12:,.3f} TFLOPs"
    if axis == "hours" and total < MINUTES_BELOW_HOURS:
        return f"{60 * total:.1f} min"
    if axis == "hours":
        return f"{total:,.1f} h"
    return f"{total:,.0f} {axis}"


def is_judged(line: MetricLine) -> bool:
    """Return True for a metric that says how good a run is."""
    return line.better is not None and not line.key.startswith(VITALS)


# ---- tables -----------------------------------------------------------------------------------


def tables(comparison: Comparison) -> list[Table]:
    """Results, metrics, spread over seeds, differing parameters, costs; empty ones are left out."""
    runs = comparison.runs
    labels = tuple(run.label for run in runs)

    # What all runs have in common explains nothing.
    title = "Parameters"
    if len(runs) > 1:
        title = "Differing parameters, the important ones first"
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

    # A row of zeros counts what never happened; a result of zero is one.
    lines = [
        line
        for line in sorted(comparison.metrics, key=lambda line: metric_place(line.key))
        if line.better or any(finite(line.final))
    ]
    judged = [line for line in lines if is_judged(line)]
    others = [line for line in lines if not is_judged(line)]

    # Results come first, then metrics at equal cost and at the end, then what explains them.
    found = [_runs_table(comparison)]
    budget = comparison.budget
    if budget is not None:
        at = format_spent(budget.axis, budget.total)
        title = f"At equal cost, {at}: between two steps interpolated"
        found.append(_metrics_table(title, labels, judged, "equal"))
    found += [
        _metrics_table("At the end", labels, judged, "final"),
        _seeds_table(comparison),
        params,
        _metrics_table(OTHERS_TITLE, labels, others, "final"),
        _costs_table(runs),
    ]
    return [table for table in found if table.rows]


def _runs_table(comparison: Comparison) -> Table:
    """What is asked first: each run with its result, what chance leaves open, and its time."""
    line = comparison.deciding
    header = ["run", "steps", "time", "status", "started from"]
    if line is not None:
        header[1:1] = [line.key, "95 % interval", "best"]
    labels = [*(run.label for run in comparison.runs), ABSENT]
    rows = []
    for place, run in enumerate(comparison.runs):
        cells = [run.label]
        if line is not None:
            point = comparison.decisive(line)[place]
            cells.append(_marked(line, comparison.decisive(line))[place])
            bounds = [ABSENT]
            for share in shares(line.key, run.val_data, *finite([point])):
                bounds = [f"{100 * bound:.1f}" for bound in share.interval()]
            cells.append(" to ".join(bounds))
            cells.append(format_point(line.key, line.best[place], with_place=True))
        # What the result cost, and what the run began with.
        time = format_spent("hours", run.totals["hours"][-1])
        cells += [f"{run.steps[-1]:,}", time, run.status or ABSENT]
        origin = labels[comparison.origins[place]]
        trunk = AT_STEP.fullmatch(run.params.get("init", ""))
        if trunk is not None:
            origin = f"branch of {trunk[1]} at step {int(trunk[2]):,}"
        rows.append((*cells, origin))
    return Table(title="Results", header=tuple(header), rows=tuple(rows))


def _costs_table(runs: Sequence[ComparedRun]) -> Table:
    rows = []
    for run in runs:
        spent = [
            format_spent(axis, run.totals.get(axis, [math.nan])[-1])
            for axis in ("samples", "flops")
        ]
        rows.append((run.label, *spent, run.source, run.origin))
    header = ("run", "samples", "FLOPs", "read from", "made")
    return Table(title=COSTS_TITLE, header=header, rows=tuple(rows))


def _metrics_table(
    title: str, labels: tuple[str, ...], lines: Sequence[MetricLine], which: str
) -> Table:
    """which: the field of `MetricLine` to show, with the steps unless it is the last value."""
    return Table(
        title=title,
        header=("metric", *labels),
        rows=tuple(
            (
                line.key,
                *_marked(line, getattr(line, which), with_place=which != "final"),
            )
            for line in lines
        ),
    )


def _marked(line: MetricLine, points: Points, *, with_place: bool = False) -> list[str]:
    """The values of a metric, the best one of several marked."""
    cells = [format_point(line.key, point, with_place=with_place) for point in points]
    values = finite(points)
    if not is_judged(line) or len(values) < 2:
        return cells

    best = min(values)
    if line.better == "higher":
        best = max(values)
    for place, point in enumerate(points):
        if point.value == best:
            cells[place] += MARK
    return cells


def _seeds_table(comparison: Comparison) -> Table:
    """Metrics at the end of each run, over seeds."""
    rows = []
    for line in comparison.metrics:
        groups = [
            spread(finite(line.final[member] for member in members))
            for members in comparison.seeds.values()
        ]
        if line.better is not None and any(groups):
            cells = [format_spread(line.key, over) for over in groups]
            rows.append((line.key, *cells))
    return Table(
        title="Over seeds: final, mean and standard deviation",
        header=("metric", *comparison.seeds),
        rows=tuple(rows),
    )


def plain_text(table: Table) -> str:
    """Columns padded to their widest cell; long cells on several lines, control characters
    replaced."""
    cells: list[tuple[str, ...]] = []
    for row in (table.header, *table.rows):
        parts = [wrap(printable(cell), MAX_CELL) for cell in row]
        cells += zip_longest(*parts, fillvalue="")
    return "\n  ".join([table.title, *aligned(cells)]) + "\n"


# ---- files ------------------------------------------------------------------------------------


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
        "budget": comparison.budget and comparison.budget._asdict(),
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
