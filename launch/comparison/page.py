"""Render the comparison page: one HTML file that loads nothing, with charts by plotly.

Names of runs, parameters and metrics come from untrusted files: the template escapes them, figures
are JSON in attributes, and the page's security policy admits two scripts, by their hashes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.comparison.differences import (
    Comparison,
    Dependence,
    MetricLine,
    Spread,
    dependences,
    spread,
)
from launch.comparison.report import (
    Table,
    format_spread,
    format_value,
    metric_place,
    tables,
)
from launch.comparison.runs import ComparedRun
from vitscale.config.changes import changed_settings
from vitscale.config.redaction import printable
from vitscale.tracking.run_files import safe_files

MAX_REASONS = 8
Side = tuple[str, ComparedRun, Spread]
"""A run, or a group of seeds: its label, its first run, and its metric."""
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
# Of objectives and `finetune/visualize.py`; of evaluations.
PICTURES = ("pictures/*.png", "evaluation/*.png")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE_BYTES = 2 << 20
MAX_PICTURES = 100
PER_CLASS = "evaluation/per_class.csv"
MAX_TABLE_BYTES = 16 << 20
MAX_CLASSES = 30
Say = Callable[[str], None]


def render(comparison: Comparison, *, say: Say = print) -> str:
    """The page as HTML. say: what is told of files that are left out."""
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
    varied = {
        key for key in keys if any(any(run.series(key)[1]) for run in comparison.runs)
    }
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
        tables=[*other_tables, *_per_class(comparison.runs, say=say)],
        pictures=_pictures(comparison.runs, say=say),
    )


def _script_hash(script: str) -> str:
    """Return the source expression that lets the security policy run this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# ---- the verdict ------------------------------------------------------------------------------


def _verdict(comparison: Comparison) -> Iterator[str]:
    """Yield sentences: the best run, its metric, its differences to the second, and what speaks
    against this order."""
    line, ranked = comparison.deciding, _ranked(comparison)
    if line is None or not ranked:
        yield "No metric says which run is better."
        return

    (label, run, best), *others = ranked
    at = "" if comparison.budget is None else f" {comparison.budget.title}"
    value = f"{line.key} {format_spread(best)}{at}"
    if not others:
        yield f"{label} has {value}."
    else:
        yield from _against_second(comparison, value, ranked)
    yield from _unranked(comparison, line)


def _against_second(
    comparison: Comparison, value: str, ranked: Sequence[Side]
) -> Iterator[str]:
    (label, run, best), (second, other, next_best), *_ = ranked
    if best.mean == next_best.mean:
        yield f"{label} and {second} are equal: {value}."
    else:
        yield f"{label} is best: {value}; next is {second}, {format_spread(next_best)}."

    reasons = [*changed_settings(run.params, other.params, purpose="result")]
    if "seed" in reasons and (
        best.deviation is not None or next_best.deviation is not None
    ):
        reasons.remove("seed")
    if reasons:
        yield f"They differ in {_few(reasons)}."

    single = [name for name, _, over in ranked[:2] if over.deviation is None]
    if comparison.seeds and single:
        yield f"Of {' and '.join(single)} there is one seed, whose spread is not known."
    largest = max(over.deviation or 0.0 for _, _, over in ranked)
    if abs(best.mean - next_best.mean) < largest:
        yield f"The difference is within the spread of the seeds ({largest:.2g})."
    batches = {run.params.get("data.global_batch") for run in comparison.runs} - {None}
    if len(batches) > 1 and (
        comparison.budget is None or comparison.budget.axis == "steps"
    ):
        yield "They have not seen equally many samples: compare them with --at samples."


def _unranked(comparison: Comparison, line: MetricLine) -> Iterator[str]:
    """Yield a sentence for each run without a finite value at the budget."""
    at = "" if comparison.budget is None else f" {comparison.budget.title}"
    sentences = []
    for run, value, last in zip(comparison.runs, line.equal, line.final, strict=True):
        if not _is_ranked(run, comparison) or (
            value is not None and math.isfinite(value)
        ):
            continue
        step = next(iter(run.series(line.key)[0][-1:]), None)
        text = f"{run.label} has no {line.key}{at}"
        if value is not None:
            text = f"{run.label} has {line.key} {format_value(value)}{at}"
        if step is not None and format_value(last) != format_value(value):
            text += f"; its last value is {format_value(last)}, at step {step:,}"
        sentences.append(f"{text}.")
    yield from sentences[:MAX_REASONS]
    if len(sentences) > MAX_REASONS:
        yield f"So it is with {len(sentences) - MAX_REASONS} more runs."


def _few(words: Sequence[str]) -> str:
    """The first of these words, and how many more there are."""
    more = f" and {len(words) - MAX_REASONS} more" if len(words) > MAX_REASONS else ""
    return f"{', '.join(words[:MAX_REASONS])}{more}"


def _is_ranked(run: ComparedRun, comparison: Comparison) -> bool:
    """Return True for trainings; without any, for evaluations."""
    return not run.is_evaluation or all(each.is_evaluation for each in comparison.runs)


def _ranked(comparison: Comparison) -> list[Side]:
    """Rank groups of seeds by their means, and all other runs, from best to worst."""
    line, runs = comparison.deciding, comparison.runs
    if line is None:
        return []
    grouped = {i for members in comparison.seeds.values() for i in members}
    alone = {run.label: (i,) for i, run in enumerate(runs) if i not in grouped}
    sides = [
        (label, runs[members[0]], over)
        for label, members in (comparison.seeds | alone).items()
        if _is_ranked(runs[members[0]], comparison)
        if (over := spread(line.equal[i] for i in members))
    ]
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
    return np.unique(
        [part[pick(y[part])] for part in parts for pick in (np.argmin, np.argmax)]
    )


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


def _figure(
    traces: list[dict[str, Any]], *, x_title: str, x_type: str = "linear"
) -> str:
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


# ---- files of the runs ------------------------------------------------------------------------


def _pictures(
    runs: Sequence[ComparedRun], *, say: Say
) -> dict[str, list[tuple[str, str]]]:
    """Name -> (label of the run, base64), those that most runs have first.

    Objectives draw pictures at the end of a training, evaluations and `finetune/visualize.py`
    whenever they run.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    num_pictures = 0
    for run in runs:
        for path in _files(run, PICTURES, max_bytes=MAX_PICTURE_BYTES, say=say):
            data = path.read_bytes()
            if not data.startswith(PNG_SIGNATURE):
                say(f"left out: {path}: is no PNG")
                continue
            num_pictures += 1
            if num_pictures > MAX_PICTURES:
                say(
                    f"left out: {path} and all further pictures: the page has {MAX_PICTURES}"
                )
                return _most_first(found)
            encoded = base64.b64encode(data).decode()
            found.setdefault(path.stem.replace("_", " "), []).append(
                (run.label, encoded)
            )
    return _most_first(found)


def _most_first(
    found: dict[str, list[tuple[str, str]]],
) -> dict[str, list[tuple[str, str]]]:
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _per_class(runs: Sequence[ComparedRun], *, say: Say) -> list[Table]:
    """The top-1 of each class in each run that was evaluated; of many classes, those that differ
    most between runs, of one run the worst."""
    shares: dict[str, dict[str, float]] = {}
    labels: list[str] = []
    for run in runs:
        for path in _files(run, [PER_CLASS], max_bytes=MAX_TABLE_BYTES, say=say):
            try:
                read = _read_shares(path)
            except (ValueError, KeyError, csv.Error) as error:
                say(f"left out: {path}: is no table of classes ({error})")
                continue
            labels.append(run.label)
            for name, share in read.items():
                shares.setdefault(name, {})[run.label] = share
    if not shares:
        return []

    def place(name: str) -> tuple[float, float, str]:
        known = shares[name].values()
        return min(known) - max(known), min(known), name

    chosen = sorted(shares, key=place)[:MAX_CLASSES]
    rows = tuple(
        (name, *(format_value(shares[name].get(label)) for label in labels))
        for name in chosen
    )
    title = "Top-1 of each class"
    if len(chosen) < len(shares):
        which = "differ most" if len(labels) > 1 else "are worst"
        title += f": the {len(chosen)} of {len(shares):,} that {which}"
    return [Table(title=title, header=("class", *labels), rows=rows)]


def _read_shares(path: Path) -> dict[str, float]:
    """Class -> share of its images that are right. Raises ValueError, KeyError or csv.Error."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shares = {str(row["class"]): float(row["top1"]) for row in rows if row["top1"]}
    if not all(map(math.isfinite, shares.values())):
        raise ValueError("a share is not finite")
    return shares


def _files(
    run: ComparedRun, patterns: Sequence[str], *, max_bytes: int, say: Say
) -> Iterator[Path]:
    """The files of a run folder; none of a run that MLflow has."""
    if run.folder is not None:
        yield from safe_files(run.folder, patterns, max_bytes=max_bytes, say=say)
