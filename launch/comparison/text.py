"""Print a comparison: rich tables on a terminal, aligned columns elsewhere.

Owns: the tables of strings, which the HTML report uses too.
Leaves out: comparing (`differences`) and the HTML report (`report`).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

from launch.comparison.differences import Comparison
from launch.comparison.seeds import Spread, spread
from vitscale.tracking.console import format_duration

ABSENT = "-"
MAX_CELL = 60
GROUP_ORDER = ("val", "train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def format_value(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.5g}"


def tables(comparison: Comparison) -> list[Table]:
    """Overview, metrics, spread over seeds, differing parameters; empty tables are left out."""
    labels = tuple(run.label for run in comparison.runs)
    overview = Table(
        title="Runs",
        header=("run", "last step", "wall time", "status", "read from"),
        rows=tuple(
            (
                run.label,
                str(run.last_step),
                format_duration(run.wall_s),
                run.status or ABSENT,
                run.source,
            )
            for run in comparison.runs
        ),
    )
    title = "Differing parameters" if len(labels) > 1 else "Parameters"
    if comparison.num_equal_params:
        title += f" ({comparison.num_equal_params} equal ones left out)"
    params = Table(
        title=title,
        header=("parameter", *labels),
        rows=tuple(
            (key, *(ABSENT if value is None else value for value in values))
            for key, values in comparison.params
        ),
    )
    metrics = Table(
        title=_metrics_title(comparison),
        header=("metric", "", *labels),
        rows=tuple(_metric_rows(comparison)),
    )
    found = [overview, metrics, _seeds_table(comparison), params]
    return [table for table in found if table.rows]


def _metrics_title(comparison: Comparison) -> str:
    if comparison.budget is None:
        return "Metrics: final, difference to the first run, best"
    return f"Metrics: final, {comparison.budget.title}, difference to the first run there, best"


def _seeds_table(comparison: Comparison) -> Table:
    """Metrics of evaluations and the loss at the end of each run, over seeds."""
    rows = []
    for line in comparison.metrics:
        groups = [spread([line.final[i] for i in group.members]) for group in comparison.seeds]
        if line.better is not None and any(groups):
            rows.append((line.key, *map(format_spread, groups)))
    return Table(
        title="Over seeds: final, mean and standard deviation",
        header=("metric", *(group.label for group in comparison.seeds)),
        rows=tuple(rows),
    )


def format_spread(value: Spread | None) -> str:
    return ABSENT if value is None else f"{value.mean:.5g} +- {value.deviation:.2g} ({value.count})"


def _metric_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    rows = []
    for line in sorted(comparison.metrics, key=lambda line: _place(line.key)):
        if not any(line.final + line.best):
            continue
        rows.append((line.key, "final", *map(format_value, line.final)))
        if line.equal is not None and line.equal != line.final:
            rows.append(("", "equal", *map(format_value, line.equal)))
        if len(line.final) > 1:
            cells = [
                ABSENT if delta is None else f"{delta:+.5g} {line.change(delta) or ''}".strip()
                for delta in line.deltas
            ]
            rows.append(("", "delta", *cells))
        if line.better is not None:
            rows.append(("", "best", *map(format_value, line.best)))
    return rows


def _place(key: str) -> tuple[int, str]:
    """Results first, then the training, then the rest."""
    group = key.split("/")[0]
    return GROUP_ORDER.index(group) if group in GROUP_ORDER else len(GROUP_ORDER), key


def print_comparison(comparison: Comparison, *, as_markdown: bool = False) -> None:
    for table in tables(comparison):
        if as_markdown:
            print(markdown(table))
        elif sys.stdout.isatty():
            _print_rich(table)
        else:
            print(plain_text(table))


def markdown(table: Table) -> str:
    """A table of GitHub's Markdown under a bold title."""
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    cells = [[re.sub(r"([|\\`*_<>\[\]])", r"\\\1", cell) for cell in row] for row in lines]
    cells[1] = list(lines[1])
    text = "\n".join(f"| {' | '.join(_printable(cell) for cell in row)} |" for row in cells)
    return f"**{table.title}**\n\n{text}\n"


def plain_text(table: Table) -> str:
    """Columns padded to their widest cell; long cells on several lines, control characters
    replaced."""
    cells: list[tuple[str, ...]] = []
    for row in (table.header, *table.rows):
        parts = [wrap(_printable(cell), MAX_CELL) for cell in row]
        cells += zip_longest(*parts, fillvalue="")
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.header))]
    lines = [table.title]
    for row in cells:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {padded}".rstrip())
    return "\n".join(lines) + "\n"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _print_rich(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=table.title, title_justify="left", header_style="bold")
    for i, name in enumerate(table.header):
        shown.add_column(Text(name), overflow="fold", no_wrap=i == 0)
    styles = {"better": "green", "worse": "red"}
    for row in table.rows:
        cells = [Text(cell, style=styles.get(cell.rsplit(" ", 1)[-1], "")) for cell in row]
        shown.add_row(*cells)
    Console().print(shown)
