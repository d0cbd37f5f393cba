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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.comparison.differences import Comparison, MetricLine
from launch.comparison.report import (
    ABSENT,
    COSTS_TITLE,
    MARK,
    OTHERS_TITLE,
    Table,
    is_judged,
    tables,
)
from launch.comparison.runs import ComparedRun
from launch.comparison.verdict import ranking
from launch.comparison.verdict import verdict as _verdict
from vitscale.config.redaction import printable
from vitscale.evaluation.classification import PER_CLASS_NAME, read_per_class
from vitscale.evaluation.evaluation import FILES
from vitscale.evaluation.metric_texts import SHARES, TITLES, format_value, metric_place
from vitscale.tracking.run_files import safe_files

# Of a longer curve, the lowest and the highest point of each of half as many intervals are drawn.
MAX_POINTS = 1000
COLORS = """
    #1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf #2e91e5 #e15f99
    #1ca71c #fb0d0d #da16ff #222a2a #b68100 #750d86 #eb663b #511cfb #00a08b #fb00d1 #fc0080 #b2828d
""".split()
# A chart in a closed part has no width, so it is drawn when it is opened. A click on a name of the
# legend hides a run in all charts. On paper two charts are side by side, whatever the screen.
DRAW = """
const colorway = document.body.dataset.colors.split(" ");
const hidden = new Set();
function draw(chart) {
  const figure = JSON.parse(chart.dataset.figure);
  const longest = Math.max(...figure.series.map(({x}) => x.length));
  const data = figure.series.map(({name, x, y}, run) => {
    const best = {higher: Math.max, lower: Math.min}[figure.better];
    const star = best ? y.indexOf(y.reduce((a, b) => best(a, b), y[0])) : -1;
    return {
      name, x, y, mode: "lines+markers", line: {width: 1.8},
      visible: !hidden.has(run),
      marker: {opacity: 1, size: x.map((_, i) => i === star ? 13 : longest < 30 ? 5 : 0.1),
               symbol: x.map((_, i) => i === star ? "star" : "circle")},
    };
  });
  const axis = {gridcolor: "#e6eaef", zeroline: false, automargin: true};
  const percent = figure.percent ? {tickformat: ".0%", hoverformat: ".1%"} : {};
  const layout = {
    height: 330, margin: {l: 45, r: 10, t: 12, b: 40}, hovermode: "x unified", colorway,
    font: {family: "system-ui, sans-serif", size: 12, color: "#1b1f24"}, plot_bgcolor: "white",
    showlegend: false,
    xaxis: {...axis, title: {text: figure.x_title, standoff: 4}},
    yaxis: {...axis, ...percent},
  };
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(chart, data, layout,
    {responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons});
}
const drawn = () => document.querySelectorAll("[data-figure].js-plotly-plot");
for (const chart of document.querySelectorAll("[data-figure]"))
  if (!chart.closest("details:not([open])")) draw(chart);
for (const part of document.querySelectorAll("details"))
  part.addEventListener("toggle", () =>
    part.querySelectorAll("[data-figure]:not(.js-plotly-plot)").forEach(draw));
document.querySelectorAll(".legend button").forEach((button, run) =>
  button.addEventListener("click", () => {
    if (!hidden.delete(run)) hidden.add(run);
    button.classList.toggle("off", hidden.has(run));
    for (const chart of drawn())
      Plotly.restyle(chart, {visible: !hidden.has(run)}, [run]);
  }));
const resize = (change) => () => drawn().forEach((chart) => Plotly.relayout(chart, change));
addEventListener("beforeprint", resize({width: 330, height: 260}));
addEventListener("afterprint", resize({autosize: true, height: 330}));
"""
# Of objectives and `finetune/visualize.py`; of evaluations.
PICTURES = ("pictures/*.png", "evaluation/*.png")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE_BYTES = 4 << 20
MAX_PICTURES = 100
PER_CLASS = f"{FILES}/{PER_CLASS_NAME}"
MAX_TABLE_BYTES = 16 << 20
MAX_CLASSES = 30


def render(comparison: Comparison) -> str:
    """The page as HTML. Print which files of the runs are left out."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    # Names of runs and classes come from users, so everything is escaped.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = (get_plotlyjs(), DRAW)
    runs = comparison.runs

    # What decides is asked first.
    deciding = comparison.deciding
    lines = sorted(
        comparison.metrics, key=lambda line: (line != deciding, metric_place(line.key))
    )

    # Curves that are judged have a place of their own; a row of zeros is no curve.
    charts: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    constant = []
    for line in lines:
        if any(value for run in runs for _, value in run.series(line.key)):
            title = TITLES.get(line.key, "")
            charts[is_judged(line)].append((title, line.key, _curves(comparison, line)))
        else:
            constant.append(line.key)

    # The page marks the run that the deciding metric puts first.
    best = None
    if deciding is not None:
        for side in ranking(comparison, deciding, comparison.decisive(deciding))[:1]:
            best = runs[side.place].label
    results, *others = tables(comparison)
    others += _per_class(runs)
    return environment.get_template("page.html.j2").render(
        labels=[run.label for run in runs],
        colors=COLORS,
        mark=MARK,
        scripts=[Markup(script) for script in scripts],
        allowed=Markup(" ".join(map(_script_hash, scripts))),
        verdict=list(_verdict(comparison)),
        results=results,
        charts=charts,
        constant=constant,
        tables=others,
        details=(OTHERS_TITLE, COSTS_TITLE),
        best=best,
        pictures=_pictures(runs),
    )


def _script_hash(script: str) -> str:
    """Return the source expression that lets the security policy run this script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# ---- charts -----------------------------------------------------------------------------------


def _curves(comparison: Comparison, line: MetricLine) -> str:
    """One metric of all runs over the axis of the budget, for DRAW in JSON."""
    axis = "steps"
    if comparison.budget is not None:
        axis = comparison.budget.axis
    series = []
    for run in comparison.runs:
        steps, values = np.reshape(run.series(line.key), (-1, 2)).T
        # JSON has no NaN, and nothing can be drawn there.
        finite = np.flatnonzero(np.isfinite(values))
        places = finite[_drawn(values[finite])]
        x = np.interp(steps[places], run.steps, run.totals[axis])
        # plotly interprets some HTML in texts.
        name = html.escape(printable(run.label))
        series.append({"name": name, "x": _rounded(x), "y": _rounded(values[places])})
    figure = {
        "series": series,
        "x_title": axis,
        "percent": line.key.endswith(SHARES),
        "better": is_judged(line) and line.better,
    }
    return json.dumps(figure, allow_nan=False)


def _drawn(y: Any) -> Any:
    """Return the indices of the points to draw."""
    if len(y) <= MAX_POINTS:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), MAX_POINTS // 2)
    lowest = [part[np.argmin(y[part])] for part in parts]
    highest = [part[np.argmax(y[part])] for part in parts]
    return np.unique(lowest + highest)


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


# ---- files of the runs ------------------------------------------------------------------------


def _pictures(runs: Sequence[ComparedRun]) -> dict[str, list[tuple[str, str]]]:
    """Name -> (label of the run, base64), those that most runs have first.

    Objectives draw pictures at the end of a training, evaluations and `finetune/visualize.py`
    whenever they run.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    paths = [
        (run.label, path)
        for run in runs
        for path in _files(run, PICTURES, max_bytes=MAX_PICTURE_BYTES)
    ]
    for label, path in paths[:MAX_PICTURES]:
        data = path.read_bytes()
        if not data.startswith(PNG_SIGNATURE):
            print(f"left out: {path}: is no PNG")
            continue
        encoded = base64.b64encode(data).decode()
        found.setdefault(path.stem.replace("_", " "), []).append((label, encoded))
    for _, path in paths[MAX_PICTURES:]:
        print(f"left out: {path}: the page has {MAX_PICTURES} pictures")
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _per_class(runs: Sequence[ComparedRun]) -> list[Table]:
    """The top-1 of each class in each run that was evaluated; of many classes, those that differ
    most between runs, of one run the worst."""
    # Class -> share, of each run that has a table.
    labels = []
    shares: list[dict[str, float]] = []
    for run in runs:
        for path in _files(run, [PER_CLASS], max_bytes=MAX_TABLE_BYTES):
            try:
                shares.append(read_per_class(path))
                labels.append(run.label)
            except (ValueError, KeyError, csv.Error) as error:
                print(f"left out: {path}: is no table of classes ({error})")
    names = set[str]().union(*shares)
    if not names:
        return []

    # Of several runs the largest difference comes first, of one the lowest share.
    def place(name: str) -> tuple[float, float, str]:
        known = [of_run[name] for of_run in shares if name in of_run]
        return min(known) - max(known), min(known), name

    chosen = sorted(names, key=place)[:MAX_CLASSES]
    rows = []
    for name in chosen:
        cells = [name]
        for of_run in shares:
            cell = ABSENT
            if name in of_run:
                cell = format_value("top1", of_run[name])
            cells.append(cell)
        rows.append(tuple(cells))

    # The title says which classes are left out.
    title = "Accuracy of each class"
    if len(chosen) < len(names):
        which = "are worst"
        if len(labels) > 1:
            which = "differ most"
        title += f": the {len(chosen)} of {len(names):,} that {which}"
    return [Table(title=title, header=("class", *labels), rows=tuple(rows))]


def _files(
    run: ComparedRun, patterns: Sequence[str], *, max_bytes: int
) -> Iterator[Path]:
    """The files of a run folder; none of a run that MLflow has. Print what is left out."""
    if run.folder is not None:
        yield from safe_files(run.folder, patterns, max_bytes=max_bytes, say=print)
