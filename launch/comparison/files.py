"""Write a comparison as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from launch.comparison.differences import Comparison
from launch.comparison.seeds import spread
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_text

CSV_HEADER = ("run", "metric", "better", "final", "equal", "best")


def write_csv(comparison: Comparison, path: Path) -> None:
    """One row per run and metric. Raises UserError if the file cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for i, run in enumerate(comparison.runs):
        for line in comparison.metrics:
            equal = None if line.equal is None else line.equal[i]
            values = ("" if v is None else repr(v) for v in (line.final[i], equal, line.best[i]))
            writer.writerow((run.label, line.key, line.better or "", *values))
    _write(path, text.getvalue())


def write_json(comparison: Comparison, path: Path) -> None:
    """Runs, parameters, metrics, budget, spread. Raises UserError if it cannot be written."""
    _write(path, json.dumps(as_values(comparison), indent=1, allow_nan=False) + "\n")


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
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(path)) from error
