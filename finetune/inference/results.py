"""The results of an evaluation as one table: text, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitscale.distributed.atomic_files import write_json, write_text
from vitscale.evaluation.interface.evaluation import Share
from vitscale.images.size import ImageSize, show_size

HEADINGS = ("image size", "evaluation", "metric", "value", "95 % interval", "images")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """One metric of one evaluation at one image size."""

    image_size: ImageSize
    evaluation: str
    metric: str
    value: float
    low: float | None
    """Bounds of the 95 % interval of a share of images; None for other metrics."""
    high: float | None
    images: int | None
    """Images that a share is of."""


def as_results(
    evaluation: str, metrics: dict[str, float], *, image_size: ImageSize
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
    """Columns aligned, numbers to the right."""
    rows = [HEADINGS, *map(_cells, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(results: Sequence[EvaluationResult]) -> str:
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(_cells, results)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def csv_table(results: Sequence[EvaluationResult]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(EvaluationResult.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for each in results:
        writer.writerow(asdict(each) | {"image_size": show_size(each.image_size)})
    return file.getvalue()


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
    write_text(folder / "results.csv", csv_table(results))
    write_text(folder / "results.md", markdown_table(results))
    return [folder / f"results.{kind}" for kind in ("json", "csv", "md")]


def _cells(result: EvaluationResult) -> tuple[str, ...]:
    interval = ""
    if result.low is not None and result.high is not None:
        interval = f"{_spelled(result.low)} to {_spelled(result.high)}"
    images = "" if result.images is None else str(result.images)
    return (
        show_size(result.image_size),
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
