"""Tabulate a study: the metric of every cell, with mean and spread over seeds.

Owns: reading the metric from the journals, aggregating seeds, results.csv and the printed table.
Leaves out: drawing (`figure`).
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.comparison.text import ABSENT, Table
from launch.studies.grid import Cell, Grid, StudyTraining, in_runs
from launch.studies.settings import AxisValue
from launch.studies.states import Completion, TrainingState, is_diverged_trial
from vitscale.config.errors import UserError, UserErrors
from vitscale.distributed.atomic_files import write_text
from vitscale.tracking.journal import JOURNAL_NAME, read_rows

RESULTS_NAME = "results.csv"
# Metrics that are shares of 1 are shown in per cent.
SHARES = ("top1", "top5", "accuracy")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """One combination of the axes' values, over its seeds."""

    metric: str
    values: dict[str, AxisValue]
    training: StudyTraining
    """The training of the first seed whose metric this is."""
    pretrain: StudyTraining | None
    """The pre-training of the first seed; None: from scratch, or not trained by the study."""
    by_seed: dict[int, float]
    """Seed -> metric, for the cells that are done."""
    num_seeds: int

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


def collect(
    grid: Grid, states: Mapping[str, TrainingState], *, metric: str | None = None
) -> list[StudyResult]:
    """One result for each combination of values, in the order of the grid.

    metric: null: the first one of the study.
    """
    return _results(grid, states, grid.cells, metric=metric or grid.study.metric)


def collect_trials(grid: Grid, states: Mapping[str, TrainingState]) -> list[StudyResult]:
    """The same for the trials of a selection, by its metric."""
    if grid.study.select is None:
        return []
    return _results(grid, states, grid.trials, metric=grid.study.select_metric)


def _results(
    grid: Grid, states: Mapping[str, TrainingState], cells: Sequence[Cell], *, metric: str
) -> list[StudyResult]:
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(v.label for v in cell.values.values()), []).append(cell)
    return [_result(grid, states, each, metric=metric) for each in groups.values()]


def _result(
    grid: Grid, states: Mapping[str, TrainingState], cells: list[Cell], *, metric: str
) -> StudyResult:
    first = cells[0]
    return StudyResult(
        metric=metric,
        values=first.values,
        training=grid.trainings[first.result],
        pretrain=None if first.pretrain is None else grid.trainings[first.pretrain],
        by_seed={
            cell.seed: last_value(grid.trainings[cell.result], metric)
            for cell in cells
            if states[cell.result].progress is Completion.DONE
        },
        num_seeds=len(cells),
    )


def last_value(training: StudyTraining, metric: str) -> float:
    """The metric after the last step of a finished training. Raises UserError if it has none."""
    path = training.folder / JOURNAL_NAME
    known: set[str] = set()
    values = []
    try:
        for row, _ in read_rows(path):
            known |= row.metrics.keys()
            if row.step == training.steps and metric in row.metrics:
                values.append(row.metrics[metric])
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if not values:
        raise UserError(
            f"no {metric} at the last step, {training.steps:,}",
            where=str(path),
            allowed=", ".join(sorted(key for key in known if key.startswith("val/"))) or None,
            next_step="choose another metric in the study, or evaluate in its run files",
        )
    return values[-1]


def trial_value(training: StudyTraining, metric: str) -> float:
    """As `last_value`; NaN for a trial that has diverged."""
    return math.nan if is_diverged_trial(training) else last_value(training, metric)


def check_metrics(grid: Grid) -> None:
    """Raise UserErrors for metrics of the study that its runs do not log after their last step."""
    found: dict[str, tuple[str, list[str]]] = {}
    cells = [(cell, grid.study.metrics) for cell in grid.cells]
    cells += [(cell, (grid.study.select_metric,)) for cell in grid.trials]
    for cell, metrics in cells:
        training = grid.trainings[cell.result]
        logged = _evaluated(training)
        for metric in metrics:
            if metric.startswith("val/") and metric not in logged:
                allowed = ", ".join(logged) or "none, the runs evaluate nothing"
                found.setdefault(metric, (allowed, []))[1].append(training.name)
    errors = [
        UserError(
            in_runs(f"{metric} is no result of these runs", names).text(),
            where="metric",
            allowed=allowed,
            next_step="correct the name, or add the evaluation to `evaluate` of the run files",
        )
        for metric, (allowed, names) in found.items()
    ]
    if errors:
        raise UserErrors(errors)


def _evaluated(training: StudyTraining) -> list[str]:
    """Metrics of its evaluations, which all run after the last step."""
    run = training.run
    if run.data.evaluated is None:
        return []
    evaluations = run.make_objective().evaluations(run)
    names = [name for each in evaluations for name in each.metric_names()]
    averaged = [f"ema_{name}" for name in names] if run.optim.ema is not None else []
    return [f"val/{name}" for name in [*names, *averaged]]


def table(grid: Grid, results: list[StudyResult]) -> Table:
    """The results to print: one line per combination, mean and spread over seeds."""
    header = (
        *(axis.name for axis in grid.study.result_axes),
        *HEADINGS,
        grid.study.metric,
        "seeds",
    )
    rows = []
    for result in results:
        of_seeds = f"{len(result.by_seed)} of {result.num_seeds}"
        labels = (value.label for value in result.values.values())
        value = shown_value(result.mean, result.spread, metric=grid.study.metric)
        rows.append((*labels, *_shown_costs(result), value, of_seeds))
    title = f"Study {grid.study.name}: mean ± standard deviation over seeds"
    return Table(title=title, header=header, rows=tuple(rows))


HEADINGS = ("pre-training images", "images seen", "pre-training FLOPs", "parameters")


def _shown_costs(result: StudyResult) -> Iterator[str]:
    images, seen, flops, parameters = _costs(result)
    yield ABSENT if images is None else f"{images:,}"
    yield ABSENT if seen is None else f"{seen:,}"
    yield ABSENT if flops is None else f"{flops:.3g}"
    yield ABSENT if parameters is None else f"{parameters:,}"


def _costs(result: StudyResult) -> tuple[int | None, int | None, int | None, int | None]:
    """(pre-training images, images seen, FLOPs, parameters); from scratch the first three are 0."""
    parameters = result.training.parameters
    pretrain = result.pretrain
    if pretrain is None:
        is_scratch = getattr(result.training.run, "init", None) is None
        return (0, 0, 0, parameters) if is_scratch else (None, None, None, parameters)
    steps = pretrain.steps
    seen = None if steps is None else steps * pretrain.run.data.global_batch
    return pretrain.images, seen, pretrain.flops, parameters


def is_share(metric: str) -> bool:
    return metric.endswith(SHARES)


def shown_value(mean: float | None, spread: float | None, *, metric: str) -> str:
    if mean is None:
        return ABSENT
    if math.isnan(mean):
        return Completion.DIVERGED.value
    scale, digits, unit = (100.0, 2, " %") if is_share(metric) else (1.0, 4, "")
    text = f"{mean * scale:.{digits}f}"
    return text + (f" ± {spread * scale:.{digits}f}" if spread is not None else "") + unit


def write_csv(grid: Grid, results: list[StudyResult], *, folder: Path) -> Path:
    """results.csv: one line per combination and metric, with every seed, mean and spread."""
    seeds = grid.study.seeds
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    axes = [axis.name for axis in grid.study.result_axes]
    columns = ("pretrain_images", "images_seen", "pretrain_flops", "parameters")
    writer.writerow(
        [*axes, *columns, "metric", "mean", "std", *(f"seed_{seed}" for seed in seeds), "run"]
    )
    for result in results:
        labels = [value.label for value in result.values.values()]
        values = [result.by_seed.get(seed, "") for seed in seeds]
        numbers = [result.metric, result.mean, result.spread, *values]
        writer.writerow([*labels, *_costs(result), *numbers, result.training.folder])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_NAME
    write_text(path, file.getvalue())
    return path
