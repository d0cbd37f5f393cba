"""Render the comparison page: one HTML file that loads nothing, with charts by plotly.

Names of runs, parameters and metrics come from untrusted files: the template escapes them, figures
are JSON in attributes, and the page's security policy admits two scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.comparison.differences import (
    Comparison,
    Dependence,
    Spread,
    dependences,
    has_effect,
    spread,
)
from launch.comparison.report import format_spread, metric_place, printable, tables
from launch.comparison.runs import ComparedRun

MAX_REASONS = 8
# Of a longer curve, the lowest and the highest point of each of half as many intervals are drawn.
MAX_POINTS = 1000
# On paper two charts are side by side, whatever the width of the screen.
DRAW = """
const charts = document.querySelectorAll("[data-figure]");
for (const chart of charts) {
  const {data, layout} = JSON.parse(chart.dataset.figure);
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(chart, data, layout, {responsive: true, displaylogo: false, modeBarButtons});
}
const resize = (change) => () => charts.forEach((chart) => Plotly.relayout(chart, change));
addEventListener("beforeprint", resize({width: 330, height: 260}));
addEventListener("afterprint", resize({autosize: true, height: 330}));
"""
MAX_PICTURE_BYTES = 2 << 20
MAX_PICTURES = 100


def render(comparison: Comparison) -> str:
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
    deciding = comparison.deciding
    keys = sorted(
        (line.key for line in comparison.metrics),
        key=lambda key: (deciding is None or key != deciding.key, metric_place(key)),
    )
    varied = {key for key in keys if any(any(run.series(key)[1]) for run in comparison.runs)}
    runs_table, *other_tables = tables(comparison)
    return environment.get_template("page.html.j2").render(
        labels=[run.label for run in comparison.runs],
        scripts=[Markup(script) for script in scripts],
        allowed=Markup(" ".join(map(_script_hash, scripts))),
        verdict=list(_verdict(comparison)),
        runs=runs_table,
        charts=[(key, _curves(comparison, key)) for key in keys if key in varied],
        constant=[key for key in keys if key not in varied],
        dependences=[
            (f"{each.metric} over {each.key}", _dependence(each))
            for each in dependences(comparison)
        ],
        tables=other_tables,
        pictures=_pictures(comparison.runs),
    )


def _script_hash(script: str) -> str:
    """Return the source expression that lets the security policy run this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# ---- the verdict ------------------------------------------------------------------------------


def _verdict(comparison: Comparison) -> Iterator[str]:
    """Yield sentences: the best run, its metric, and its differences to the second."""
    line, ranked = comparison.deciding, _ranked(comparison)
    if line is None or not ranked:
        yield "No metric says which run is better."
        return
    at = "" if comparison.budget is None else f" {comparison.budget.title}"
    (label, run, best), *others = ranked
    if not others:
        yield f"{label} has {line.key} {format_spread(best)}{at}."
        return
    second, other, next_best = others[0]
    value = f"{line.key} {format_spread(best)}{at}"
    if best.mean == next_best.mean:
        yield f"{label} and {second} are equal: {value}."
    else:
        yield f"{label} is best: {value}; next is {second}, {format_spread(next_best)}."
    keys = sorted(filter(has_effect, run.params.keys() | other.params.keys()))
    reasons = [key for key in keys if run.params.get(key) != other.params.get(key)]
    if best.deviation is not None and "seed" in reasons:
        reasons.remove("seed")
    if reasons:
        more = f" and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        yield f"They differ in {', '.join(reasons[:MAX_REASONS])}{more}."
    largest = max(over.deviation or 0.0 for _, _, over in ranked)
    if abs(best.mean - next_best.mean) < largest:
        yield f"The difference is within the spread of the seeds ({largest:.2g})."
    batches = {run.params.get("data.global_batch") for run in comparison.runs} - {None}
    if len(batches) > 1 and (comparison.budget is None or comparison.budget.axis == "steps"):
        yield "They have not seen equally many samples: compare them with --at samples."


def _ranked(comparison: Comparison) -> list[tuple[str, ComparedRun, Spread]]:
    """Rank trainings, else evaluations, from best to worst: means over seeds if several groups."""
    line, runs = comparison.deciding, comparison.runs
    if line is None:
        return []
    groups = comparison.seeds
    if len(groups) < 2:
        groups = {run.label: (i,) for i, run in enumerate(runs)}
    sides = [
        (label, runs[members[0]], over)
        for label, members in groups.items()
        if (over := spread(line.equal[i] for i in members))
    ]
    sides = [side for side in sides if not side[1].is_evaluation] or sides
    return sorted(sides, key=lambda side: side[2].mean, reverse=line.better == "higher")


# ---- charts -----------------------------------------------------------------------------------


def _curves(comparison: Comparison, key: str) -> str:
    """One metric of all runs over the axis of the budget, as a figure of plotly in JSON."""
    axis = "steps" if comparison.budget is None else comparison.budget.axis
    traces, longest = [], max(len(run.series(key)[0]) for run in comparison.runs)
    for run in comparison.runs:
        steps, values = run.series(key)
        x, y = np.interp(steps, run.steps, run.totals[axis]), np.array(values)
        places = np.flatnonzero(np.isfinite(y))
        places = places[_drawn(y[places])]
        traces.append(
            {
                "name": _text(run.label),
                "mode": "lines+markers" if longest < 30 else "lines",
                "line": {"width": 1.6},
                "x": _rounded(x[places]),
                "y": _rounded(y[places]),
            }
        )
    return _figure(traces, x_title=axis)


def _drawn(y: Any) -> Any:
    """Return the indices of the points to draw."""
    if len(y) <= MAX_POINTS:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), MAX_POINTS // 2)
    return np.unique([part[pick(y[part])] for part in parts for pick in (np.argmin, np.argmax)])


def _dependence(found: Dependence) -> str:
    traces = []
    for name, points in found.series.items():
        deviations = [over.deviation or 0.0 for _, over in points]
        traces.append(
            {
                "name": _text(name),
                "mode": "lines+markers",
                "x": [value for value, _ in points],
                "y": [over.mean for _, over in points],
                "error_y": {"type": "data", "array": deviations},
            }
        )
    every = [value for points in found.series.values() for value, _ in points]
    log = min(every) > 0 and max(every) >= 10 * min(every)
    return _figure(traces, x_title=_text(found.key), x_type="log" if log else "linear")


def _figure(traces: list[dict[str, Any]], *, x_title: str, x_type: str = "linear") -> str:
    from plotly.colors import qualitative

    axis = {"gridcolor": "#e6eaef", "zeroline": False, "automargin": True}
    layout = {
        "height": 330,
        "margin": {"l": 45, "r": 10, "t": 28, "b": 40},
        "hovermode": "x unified",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1b1f24"},
        "plot_bgcolor": "white",
        "colorway": [*qualitative.D3, *qualitative.Dark24],
        "showlegend": len(traces) > 1,
        "legend": {"orientation": "h", "y": -0.25},
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 4}, "type": x_type},
        "yaxis": axis,
    }
    return json.dumps({"data": traces, "layout": layout}, allow_nan=False)


def _text(name: str) -> str:
    """Escape a name for plotly, which interprets some HTML in texts."""
    return html.escape(printable(name))


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


# ---- pictures ---------------------------------------------------------------------------------


def _pictures(runs: Sequence[ComparedRun]) -> dict[str, list[tuple[str, str]]]:
    """Name -> (label of the run, base64), those that most runs have first.

    Objectives write pictures at the end of a training; so do evaluations and
    `finetune/visualize.py`.
    """
    paths = [
        (run.label, path)
        for run in runs
        if run.folder is not None
        for path in sorted((run.folder / "pictures").glob("*.png"))
        if path.is_file() and path.stat().st_size <= MAX_PICTURE_BYTES
    ]
    found: dict[str, list[tuple[str, str]]] = {}
    for label, path in paths[:MAX_PICTURES]:
        data = base64.b64encode(path.read_bytes()).decode()
        found.setdefault(path.stem.replace("_", " "), []).append((label, data))
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))
