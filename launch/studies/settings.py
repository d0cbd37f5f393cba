"""The run type of a study: a grid of runs that differ along named axes. Needs no torch.

Owns: the file's settings and conflicts among them.
Leaves out: the runs of the grid (`grid`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from launch.comparison.differences import better_direction
from vitscale.config.section import Run, Section
from vitscale.runs.training import RUN_NAME

IMAGES, COMPUTE = "pretrain_images", "pretrain_flops"
# Overrides that a study makes itself.
OWN_KEYS = {
    "stage": "the run file",
    "name": "the names of the axes' values",
    "output": "the name of the run",
    "seed": "seeds",
    "init": "the cell's pre-training, or `init` of the study or an axis",
    "tracking.experiment": "experiment, or the name of the study",
}


class StageChange(Section):
    """The run file of one stage, and overrides of it."""

    file: str | None = None
    """Run file, relative to the current folder; null: that of the study."""
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    """Settings as on the command line, for example [data.first_percent=1]."""


class AxisValue(Section):
    """One value of an axis: what it changes in the runs of its cells."""

    label: str
    """Name in tables, figures, tags and, as letters and digits, in run names."""
    series: str | None = None
    """In a figure over compute, values with the same series are one line, such as a family of
    models; null: the label."""
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of both stages, as on the command line."""
    pretrain: StageChange = StageChange()
    finetune: StageChange = StageChange()
    from_scratch: bool = False
    """Do not pre-train: fine-tune from random weights, as a baseline."""
    init: str | None = None
    """Do not pre-train: fine-tune from these weights; written as `init` of a fine-tuning."""
    only: dict[str, Annotated[tuple[str, ...], Field(strict=False)]] = {}
    """Axis -> labels with which this value is combined, for example {set: [ImageNet]}; all others
    leave it out."""
    group: str | None = None
    """In a table, the mean over the rows with the same group is a row of its own."""


class Axis(Section):
    """One dimension of the grid."""

    name: str
    """Name of the axis, for example model."""
    values: tuple[AxisValue, ...] = Field(min_length=1, strict=False)
    """The values; every combination of the axes' values is a cell."""


class FigureSettings(Section):
    """One figure: the metric over x, with one line for each series."""

    name: str
    """File name, without suffix."""
    title: str | None = None
    """Text above the figure; null: none."""
    x: str
    """pretrain_images (number of images pre-trained on), pretrain_flops (compute of pre-training),
    both on a logarithmic axis; or the name of an axis."""
    series: str
    """Axis whose values are the lines; that of x: one point for each value, and no legend."""
    panels: str | None = None
    """Axis with one panel for each value, such as the transfer set; null: one panel."""


class SelectSettings(Section):
    """Choose the best value of one axis on held-out images, then train and test with it.

    Trials train every value; the final runs train on everything, with the best value and `seeds`.
    """

    axis: str
    """Axis to choose from, for each combination of the others. Its values change the transfer, or
    without one the pre-training."""
    metric: str | None = None
    """The best value has the best mean of this metric in its trials, the first of equal ones. null:
    `metric` of the study."""
    mean_over: tuple[str, ...] = Field(default=(), strict=False)
    """Axes over whose values the metric is averaged too, so that one value is chosen for all of
    them, for example [set] as in the ViT paper's VTAB."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, strict=False)
    """Seeds of the trials."""
    trials: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of the trials alone, for example [data.val_split=val]."""
    finals: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of the final runs alone, after data.dev_percent=0, for example
    [data.train_split=trainval]."""


class TableSettings(Section):
    """The table in table.md and table.csv, as papers show results."""

    rows: str
    """Axis whose values are the rows, such as the transfer set; the combinations of the other axes
    are the columns."""
    mean: bool = True
    """Last row: the unweighted mean of all rows."""


class StudyRun(Run):
    """A grid of pre-trainings and transfers, trained, tabulated and drawn by one command."""

    stage: Literal["study"] = "study"
    """What this file is; run by launch/local.py --study and launch/slurm.py --study."""
    name: str
    """Name of the study and of its folder."""
    experiment: str | None = None
    """MLflow experiment; null: the name of the study."""
    output: str | None = None
    """Folder of all runs and results; null: runs/NAME."""
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of every run, as on the command line, for example [launch.partition=NAME]."""
    pretrain: StageChange = StageChange()
    finetune: StageChange | None = None
    """Transfer of every pre-training; null: the metric is that of the pre-training itself."""
    init: str | None = None
    """Every transfer starts from these weights; nothing is pre-trained."""
    axes: tuple[Axis, ...] = Field(min_length=1, strict=False)
    """The dimensions of the grid."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, strict=False)
    """Every cell is trained with each of these seeds; tables and figures show their spread."""
    select: SelectSettings | None = None
    max_running_tasks: int | None = Field(default=None, gt=0)
    """SLURM only: limit of trainings that run at a time; null: no limit."""
    metric: str = "val/top1"
    """Result of a cell: the value of this metric after the last step."""
    other_metrics: tuple[str, ...] = Field(default=(), strict=False)
    """Further metrics after the last step, for the tables, for example
    [val/class_mean_top1]."""
    table: TableSettings | None = None
    figures: tuple[FigureSettings, ...] = Field(default=(), strict=False)
    """The figures to draw."""

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    @property
    def pretrains(self) -> bool:
        """Whether any transfer starts from a pre-training of the study."""
        given = [[v.init or v.from_scratch for v in axis.values] for axis in self.axes]
        return self.init is None and not any(all(values) for values in given)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, *self.other_metrics)

    @property
    def result_axes(self) -> tuple[Axis, ...]:
        """The axes of the results: all but the one that is chosen from."""
        return tuple(a for a in self.axes if self.select is None or a.name != self.select.axis)

    def select_key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Labels of the axes for which a value is chosen separately. labels: axis -> label."""
        assert self.select is not None
        joint = (self.select.axis, *self.select.mean_over)
        return tuple(label for name, label in labels.items() if name not in joint)

    @property
    def select_metric(self) -> str:
        assert self.select is not None
        return self.select.metric or self.metric

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not RUN_NAME.fullmatch(self.name):
            yield ("name", f"{self.name!r}: use letters, digits, '.', '-', '_', at most 100")
        yield from _axis_problems(self)
        yield from _override_problems(self)
        yield from _figure_problems(self)
        yield from _seed_problems("seeds", self.seeds)
        yield from _only_problems(self)
        yield from _select_problems(self)
        rows = None if self.table is None else self.table.rows
        names = [axis.name for axis in self.result_axes]
        if rows is not None and rows not in names:
            yield ("table.rows", f"{rows!r} is not one of {', '.join(names) or 'no axes'}")
        if len(set(self.metrics)) < len(self.metrics):
            yield ("other_metrics", f"{', '.join(self.metrics)}: a metric is listed twice")
        if self.finetune is None:
            if self.init is not None:
                yield ("init", "is what transfers start from; add `finetune: {}`")
            for axis in self.axes:
                if any(
                    v.from_scratch or v.init or v.finetune != StageChange() for v in axis.values
                ):
                    yield ("axes", f"{axis.name}: changes the transfer; add `finetune: {{}}`")


def _seed_problems(where: str, seeds: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if len(set(seeds)) < len(seeds):
        yield (where, f"{list(seeds)}: a seed is listed twice")
    if min(seeds) < 0:
        yield (where, f"{list(seeds)}: seeds are 0 or above")


def _only_problems(study: StudyRun) -> Iterator[tuple[str, str]]:
    known = {axis.name: [value.label for value in axis.values] for axis in study.axes}
    for axis in study.axes:
        for value in axis.values:
            where = f"{axis.name}: `only` of {value.label}"
            for name, labels in value.only.items():
                if name not in known or name == axis.name:
                    others = ", ".join(each for each in known if each != axis.name)
                    yield ("axes", f"{where}: {name!r} is not one of the axes {others}")
                    continue
                for label in labels:
                    if label not in known[name]:
                        yield ("axes", f"{where}: {label!r} is not a label of {name}")


def _select_problems(study: StudyRun) -> Iterator[tuple[str, str]]:
    select = study.select
    if select is None:
        return
    yield from _seed_problems("select.seeds", select.seeds)
    names = [axis.name for axis in study.axes]
    if select.axis not in names:
        yield ("select.axis", f"{select.axis!r} is not one of the axes {', '.join(names)}")
        return
    for name in select.mean_over:
        if name not in names or name == select.axis:
            others = ", ".join(each for each in names if each != select.axis)
            yield ("select.mean_over", f"{name!r} is not one of the other axes {others}")
    if better_direction(study.select_metric) is None:
        what = f"whether more of {study.select_metric!r} is better is not known"
        yield ("select.metric", f"{what}; choose a metric such as val/top1 or val/loss")
    for value in study.axis(select.axis).values:
        if value.from_scratch or value.init is not None:
            yield ("select.axis", f"{value.label}: where a transfer starts from is not chosen")
        if study.finetune is None or not study.pretrains:
            continue
        if value.overrides or value.pretrain != StageChange():
            what = "changes the pre-training, which has no trials"
            yield ("select.axis", f"{value.label}: {what}; write finetune: {{overrides: [...]}}")


def slug(text: str) -> str:
    """A label as part of a run name: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _axis_problems(study: StudyRun) -> Iterator[tuple[str, str]]:
    names = [axis.name for axis in study.axes]
    for name in sorted(_repeated(names)):
        yield ("axes", f"axis {name!r} is listed twice")
    for axis in study.axes:
        if axis.name in (IMAGES, COMPUTE, "seed") or not slug(axis.name):
            yield ("axes", f"{axis.name!r} cannot be the name of an axis; choose another")
        slugs = [slug(value.label) for value in axis.values]
        if not all(slugs):
            yield ("axes", f"{axis.name}: every label needs a letter or a digit")
        for name in sorted(_repeated(slugs)):
            yield ("axes", f"{axis.name}: two labels have the same name {name!r}; rename one")


def _override_problems(study: StudyRun) -> Iterator[tuple[str, str]]:
    for where, overrides in _all_overrides(study):
        for text in overrides:
            key = text.partition("=")[0].strip()
            if key in OWN_KEYS:
                yield (where, f"{text}: the study sets {key} itself, from {OWN_KEYS[key]}")


def _all_overrides(study: StudyRun) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "overrides", study.overrides
    yield "pretrain.overrides", study.pretrain.overrides
    if study.finetune is not None:
        yield "finetune.overrides", study.finetune.overrides
    for axis in study.axes:
        for value in axis.values:
            yield "axes", value.overrides + value.pretrain.overrides + value.finetune.overrides
    if study.select is not None:
        yield "select.trials", study.select.trials
        yield "select.finals", study.select.finals


def _figure_problems(study: StudyRun) -> Iterator[tuple[str, str]]:
    names = [axis.name for axis in study.axes]
    for name in sorted(_repeated([slug(figure.name) for figure in study.figures])):
        yield ("figures", f"two figures have the name {name!r}")
    for figure in study.figures:
        for key, axis in (("x", figure.x), ("series", figure.series), ("panels", figure.panels)):
            also = (IMAGES, COMPUTE) if key == "x" else ()
            if axis is not None and axis not in (*names, *also):
                allowed = ", ".join((*also, *names))
                yield ("figures", f"{figure.name}: {key}={axis!r} is not one of {allowed}")
        if not slug(figure.name):
            yield ("figures", f"{figure.name!r} is no file name")


def _repeated(names: Iterable[str]) -> set[str]:
    known = list(names)
    return {name for name in known if known.count(name) > 1}
