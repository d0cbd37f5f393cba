"""Print a comparison: rich tables on a terminal, aligned columns elsewhere.

Owns: the tables of strings, which the HTML report uses too.
Leaves out: comparing (`differences`) and the HTML report (`report`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from launch.comparison.differences import Comparison
from vitscale.tracking.console import format_duration

ABSENT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def format_value(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.5g}"


def tables(comparison: Comparison) -> list[Table]:
    """Overview, differing parameters, metrics; empty tables are left out."""
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
        title="Metrics: final, difference to the first run, best",
        header=("metric", "", *labels),
        rows=tuple(_metric_rows(comparison)),
    )
    return [table for table in (overview, params, metrics) if table.rows]


def _metric_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    rows = []
    for line in comparison.metrics:
        rows.append((line.key, "final", *map(format_value, line.final)))
        if len(line.final) > 1:
            cells = [
                ABSENT if delta is None else f"{delta:+.5g} {line.change(delta) or ''}".strip()
                for delta in line.deltas
            ]
            rows.append(("", "delta", *cells))
        if line.better is not None:
            rows.append(("", "best", *map(format_value, line.best)))
    return rows


def print_comparison(comparison: Comparison) -> None:
    for table in tables(comparison):
        if sys.stdout.isatty():
            _print_rich(table)
        else:
            print(plain_text(table))


def plain_text(table: Table) -> str:
    """Columns padded to their widest cell; control characters are replaced."""
    cells = [
        tuple("".join(c if c.isprintable() else "?" for c in cell) for cell in row)
        for row in (table.header, *table.rows)
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.header))]
    lines = [table.title]
    for row in cells:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {padded}".rstrip())
    return "\n".join(lines) + "\n"


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
