"""The results of an evaluation as one table: text, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitscale.distributed.atomic_files import write_json, write_text
from vitscale.evaluation.evaluation import Share

HEADINGS = ("image size", "evaluation", "metric", "value", "95 % interval", "images")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """One metric of one evaluation at one image size."""

    image_size: int
    evaluation: str
    metric: str
    value: float
    low: float | None
    """Bounds of the 95 % interval of a share of images; None for other metrics."""
    high: float | None
    images: int | None
    """Images that a share is of."""


def as_results(
    evaluation: str, metrics: dict[str, float], *, image_size: int
) -> list[EvaluationResult]:
    rows = []
    for metric, value in metrics.items():
        low, high = value.interval() if isinstance(value, Share) else (None, None)
        images = value.images if isinstance(value, Share) else None
        rows.append(
            EvaluationResult(
                image_size=image_size,
                evaluation=evaluation,
                metric=metric,
                value=float(value),
                low=low,
                high=high,
                images=images,
            )
        )
    return rows


def text_table(results: Sequence[EvaluationResult]) -> str:
    """Columns aligned, numbers to the right; then why a metric has no interval."""
    rows = [HEADINGS, *map(_cells, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *_reasons(results)])


def write_results(
    folder: Path, results: Sequence[EvaluationResult], *, description: dict[str, Any]
) -> list[Path]:
    """Write results.json, which begins with `description`, results.csv and results.md."""
    # JSON has no NaN.
    rows = [
        {key: None if value != value else value for key, value in asdict(result).items()}
        for result in results
    ]
    write_json(folder / "results.json", description | {"results": rows})
    file = io.StringIO()
    writer = csv.DictWriter(file, list(EvaluationResult.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for each in results:
        writer.writerow(asdict(each) | {"image_size": each.image_size})
    write_text(folder / "results.csv", file.getvalue())
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(_cells, results)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    reasons = "".join(f"\n{reason}\n" for reason in _reasons(results))
    write_text(folder / "results.md", table + reasons)
    return [folder / f"results.{kind}" for kind in ("json", "csv", "md")]


def _reasons(results: Sequence[EvaluationResult]) -> Iterator[str]:
    """Why shares have no interval: Wilson's is for one share of one set of images."""
    without = [each.metric for each in results if each.low is None]
    if "class_mean_top1" in without:
        yield "class_mean_top1 has no interval: it is a mean over classes"
    if any(metric.startswith("few_shot") and metric.endswith("_top1") for metric in without):
        yield "few_shotK_top1 has no interval: it is a mean over draws, with few_shotK_std"


def _cells(result: EvaluationResult) -> tuple[str, ...]:
    interval = ""
    if result.low is not None and result.high is not None:
        interval = f"{_spelled(result.low)} to {_spelled(result.high)}"
    images = "" if result.images is None else str(result.images)
    return (
        str(result.image_size),
        result.evaluation,
        result.metric,
        _spelled(result.value),
        interval,
        images,
    )


def _spelled(value: float) -> str:
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 100 else f"{value:.1f}"
