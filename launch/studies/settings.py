"""The run type of a study: a grid of runs that differ along named axes. Needs no torch.

Owns: the file's settings and conflicts among them.
Leaves out: the runs of the grid (`grid`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import Run, Section
from vitscale.runs.training import RUN_NAME

# Overrides that a study makes itself.
OWN_KEYS = {
    "stage": "the run file",
    "name": "the names of the axes' values",
    "output": "the name of the run",
    "seed": "seeds",
    "init": "its pre-training, or `init` of the study or an axis",
    "tracking.experiment": "experiment, or the name of the study",
}


class StageChange(Section):
    """The run file of one stage, and overrides of it."""

    file: str | None = None
    """Run file, relative to the current folder; null: that of the study."""
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    """Settings as on the command line, for example [data.first_percent=1]."""


class AxisValue(Section):
    """One value of an axis: what it changes in the runs that have it."""

    label: str
    """Name in tags and, as letters and digits, in run names."""
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of both stages, as on the command line."""
    pretrain: StageChange = StageChange()
    finetune: StageChange = StageChange()
    from_scratch: bool = False
    """Do not pre-train: fine-tune from random weights, as a baseline."""
    init: str | None = None
    """Do not pre-train: fine-tune from these weights; written as `init` of a fine-tuning."""


class Axis(Section):
    """One dimension of the grid."""

    name: str
    """Name of the axis, for example model."""
    values: tuple[AxisValue, ...] = Field(min_length=1, strict=False)
    """The values; every combination of the axes' values is trained."""


class StudyRun(Run):
    """A grid of pre-trainings and transfers, trained by one command."""

    stage: Literal["study"] = "study"
    """What this file is; run by launch/local.py --study and launch/slurm.py --study."""
    name: str
    """Name of the study and of its folder."""
    experiment: str | None = None
    """MLflow experiment; null: the name of the study."""
    output: str | None = None
    """Folder of all runs; null: runs/NAME."""
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of every run, as on the command line, for example [launch.partition=NAME]."""
    pretrain: StageChange = StageChange()
    finetune: StageChange | None = None
    """Transfer of every pre-training; null: none."""
    init: str | None = None
    """Every transfer starts from these weights; nothing is pre-trained."""
    axes: tuple[Axis, ...] = Field(min_length=1, strict=False)
    """The dimensions of the grid."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, strict=False)
    """Every run is trained with each of these seeds."""
    max_running_tasks: int | None = Field(default=None, gt=0)
    """SLURM only: limit of trainings that run at a time; null: no limit."""

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    def problems(self) -> Iterator[tuple[str, str]]:
        if not RUN_NAME.fullmatch(self.name):
            yield ("name", f"{self.name!r}: use letters, digits, '.', '-', '_', at most 100")
        yield from _axis_problems(self)
        yield from _override_problems(self)
        yield from _seed_problems("seeds", self.seeds)
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


def slug(text: str) -> str:
    """A label as part of a run name: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _axis_problems(study: StudyRun) -> Iterator[tuple[str, str]]:
    names = [axis.name for axis in study.axes]
    for name in sorted(_repeated(names)):
        yield ("axes", f"axis {name!r} is listed twice")
    for axis in study.axes:
        if axis.name == "seed" or not slug(axis.name):
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


def _repeated(names: Iterable[str]) -> set[str]:
    known = list(names)
    return {name for name in known if known.count(name) > 1}
