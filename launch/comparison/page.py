"""Write the comparison page: one HTML file that loads nothing, with charts by plotly.

Owns: the verdict, the charts, the pictures, and filling `page.html.j2`.
Leaves out: the numbers (`differences`, `progress`) and the tables (`text`).

Names of runs, parameters and metrics come from untrusted files: the template escapes them, figures
are JSON in attributes, and the page's security policy admits two scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.comparison.differences import (
    LAST_RESORT,
    WITHOUT_EFFECT,
    Comparison,
    Dependence,
    dependences,
    is_known,
    spread,
)
from launch.comparison.progress import Progress
from launch.comparison.runs import RUNS_FOLDER, ComparedRun
from launch.comparison.text import (
    ABSENT,
    Table,
    format_value,
    metric_place,
    printable,
    tables,
    write_file,
)
from vitscale.config.errors import UserError

COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00"),
    *("#56b4e9", "#7f3c8d", "#5d6b78", "#b03060", "#3b7d23"),
)
# Settings that explain a result are listed in this order of their first part.
REASON_ORDER = ("init", "stage", "model", "objective", "optim", "schedule", "data", "seed")
MAX_REASONS = 8
SAME_BUDGET = 0.01
FORMATS = {"steps": ",.0f", "samples": ",.0f", "hours": ",.3g", "flops": ".3g"}
# A curve of more points is drawn as the mean of each interval within its extremes.
MAX_POINTS = 300
DRAW = """
for (const chart of document.querySelectorAll("[data-figure]")) {
  const {data, layout} = JSON.parse(chart.dataset.figure);
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(chart, data, layout, {responsive: true, displaylogo: false, modeBarButtons});
}
"""
PNG_START = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE_BYTES = 2 << 20
MAX_ALL_PICTURE_BYTES = 16 << 20


def default_output(runs: Sequence[ComparedRun]) -> Path:
    """runs/compare.html if there is a runs/ folder here, else beside the first run."""
    first = runs[0].folder
    if RUNS_FOLDER.is_dir() or first is None:
        return RUNS_FOLDER / "compare.html"
    return first.resolve().parent / "compare.html"


def write_page(comparison: Comparison, *, path: Path) -> None:
    """Write the page atomically. Raises UserError when it cannot be written."""
    page = render(comparison)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(path)) from None
    write_file(path, page)


def render(comparison: Comparison) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = (get_plotlyjs(), DRAW)
    charts: list[str] = []
    constant: list[str] = []
    for key in sorted((line.key for line in comparison.metrics), key=metric_place):
        (charts if any(map(any, _values(comparison, key))) else constant).append(key)
    first = [key for key in charts if key.startswith("val/") or key == LAST_RESORT]
    pictures, num_left_out = _pictures(comparison.runs)
    notes = []
    if constant:
        notes.append(f"Always 0, and left out: {', '.join(constant)}.")
    if num_left_out:
        notes.append(f"{num_left_out} pictures are too large or no PNG, and left out.")
    return environment.get_template("page.html.j2").render(
        labels=[run.label for run in comparison.runs],
        scripts=[Markup(script) for script in scripts],
        allowed=Markup(" ".join(map(_script_hash, scripts))),
        verdict=list(_verdict(comparison)),
        runs=_runs_table(comparison),
        charts=[(key, _curves(comparison, key)) for key in first],
        other_charts=[(key, _curves(comparison, key)) for key in charts if key not in first],
        dependences=[
            (f"{each.metric} over {each.key}", _dependence(each))
            for each in dependences(comparison)
        ],
        tables=tables(comparison)[1:],
        pictures=pictures,
        notes=notes,
    )


def _values(comparison: Comparison, key: str) -> list[list[float]]:
    return [run.series(key)[1] for run in comparison.runs]


def _runs_table(comparison: Comparison) -> Table:
    """What each run has spent, and where it is from."""
    rows = []
    for run, progress in zip(comparison.runs, comparison.progress, strict=True):
        spent = [(progress.along(axis), form) for axis, form in FORMATS.items()]
        cells = [ABSENT if total is None else f"{total[-1]:{form}}" for total, form in spent]
        rows.append((run.label, *cells, run.status or ABSENT, run.source, run.origin))
    header = ("run", "steps", "samples", "hours", "FLOPs", "status", "read from", "made")
    return Table(title="Runs", header=header, rows=tuple(rows))


# ---- the verdict ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """A run, or runs that differ in their seed alone."""

    label: str
    run: ComparedRun
    value: float
    deviation: float | None = None

    @property
    def text(self) -> str:
        return format_value(self.value) + (
            "" if self.deviation is None else f" ± {self.deviation:.2g}"
        )


def _verdict(comparison: Comparison) -> Iterator[str]:
    """Which run is best, by which metric, and in what it differs from the next one."""
    line, sides = comparison.deciding, _sides(comparison)
    if line is None or not sides:
        yield "No metric says which run is better."
        return
    at = "" if comparison.budget is None else f" {comparison.budget.title}"
    best = sides[0]
    if len(sides) == 1:
        yield f"{best.label} has {line.key} {best.text}{at}."
        return
    second = sides[1]
    yield (
        f"{best.label} is best: {line.key} {best.text}{at}; next is {second.label}, {second.text}."
    )
    reasons = _reasons(best.run, second.run)
    if best.deviation is not None:
        reasons = [key for key in reasons if key != "seed"]
    if reasons:
        more = f" and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        yield f"They differ in {', '.join(reasons[:MAX_REASONS])}{more}."
    largest = max((side.deviation or 0.0 for side in sides), default=0.0)
    if largest and abs(best.value - second.value) < largest:
        yield f"The difference is within the spread of the seeds ({largest:.2g})."
    if unequal := _unequal(comparison):
        yield f"They have not seen equally many {unequal}: compare them with --at {unequal}."


def _sides(comparison: Comparison) -> list[_Side]:
    """From best to worst: means over seeds if there are several groups, else runs."""
    line = comparison.deciding
    if line is None:
        return []
    sides = []
    for group in comparison.seeds:
        over = spread([line.compared[i] for i in group.members])
        if over is not None:
            run = comparison.runs[group.members[0]]
            sides.append(
                _Side(label=group.label, run=run, value=over.mean, deviation=over.deviation)
            )
    if len(sides) < 2:
        sides = [
            _Side(label=run.label, run=run, value=value)
            for run, value in zip(comparison.runs, line.compared, strict=True)
            if value is not None and is_known(value)
        ]
    return sorted(sides, key=lambda side: side.value, reverse=line.better == "higher")


def _reasons(one: ComparedRun, other: ComparedRun) -> list[str]:
    """Parameters with an effect that differ, the likeliest causes first."""
    order = {name: i for i, name in enumerate(REASON_ORDER)}
    keys = {
        key
        for key in one.params.keys() | other.params.keys()
        if one.params.get(key) != other.params.get(key) and key.split(".")[0] not in WITHOUT_EFFECT
    }
    return sorted(keys, key=lambda key: (order.get(key.split(".")[0], len(order)), key))


def _unequal(comparison: Comparison) -> str | None:
    """What the runs have spent different amounts of where they are compared; None for nothing."""
    budget = comparison.budget
    steps = [run.last_step for run in comparison.runs]
    if budget is not None:
        steps = [step or 0 for step in budget.steps]
    for axis in ("samples", "steps"):
        totals = [
            each.at(axis, step) for each, step in zip(comparison.progress, steps, strict=True)
        ]
        known = [total for total in totals if total is not None]
        if len(known) == len(totals):
            return axis if min(known) < (1 - SAME_BUDGET) * max(known) else None
    return None


# ---- charts -----------------------------------------------------------------------------------


def _curves(comparison: Comparison, key: str) -> str:
    """One metric of all runs over the axis of the budget, as a figure of plotly in JSON."""
    axis = "steps" if comparison.budget is None else comparison.budget.axis
    traces = []
    for number, (run, progress) in enumerate(
        zip(comparison.runs, comparison.progress, strict=True)
    ):
        steps, values = run.series(key)
        y = np.asarray(values, dtype=np.float64)
        x = np.asarray(_along(progress, axis, steps), dtype=np.float64)
        finite = np.isfinite(y)
        traces += _curve(x[finite], y[finite], label=run.label, number=number)
    return _figure(traces, x_title="FLOPs" if axis == "flops" else axis)


def _along(progress: Progress, axis: str, steps: Sequence[int]) -> Sequence[float]:
    """What the run had spent at its logged steps."""
    totals = progress.along(axis)
    assert totals is not None
    return np.interp(steps, progress.steps, totals).tolist()


def _curve(x: Any, y: Any, *, label: str, number: int) -> list[dict[str, Any]]:
    """The line of one run; a long one is means of intervals, within a band of their extremes."""
    color = COLORS[number % len(COLORS)]
    line = {"color": color, "width": 1.6, "dash": "solid" if number < len(COLORS) else "dash"}
    same = {"name": _text(label), "legendgroup": str(number), "line": line}
    if len(x) <= MAX_POINTS:
        mode = "lines+markers" if len(x) < 30 else "lines"
        return [{**same, "mode": mode, "x": _rounded(x), "y": _rounded(y)}]
    edges = np.linspace(0, len(x), MAX_POINTS + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(x)])
    x, means = (np.add.reduceat(each, edges) / counts for each in (x, y))
    band = np.concatenate(
        [np.maximum.reduceat(y, edges), np.minimum.reduceat(y, edges)[::-1], means[:0]]
    )
    around = {"x": _rounded(np.concatenate([x, x[::-1]])), "y": _rounded(band), "mode": "lines"}
    filled = {"fill": "toself", "fillcolor": f"{color}33", "line": {"width": 0}}
    quiet = {"legendgroup": str(number), "showlegend": False, "hoverinfo": "skip"}
    return [
        {**around, **filled, **quiet},
        {**same, "mode": "lines", "x": _rounded(x), "y": _rounded(means)},
    ]


def _dependence(found: Dependence) -> str:
    traces = []
    for number, (name, points) in enumerate(found.series.items()):
        x, y, deviations = ([point[i] for point in points] for i in range(3))
        bars = {"array": [deviation or 0.0 for deviation in deviations], "type": "data"}
        line = {"color": COLORS[number % len(COLORS)]}
        same = {"mode": "lines+markers", "name": _text(name), "line": line}
        traces.append({**same, "x": x, "y": y, "error_y": bars})
    every = [number for points in found.series.values() for number, _, _ in points]
    log = min(every) > 0 and max(every) >= 10 * min(every)
    return _figure(traces, x_title=_text(found.key), x_type="log" if log else "linear")


def _figure(traces: list[dict[str, Any]], *, x_title: str, x_type: str = "linear") -> str:
    axis = {"gridcolor": "#e6eaef", "zeroline": False, "automargin": True}
    layout = {
        "height": 320,
        "margin": {"l": 45, "r": 10, "t": 10, "b": 40},
        "hovermode": "x unified",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1b1f24"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "showlegend": sum(trace.get("showlegend", True) for trace in traces) > 1,
        "legend": {"orientation": "h", "y": -0.2},
        "xaxis": {**axis, "title": {"text": x_title}, "type": x_type},
        "yaxis": axis,
    }
    return json.dumps({"data": traces, "layout": layout}, allow_nan=False)


def _text(name: str) -> str:
    """A name that plotly, which reads some HTML in its texts, shows as it is."""
    return html.escape(printable(name))


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _script_hash(script: str) -> str:
    """What the security policy calls a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# ---- pictures ---------------------------------------------------------------------------------


def _pictures(runs: Sequence[ComparedRun]) -> tuple[list[tuple[str, list[tuple[str, str]]]], int]:
    """([name, [(label of the run, base64)]], how many are left out), those that most runs have
    first.

    Objectives write pictures at the end of a training; so do evaluations and
    `finetune/visualize.py`.
    """
    found: dict[str, list[tuple[str, Path]]] = {}
    for run in runs:
        if run.folder is not None:
            for path in sorted((run.folder / "pictures").glob("*.png")):
                found.setdefault(path.name, []).append((run.label, path))
    rows, bytes_left, num_left_out = [], MAX_ALL_PICTURE_BYTES, 0
    for name in sorted(found, key=lambda name: (-len(found[name]), name)):
        files = []
        for label, path in found[name]:
            data = _read_picture(path, limit=min(MAX_PICTURE_BYTES, bytes_left))
            bytes_left -= len(data)
            if data:
                files.append((label, base64.b64encode(data).decode()))
            else:
                num_left_out += 1
        if files:
            rows.append((Path(name).stem.replace("_", " "), files))
    return rows, num_left_out


def _read_picture(path: Path, *, limit: int) -> bytes:
    """Nothing of a file that is too large, unreadable or no PNG."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return b""
    return data if data.startswith(PNG_START) and len(data) <= limit else b""
