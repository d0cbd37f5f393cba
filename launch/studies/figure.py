"""Draw the figures of a study: a metric over images, compute or an axis, as SVG and PNG.

Owns: series, error bars over seeds, panels, axes.
Leaves out: the numbers (`results`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.studies.results import StudyResult, is_share
from launch.studies.settings import COMPUTE, IMAGES, AxisValue, FigureSettings, StudyRun, slug

# Okabe and Ito's palette for colour-blind readers, without black and yellow and with a lighter
# blue, so that it is readable on light and dark backgrounds. Further series get dashed lines.
COLOURS = ("#1f83c9", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P")
X_LABELS = {IMAGES: "pre-training images", COMPUTE: "pre-training compute [FLOPs]"}
INK, MUTED = "#22272e", "#6b7480"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "study",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}
PANEL_INCHES, HEIGHT_INCHES, LEGEND_INCHES = 4.6, 3.7, 1.6
PNG_DPI = 160
# Letters that fit below one panel, side by side.
TICK_LETTERS = 76
# Between neighbouring series: of the axis's natural logarithm, or of the step between two values.
SHIFT = 0.04


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    y: float
    spread: float | None
    """Sample standard deviation over seeds."""
    label: str
    """The other axes' values that distinguish points of a series; empty where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line; from scratch, where x has no place on a logarithmic axis, a level."""

    name: str
    points: tuple[Point, ...]
    is_level: bool = False


def draw(
    study: StudyRun,
    results: Sequence[StudyResult],
    *,
    folder: Path,
    trials: Sequence[StudyResult] = (),
) -> list[Path]:
    """Write every figure of the study that has a point. Returns the paths of the SVG files.

    trials: results of a selection's trials, for figures over the axis that is chosen from.
    """
    paths = []
    for figure in study.figures:
        drawn = trials if is_of_trials(study, figure) else results
        if any(panel_series(study, figure, drawn, panel=p) for p in _panels(study, figure)):
            paths.append(_draw(study, figure, drawn, folder=folder))
    return paths


def is_of_trials(study: StudyRun, figure: FigureSettings) -> bool:
    axis = None if study.select is None else study.select.axis
    return axis is not None and axis in (figure.x, figure.series, figure.panels)


def _panels(study: StudyRun, figure: FigureSettings) -> list[str | None]:
    if figure.panels is None:
        return [None]
    return [value.label for value in study.axis(figure.panels).values]


def panel_series(
    study: StudyRun, figure: FigureSettings, results: Sequence[StudyResult], *, panel: str | None
) -> list[Series]:
    """The lines of one panel, in the order of the axis; results without a value are left out."""
    lines: dict[str, list[Point]] = {}
    levels: dict[str, list[Point]] = {}
    for result in results:
        if result.mean is None or (
            figure.panels is not None and result.values[figure.panels].label != panel
        ):
            continue
        value = result.values[figure.series]
        name = line_name(value, figure)
        x = _x(study, figure, result)
        if x is None:
            continue
        scale = 100.0 if is_share(result.metric) else 1.0
        point = Point(
            x=x,
            y=result.mean * scale,
            spread=None if result.spread is None else result.spread * scale,
            label=value.label if value.label != name else "",
        )
        is_level = x == 0 and figure.x in X_LABELS
        into = (levels if is_level else lines).setdefault(name, [])
        if point not in into:
            into.append(point)
    found = [Series(name=n, points=tuple(sorted(p, key=lambda q: q.x))) for n, p in lines.items()]
    found += [Series(name=n, points=tuple(p), is_level=True) for n, p in levels.items()]
    return found


def line_name(value: AxisValue, figure: FigureSettings) -> str:
    """Over compute, models of one family are one line; elsewhere each value is a line."""
    return value.series if figure.x == COMPUTE and value.series is not None else value.label


def _x(study: StudyRun, figure: FigureSettings, result: StudyResult) -> float | None:
    if figure.x not in X_LABELS:
        labels = [value.label for value in study.axis(figure.x).values]
        return float(labels.index(result.values[figure.x].label))
    if result.pretrain is None:
        return 0.0
    number = result.pretrain.images if figure.x == IMAGES else result.pretrain.flops
    return None if number is None else float(number)


def _draw(
    study: StudyRun, figure: FigureSettings, results: Sequence[StudyResult], *, folder: Path
) -> Path:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(study, figure)
    with matplotlib.rc_context(STYLE):
        drawing = Figure(
            figsize=(PANEL_INCHES * len(panels) + LEGEND_INCHES, HEIGHT_INCHES),
            layout="constrained",
        )
        FigureCanvasAgg(drawing)
        all_axes = drawing.subplots(1, len(panels), squeeze=False)[0]
        styles = _styles(study, figure)
        drawn = [panel_series(study, figure, results, panel=panel) for panel in panels]
        sizes = {p.x for lines in drawn for line in lines if not line.is_level for p in line.points}
        for panel, axes, lines in zip(panels, all_axes, drawn, strict=True):
            _label_axes(axes, study, figure, sizes=sorted(sizes))
            _draw_panel(axes, lines, styles=styles, figure=figure)
            if panel is not None:
                axes.set_title(f"{figure.panels}: {panel}", loc="left")
        all_axes[0].set_ylabel(_y_label(study, figure))
        if figure.series != figure.x:
            _add_legend(drawing, all_axes, names=list(styles))
        drawing.supxlabel(_footnote(results), x=0.01, ha="left", fontsize=8, color=MUTED)
        if figure.title is not None:
            drawing.suptitle(figure.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        path = folder / f"{slug(figure.name)}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Date": None})
        drawing.savefig(path.with_suffix(".png"), dpi=PNG_DPI)
    return path


def _styles(study: StudyRun, figure: FigureSettings) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash of each series, the same in all panels."""
    names = dict.fromkeys(line_name(value, figure) for value in study.axis(figure.series).values)
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
        }
        for i, name in enumerate(names)
    }


def _add_legend(drawing: Any, all_axes: Sequence[Any], *, names: Sequence[str]) -> None:
    """One legend for all panels, in the order of the axis."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    shown = [name for name in names if name in handles]
    drawing.legend([handles[name] for name in shown], shown, loc="outside right center")


def _footnote(results: Sequence[StudyResult]) -> str:
    counts = sorted({len(result.by_seed) for result in results if result.by_seed})
    if counts[-1] == 1:
        return "one seed each"
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean and standard deviation over {seeds} seeds"


def _draw_panel(
    axes: Any, lines: Sequence[Series], *, styles: Mapping[str, Any], figure: FigureSettings
) -> None:
    gap = 0.0 if figure.series == figure.x else SHIFT
    for line in lines:
        style = styles[line.name]
        shift = (list(styles).index(line.name) - (len(styles) - 1) / 2) * gap
        if line.is_level:
            for point in line.points:
                axes.axhline(
                    point.y, color=style["color"], linestyle=(0, (4, 2)), linewidth=1.3,
                    label=line.name,
                )  # fmt: skip
                if point.spread is not None:
                    low, high = point.y - point.spread, point.y + point.spread
                    axes.axhspan(low, high, color=style["color"], alpha=0.13, linewidth=0)
            continue
        axes.errorbar(
            # Apart, so that error bars at one x can be told from each other.
            [_shifted(point.x, shift, x=figure.x) for point in line.points],
            [point.y for point in line.points],
            # 0 where there is one seed: no bar is seen.
            yerr=[point.spread or 0.0 for point in line.points],
            linewidth=1.6, markersize=5.5, capsize=3, elinewidth=1.1, label=line.name, **style,
        )  # fmt: skip
        for point in line.points:
            if point.label:
                axes.annotate(
                    point.label, (point.x, point.y), xytext=(5, -11), textcoords="offset points",
                    fontsize=8, color=MUTED,
                )  # fmt: skip


def _shifted(value: float, shift: float, *, x: str) -> float:
    if x == COMPUTE:
        return value
    return value * math.exp(shift) if x == IMAGES else value + shift


def _label_axes(
    axes: Any, study: StudyRun, figure: FigureSettings, *, sizes: Sequence[float]
) -> None:
    """sizes: every x of the figure, so that all panels have the same axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.grid(visible=True, axis="y", color=MUTED, alpha=0.22, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(X_LABELS.get(figure.x, figure.x))
    axes.margins(y=0.12)
    if figure.x not in X_LABELS:
        labels = [value.label for value in study.axis(figure.x).values]
        width = TICK_LETTERS // len(labels)
        axes.set_xticks(range(len(labels)), [textwrap.fill(label, width) for label in labels])
        axes.set_xlim(-0.5, len(labels) - 0.5)
        return
    axes.set_xscale("log")
    if sizes:
        room = (sizes[-1] / sizes[0]) ** 0.09 * 1.25
        axes.set_xlim(sizes[0] / room, sizes[-1] * room)
    axes.xaxis.set_minor_locator(NullLocator())
    if figure.x == IMAGES:
        # The sizes themselves are clearer than powers of ten.
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    else:
        is_short = bool(sizes) and sizes[-1] / sizes[0] < 30
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: power_of_ten(x)))


def power_of_ten(number: float) -> str:
    """5e10 -> 5·10 to the 10, as mathematical text."""
    digits, exponent = f"{number:.0e}".split("e")
    factor = "" if digits == "1" else rf"{digits}\cdot"
    return f"${factor}10^{{{int(exponent)}}}$"


def short_number(number: float) -> str:
    """12_400 -> 12.4k, 303_000_000 -> 303M: three digits."""
    if number < 1000:
        return f"{number:g}"
    power = min(3, int(math.log10(number * 1.0005) // 3))
    return f"{number / 1000**power:.3g}{' kMB'[power]}".strip()


def _y_label(study: StudyRun, figure: FigureSettings) -> str:
    of_trials = is_of_trials(study, figure)
    metric = study.select_metric if of_trials else study.metric
    name = metric.rsplit("/", 1)[-1]
    words = {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}.get(name, name)
    stage = "transfer" if study.finetune is not None else "pre-training"
    unit = " [%]" if is_share(metric) else ""
    return f"{words} {'on held-out images' if of_trials else f'of the {stage}'}{unit}"
