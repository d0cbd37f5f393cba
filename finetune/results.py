"""The results of an evaluation as one table: text, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale.distributed.atomic_files import write_json, write_text
from vitscale.evaluation.evaluation import Share

# A metric of an evaluation: image_size, evaluation, metric, value, and of a share of images the
# bounds of its 95 % interval (low, high) and their number (images), else None.
Row = dict[str, Any]
HEADINGS = ("image size", "evaluation", "metric", "value", "95 % interval", "images")


def as_rows(evaluation: str, metrics: Mapping[str, float], *, image_size: int) -> list[Row]:
    rows = []
    for metric, value in metrics.items():
        row: Row = {"image_size": image_size, "evaluation": evaluation, "metric": metric}
        row |= {"value": float(value), "low": None, "high": None, "images": None}
        if isinstance(value, Share):
            row["low"], row["high"] = value.interval()
            row["images"] = value.images
        rows.append(row)
    return rows


def text_table(rows: Sequence[Row]) -> str:
    """Columns aligned, numbers to the right; then why a metric has no interval."""
    lines = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = []
    for line in lines:
        cells = [
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        table.append("  ".join(cells).rstrip())
    return "\n".join([*table, *_reasons(rows)])


def write_results(
    folder: Path, rows: Sequence[Row], *, description: Mapping[str, Any]
) -> list[Path]:
    """Write results.json, which begins with `description`, results.csv and results.md."""
    # JSON has no NaN.
    valid = [{key: None if x != x else x for key, x in row.items()} for row in rows]
    write_json(folder / "results.json", {**description, "results": valid})
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "results.csv", file.getvalue())
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(_cells, rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    write_text(folder / "results.md", table + "".join(f"\n{why}\n" for why in _reasons(rows)))
    return [folder / f"results.{kind}" for kind in ("json", "csv", "md")]


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why shares have no interval: Wilson's is for one share of one set of images."""
    without = [row["metric"] for row in rows if row["low"] is None]
    if "class_mean_top1" in without:
        yield "class_mean_top1 has no interval: it is a mean over classes"
    if any(metric.startswith("few_shot") and metric.endswith("_top1") for metric in without):
        yield "few_shotK_top1 has no interval: it is a mean over draws, with few_shotK_std"


def _cells(row: Row) -> tuple[str, ...]:
    interval = "" if row["low"] is None else f"{_spelled(row['low'])} to {_spelled(row['high'])}"
    images = "" if row["images"] is None else str(row["images"])
    first = (str(row["image_size"]), row["evaluation"], row["metric"])
    return (*first, _spelled(row["value"]), interval, images)


def _spelled(value: float) -> str:
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 100 else f"{value:.1f}"
