"""Choose one value of an axis by its trials, and make the final runs those of the chosen values.

Owns: the choice (best mean over the trials' seeds), selected.csv, and jobs that choose when they
start, for clusters.
Leaves out: the trainings (`grid`), training them (`running`, `arrays`).
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from launch.comparison.differences import better_direction
from launch.comparison.text import ABSENT, Table
from launch.jobs.job import StageJob
from launch.studies.grid import Grid, StudyTraining, in_runs
from launch.studies.results import shown_value, trial_value
from launch.studies.states import FINISHED, TrainingState, states_of
from vitscale.config.errors import EXIT_BAD_INPUT, UserError, UserErrors
from vitscale.distributed.atomic_files import write_text

SELECTED_NAME = "selected.csv"
ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The choice for one combination of the other axes' values."""

    others: dict[str, str]
    """Axis -> label, of the axes that are not chosen from; ALL where one value is for all."""
    trials: dict[str, tuple[str, ...]]
    """Label -> names of its trials."""
    means: dict[str, float | None]
    """Label -> mean of the metric over its trials; None while one is not done."""
    label: str | None
    """The chosen value; None while a trial is not done."""


def check_held_out(grid: Grid) -> None:
    """Raise UserErrors for trials on the images that the result is measured on."""
    found: dict[str, list[str]] = {}
    for training in grid.trainings.values():
        for candidate in training.candidates:
            tested = candidate.training.run.data
            for name in candidate.trials:
                data = grid.trainings[name].run.data
                if data.evaluated is None or tested.evaluated is None:
                    side = "trials" if data.evaluated is None else "final runs"
                    text = f"the {side} evaluate nothing, because data.val_split is null"
                elif (data.path, data.evaluated) == (tested.path, tested.evaluated):
                    text = f"trials and final runs evaluate the same images, {data.evaluated}"
                else:
                    continue
                found.setdefault(text, []).append(name)
    advice = "set data.dev_percent in the run file or an axis, or data.val_split in select.trials"
    errors = [
        UserError(in_runs(text, names).text(), where="select", next_step=advice)
        for text, names in found.items()
    ]
    if errors:
        raise UserErrors(errors)


def best(means: Mapping[str, float], *, metric: str) -> str:
    """The label with the best mean, the first of equal ones; NaN, of trials that diverged, is
    worse than any number. Raises UserError where all are NaN.
    """
    if all(math.isnan(mean) for mean in means.values()):
        raise UserError(
            f"the trials of all values have diverged: {', '.join(means)}",
            where="select",
            next_step="add values to the axis, such as lower learning rates",
        )
    sign = 1 if better_direction(metric) == "higher" else -1
    scores = {
        label: -math.inf if math.isnan(mean) else sign * mean for label, mean in means.items()
    }
    return max(scores, key=scores.__getitem__)


def selections(grid: Grid, states: Mapping[str, TrainingState]) -> list[Selection]:
    """All choices, made or not, in the order of the grid."""
    if grid.study.select is None:
        return []
    axis, joint = grid.study.select.axis, grid.study.select.mean_over
    groups: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    labels_of: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in grid.trials:
        labels = {name: value.label for name, value in cell.values.items()}
        key = grid.study.select_key(labels)
        label = labels.pop(axis)
        labels_of[key] = labels | {name: ALL for name in joint}
        trials = groups.setdefault(key, {})
        trials[label] = (*trials.get(label, ()), cell.result)
    return [_selection(grid, states, labels_of[key], trials) for key, trials in groups.items()]


def _selection(
    grid: Grid,
    states: Mapping[str, TrainingState],
    others: dict[str, str],
    trials: dict[str, tuple[str, ...]],
) -> Selection:
    means = {
        label: _mean(grid, names)
        if all(states[name].progress in FINISHED for name in names)
        else None
        for label, names in trials.items()
    }
    known = {label: mean for label, mean in means.items() if mean is not None}
    metric = grid.study.select_metric
    is_known = len(known) == len(means) and not all(map(math.isnan, known.values()))
    label = best(known, metric=metric) if is_known else None
    return Selection(others=others, trials=trials, means=means, label=label)


def _mean(grid: Grid, trials: Sequence[str]) -> float:
    metric = grid.study.select_metric
    return fmean(trial_value(grid.trainings[name], metric) for name in trials)


def chosen(grid: Grid, training: StudyTraining) -> StudyTraining:
    """The final run with its best value. Its trials are done."""
    means = {each.label: _mean(grid, each.trials) for each in training.candidates}
    label = best(means, metric=grid.study.select_metric)
    return next(each.training for each in training.candidates if each.label == label)


def resolve(grid: Grid) -> tuple[Grid, dict[str, TrainingState]]:
    """The grid with every choice made that can be made, and the states of its trainings."""
    states = states_of(grid)
    done = {name for name, state in states.items() if state.progress in FINISHED}
    trainings = {
        name: chosen(grid, training) if set(training.trials) <= done else training
        for name, training in grid.trainings.items()
        if training.candidates
    }
    if not trainings:
        return grid, states
    grid = replace(grid, trainings=grid.trainings | trainings)
    return grid, states_of(grid)


def selected_table(grid: Grid, found: list[Selection]) -> Table:
    """Every choice with the metric of all values, on the images that were held out."""
    select = grid.study.select
    assert select is not None
    metric = grid.study.select_metric
    labels = [value.label for value in grid.study.axis(select.axis).values]
    rows = []
    for each in found:
        values = [
            shown_value(each.means[label], None, metric=metric) if label in each.means else ""
            for label in labels
        ]
        rows.append((*each.others.values(), each.label or ABSENT, *values))
    others = [axis.name for axis in grid.study.result_axes]
    return Table(
        title=f"Chosen {select.axis}, by {metric} on held-out images",
        header=(*others, "chosen", *labels),
        rows=tuple(rows),
    )


def write_selected(grid: Grid, found: list[Selection], *, folder: Path) -> Path:
    """selected.csv: one line for each value of each choice that is made."""
    select = grid.study.select
    assert select is not None
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    others = [axis.name for axis in grid.study.result_axes]
    columns = (select.axis, "selected", "metric", "mean", "trials", "runs")
    writer.writerow([*others, *columns])
    for each in found:
        if each.label is None:
            continue
        for label, names in each.trials.items():
            runs = " ".join(str(grid.trainings[name].folder) for name in names)
            numbers = [grid.study.select_metric, each.means[label], len(names), runs]
            is_chosen = "true" if label == each.label else "false"
            writer.writerow([*each.others.values(), label, is_chosen, *numbers])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SELECTED_NAME
    write_text(path, file.getvalue())
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectingJob:
    """The job of a final run that chooses its value when it starts, after the trials have ended.

    Every rank and every restart reads the same journals and thus chooses the same value.
    """

    name: str
    metric: str
    trials: dict[str, tuple[StudyTraining, ...]]
    """Label -> its trials."""
    jobs: dict[str, StageJob]
    """Label -> the final run with this value."""

    @property
    def run_folder(self) -> str | None:
        """The same for every value."""
        return next(iter(self.jobs.values())).run_folder

    def chosen(self) -> str:
        """Raises UserError if a trial has no result, or all have diverged."""
        means = {
            label: fmean(trial_value(trial, self.metric) for trial in trials)
            for label, trials in self.trials.items()
        }
        return best(means, metric=self.metric)

    def __call__(self) -> int:
        try:
            label = self.chosen()
        except UserError as error:
            print(f"{self.name} cannot choose a value:\n{error.text()}", file=sys.stderr)
            raise SystemExit(EXIT_BAD_INPUT) from None
        print(f"{self.name}: {label} is the best of {', '.join(self.jobs)}", flush=True)
        return self.jobs[label]()
