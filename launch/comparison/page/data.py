"""Gather what the page shows, as one structure for JSON.

Leaves out: reducing curves (`curves`), who is better (`verdict`), and the page itself (`write`).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from launch.comparison.differences import Comparison, MetricLine, differ
from launch.comparison.page.curves import Packer, points_per_curve, reduced
from launch.comparison.page.verdict import LAST_RESORT, PREFERRED, values_compared, verdict
from launch.comparison.progress import Progress, progress_of
from launch.comparison.runs import ComparedRun
from launch.comparison.seeds import SeedGroup, spread
from launch.jobs.attempts import Attempt, read_attempts

# Of the table that converts steps to hours and FLOPs; the page interpolates between them.
MAX_KNOTS = 512
GROUP_ORDER = {"val": 0, "train": 1}
FIRST = (*PREFERRED, LAST_RESORT)

Series = tuple[list[int], list[float]]
PNG_START = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE_BYTES = 2 << 20
MAX_ALL_PICTURE_BYTES = 16 << 20
MAX_PICTURES = 24


def page_data(comparison: Comparison) -> dict[str, Any]:
    """Everything the page shows. Numbers that are not finite are strings, as in the journal."""
    runs = comparison.runs
    packer = Packer()
    progress = [progress_of(run) for run in runs]
    lines, empty = [], []
    for line in comparison.metrics:
        series = [run.series(line.key) for run in runs]
        if any(value != 0 for _, values in series for value in values):
            lines.append((line, series))
        else:
            empty.append(line.key)
    lines.sort(key=lambda pair: _place(pair[0].key))
    lengths = [len(steps) for _, series in lines for steps, _ in series]
    max_points = points_per_curve(lengths)
    return {
        "runs": [_run(*pair, packer) for pair in zip(runs, progress, strict=True)],
        "metrics": [_metric(*pair, comparison.seeds, packer, max_points) for pair in lines],
        "constant": empty,
        "budget": None if comparison.budget is None else comparison.budget.title,
        "seeds": [
            {"label": group.label, "members": list(group.members)} for group in comparison.seeds
        ],
        "params": _params(runs),
        "verdict": verdict([line for line, _ in lines], comparison, progress),
        "pictures": pictures(runs),
        "arrays": packer.texts,
    }


def group_of(key: str) -> str:
    """The part of a metric's name before the last slash."""
    return key.rsplit("/", 1)[0] if "/" in key else "other"


def _place(key: str) -> tuple[int, str, int, str]:
    group = group_of(key)
    rank = FIRST.index(key) if key in FIRST else len(FIRST)
    return GROUP_ORDER.get(group, len(GROUP_ORDER)), group, rank, key


def number(value: float | None) -> float | str | None:
    """A number as JSON has it: NaN and infinity are strings that JavaScript's Number() reads."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _run(run: ComparedRun, progress: Progress, packer: Packer) -> dict[str, Any]:
    count = len(progress.steps)
    knots = np.unique(np.linspace(0, count - 1, min(count, MAX_KNOTS)).astype(int))
    axes = {}
    for axis in ("steps", "samples", "hours", "flops"):
        totals = progress.along(axis)
        axes[axis] = None if totals is None else packer.add(np.asarray(totals)[knots])
    last = progress.steps[-1]
    return {
        "label": run.label,
        "source": run.source,
        "status": run.status,
        "origin": run.origin,
        "axes": axes,
        "totals": {axis: progress.at(axis, last) for axis in axes},
        "attempts": [] if run.folder is None else [_attempt(a) for a in read_attempts(run.folder)],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    hours = None if attempt.ended is None else (attempt.ended - attempt.started) / 3600
    return {
        "number": attempt.number,
        "started": attempt.started,
        "hours": number(hours),
        "ending": None if attempt.ending is None else str(attempt.ending),
        "reason": attempt.reason,
        "job": attempt.job_id,
        "nodes": list(attempt.nodes),
        "steps_gained": attempt.steps_gained,
        "seconds_lost": number(attempt.seconds_lost),
    }


def _metric(
    line: MetricLine,
    series: Sequence[Series],
    seeds: Sequence[SeedGroup],
    packer: Packer,
    max_points: int,
) -> dict[str, Any]:
    return {
        "key": line.key,
        "group": group_of(line.key),
        "better": line.better,
        "final": [number(value) for value in line.final],
        "compared": [number(value) for value in values_compared(line)],
        "best": [number(value) for value in line.best],
        "seeds": [_spread(line, group) for group in seeds],
        "curves": [_curve(steps, values, packer, max_points) for steps, values in series],
    }


def _spread(line: MetricLine, group: SeedGroup) -> dict[str, Any] | None:
    found = spread([values_compared(line)[i] for i in group.members])
    return None if found is None else asdict(found)


def _curve(
    steps: Sequence[int], values: Sequence[float], packer: Packer, max_points: int
) -> dict[str, Any] | None:
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    finite = np.isfinite(y)
    if not finite.any():
        return None
    curve = reduced(x[finite], y[finite], max_points=max_points)
    means = len(curve.mean_x) > 0
    return {
        "x": packer.add(curve.x),
        "y": packer.add(curve.y),
        "mean_x": packer.add(curve.mean_x) if means else None,
        "mean_y": packer.add(curve.mean_y) if means else None,
        "num_not_finite": int((~finite).sum()),
    }


def _params(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    rows = []
    for key in sorted({key for run in runs for key in run.params}):
        values = [run.params.get(key) for run in runs]
        rows.append({"key": key, "values": values, "differs": differ(key, values)})
    return rows


def pictures(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Find the pictures of runs, so that the same picture of several runs is side by side.

    Returns {"rows": [{"name", "files": base64 or null by run}], "num_left_out": too large or too
    many}. Objectives write pictures at the end of a training; so do evaluations and
    `finetune/visualize.py`.
    """
    folders = [None if run.folder is None else run.folder / "pictures" for run in runs]
    found = [{path.name: path for path in _picture_files(folder)} for folder in folders]
    # Pictures that most runs have come first.
    names = sorted({name for each in found for name in each})
    names.sort(key=lambda name: -sum(name in each for each in found))
    rows: list[dict[str, Any]] = []
    bytes_left, num_left_out = MAX_ALL_PICTURE_BYTES, 0
    for name in names:
        files: list[str | None] = []
        for each in found:
            data = _read_picture(each.get(name), limit=min(MAX_PICTURE_BYTES, bytes_left))
            if len(rows) >= MAX_PICTURES:
                data = None
            num_left_out += name in each and data is None
            bytes_left -= len(data or b"")
            files.append(None if data is None else base64.b64encode(data).decode())
        if any(files):
            rows.append({"name": Path(name).stem.replace("_", " "), "files": files})
    return {"rows": rows, "num_left_out": num_left_out}


def _picture_files(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    return sorted(path for path in folder.glob("*.png") if path.is_file())


def _read_picture(path: Path | None, *, limit: int) -> bytes | None:
    """None for a file that is missing, too large, unreadable or no PNG."""
    if path is None:
        return None
    try:
        if path.stat().st_size > limit:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return data if data.startswith(PNG_START) and len(data) <= limit else None
