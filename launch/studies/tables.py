"""Tables as papers have them: one axis as rows, the other axes as columns, means of groups below.

Owns: table.md and table.csv.
Leaves out: the numbers (`results`).
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.comparison.text import Table
from launch.studies.results import StudyResult, shown_value
from launch.studies.settings import AxisValue, StudyRun
from vitscale.distributed.atomic_files import write_text

MARKDOWN_NAME, CSV_NAME = "table.md", "table.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """Mean and sample standard deviation over seeds; None where there are too few."""

    mean: float | None
    spread: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTable:
    """One metric of a study."""

    metric: str
    rows_axis: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Number, ...]], ...]
    """(label, one number for each column); means of groups are rows too."""


def paper_table(study: StudyRun, results: Sequence[StudyResult]) -> PaperTable:
    """results: of one metric."""
    assert study.table is not None
    axis = study.axis(study.table.rows)
    found = {
        (_column(result, axis.name), result.values[axis.name].label): result for result in results
    }
    columns = list(dict.fromkeys(column for column, _ in found))
    rows = []
    for label, values in _row_groups(axis.values, has_mean=study.table.mean):
        cells = [[found.get((column, value.label)) for value in values] for column in columns]
        rows.append((label, tuple(_number(each) for each in cells)))
    return PaperTable(
        metric=results[0].metric, rows_axis=axis.name, columns=tuple(columns), rows=tuple(rows)
    )


def _column(result: StudyResult, rows_axis: str) -> str:
    others = [value.label for name, value in result.values.items() if name != rows_axis]
    return ", ".join(others) or result.metric


def _row_groups(
    values: Sequence[AxisValue], *, has_mean: bool
) -> Iterator[tuple[str, Sequence[AxisValue]]]:
    """(label of a row, the values that it is the mean of), groups after their last value."""
    for i, value in enumerate(values):
        yield value.label, [value]
        rest = [each.group for each in values[i + 1 :]]
        if value.group is not None and value.group not in rest:
            members = [each for each in values if each.group == value.group]
            yield f"mean of {len(members)} {value.group}", members
    if has_mean and len(values) > 1:
        yield f"mean of {len(values)}", values


def _number(results: Sequence[StudyResult | None]) -> Number:
    """The unweighted mean over results, by seed; absent while one of them has no seed."""
    by_seed = [set() if result is None else set(result.by_seed) for result in results]
    seeds = sorted(set.intersection(*by_seed))
    means = [
        statistics.fmean(result.by_seed[seed] for result in results if result is not None)
        for seed in seeds
    ]
    return Number(
        mean=statistics.fmean(means) if means else None,
        spread=statistics.stdev(means) if len(means) > 1 else None,
    )


def printed(table: PaperTable) -> Table:
    rows = [
        (label, *(shown_value(n.mean, n.spread, metric=table.metric) for n in numbers))
        for label, numbers in table.rows
    ]
    columns = ("",) if table.columns == (table.metric,) else table.columns
    return Table(title=table.metric, header=(table.rows_axis, *columns), rows=tuple(rows))


def markdown(table: Table) -> str:
    """A GitHub table under a heading."""
    lines = [f"## {table.title}", ""]
    lines.append(_markdown_row(table.header))
    lines.append(_markdown_row(["---"] * len(table.header)))
    lines += [_markdown_row(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def markdown_page(
    study: StudyRun, tables: Sequence[PaperTable], selected: Table | None, *, num_seeds: int
) -> str:
    """All tables of a study."""
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds: mean ± standard deviation"
    parts = [f"# {study.name}\n\nValues after the last step; {seeds}.\n"]
    parts += [markdown(printed(table)) for table in tables]
    parts += [markdown(selected)] if selected is not None else []
    return "\n".join(parts)


def csv_text(tables: Sequence[PaperTable]) -> str:
    """The same numbers unrounded: one line for each metric, row and column."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["metric", tables[0].rows_axis, "column", "mean", "std"])
    for table in tables:
        for label, numbers in table.rows:
            for column, number in zip(table.columns, numbers, strict=True):
                writer.writerow([table.metric, label, column, number.mean, number.spread])
    return file.getvalue()


def write_tables(folder: Path, *, page: str, tables: Sequence[PaperTable]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / MARKDOWN_NAME, page)
    write_text(folder / CSV_NAME, csv_text(tables))
    return [folder / MARKDOWN_NAME, folder / CSV_NAME]
