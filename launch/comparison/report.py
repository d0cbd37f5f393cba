"""Write the HTML report of a comparison as one self-contained file.

Owns: curves as inline SVG, pictures as inline PNG, and filling `report.html.j2`.
Leaves out: comparing (`differences`) and the page's design (`report.html.j2`).

Names of runs, parameters and metrics come from untrusted files: the template escapes all of them,
and none enters an SVG.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from launch.comparison.differences import Comparison
from launch.comparison.runs import RUNS_FOLDER, RunRecord
from launch.comparison.text import format_value, tables
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_text

# Okabe and Ito's palette for colour-blind readers, without black and yellow and with a lighter
# blue, so that it is readable on light and dark backgrounds. Further runs get dashed lines.
COLOURS = ("#1f83c9", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
INK = "#0a0b0c"  # placeholder, replaced by the page's text colour when the SVG is embedded

GROUP_ORDER = {"val": 0, "train": 1, "vitals": 2}
MAX_POINTS = 1000
SMOOTH_FROM_POINTS = 120
MAX_PICTURES_PER_RUN = 12
MAX_PICTURE_BYTES = 2 << 20
MAX_ALL_PICTURE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    key: str
    svg: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    caption: str
    data: str


def default_output(runs: Sequence[RunRecord]) -> Path:
    """runs/compare.html if there is a runs/ folder here, else beside the first run."""
    first = runs[0].folder
    if RUNS_FOLDER.is_dir() or first is None:
        return RUNS_FOLDER / "compare.html"
    return first.resolve().parent / "compare.html"


def write_report(comparison: Comparison, *, path: Path | str) -> Path:
    """Write the report atomically."""
    import jinja2

    path = Path(path)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        comparison=comparison,
        tables={table.header[0]: table for table in tables(comparison)},
        swatches=[_swatch(i) for i in range(len(comparison.runs))],
        groups=_charts(comparison),
        galleries=_galleries(comparison.runs),
        format_value=format_value,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            next_step="choose another --output",
        ) from None
    return path


def _swatch(i: int) -> dict[str, str]:
    """Colour and dash of run `i`, as SVG attributes for the legend."""
    dashes = ("none", "10 4", "3 3")
    return {
        "colour": COLOURS[i % len(COLOURS)],
        "dash": dashes[i // len(COLOURS) % len(dashes)],
    }


def _charts(comparison: Comparison) -> list[tuple[str, list[Chart]]]:
    """Charts by group, the part of a metric's name before the last slash."""
    import matplotlib

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.formatter.useoffset": False,
    }
    keys = [line.key for line in comparison.metrics]
    keys.sort(key=lambda key: (GROUP_ORDER.get(_group(key), 9), _group(key), key))
    with matplotlib.rc_context(style):
        return [
            (group, [_chart(key, comparison.runs) for key in members])
            for group, members in groupby(keys, key=_group)
        ]


def _group(key: str) -> str:
    return key.rsplit("/", 1)[0] if "/" in key else "other"


def _chart(key: str, runs: Sequence[RunRecord]) -> Chart:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(visible=True, color=INK, alpha=0.12, linewidth=0.6)
    num_not_finite = 0
    for i, run in enumerate(runs):
        steps, values = run.series(key)
        num_not_finite += sum(not math.isfinite(value) for value in values)
        steps, values = _thin(steps, [v if math.isfinite(v) else math.nan for v in values])
        line = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % 3]}
        marker = "o" if len(steps) <= 12 else ""
        if len(steps) >= SMOOTH_FROM_POINTS:
            axes.plot(steps, values, alpha=0.25, linewidth=0.8, gid=f"run-{i}", **line)
            values = _smooth(values)
        axes.plot(steps, values, linewidth=1.6, marker=marker, markersize=4, gid=f"run-{i}", **line)
    note = f"{num_not_finite} values that are not finite are left out" if num_not_finite else ""
    return Chart(key=key, svg=_inline_svg(figure, salt=key), note=note)


def _thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """At most MAX_POINTS evenly spaced points, including the last."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    chosen = [round(i * (len(steps) - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def _smooth(values: list[float]) -> list[float]:
    """Centred running mean over 5 % of the points; NaN stays a gap."""
    half = max(1, len(values) // 40)
    smoothed = []
    for i, value in enumerate(values):
        # Near the ends the window shrinks on both sides, which avoids bending the curve.
        reach = min(half, i, len(values) - 1 - i)
        near = [v for v in values[i - reach : i + reach + 1] if not math.isnan(v)]
        smoothed.append(math.nan if math.isnan(value) else sum(near) / len(near))
    return smoothed


def _inline_svg(figure: Any, *, salt: str) -> str:
    """SVG markup without prologue, metadata, and ids that would clash within one page."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    head, body = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    body = re.sub(r'id="(run-\d+)"', r'class="\1"', body)
    body = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", body)
    return f"{head}>{body}"


def _galleries(runs: Sequence[RunRecord]) -> list[tuple[int, list[Picture], int]]:
    """(run number, pictures, number left out) of every run that has pictures."""
    galleries = []
    bytes_left = MAX_ALL_PICTURE_BYTES
    for i, run in enumerate(runs):
        if run.folder is None:
            continue
        paths = sorted((run.folder / "pictures").glob("*.png"))
        pictures = []
        for path in paths[:MAX_PICTURES_PER_RUN]:
            size = path.stat().st_size
            if size > MAX_PICTURE_BYTES or size > bytes_left:
                continue
            bytes_left -= size
            data = base64.b64encode(path.read_bytes()).decode()
            pictures.append(Picture(caption=path.stem.replace("_", " "), data=data))
        if paths:
            galleries.append((i, pictures, len(paths) - len(pictures)))
    return galleries
