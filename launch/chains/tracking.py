"""Show the sweeps of a chain in MLflow and as tables, as studies do.

Leaves out: both of them (`launch.studies`). A stage that is no sweep has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from launch.chains.graph import ChainStep, Stage
from launch.studies.command import show_results
from launch.studies.states import states_of
from launch.studies.tracking import as_children, close_study_parent, open_study_parent
from vitscale.config.errors import UserError
from vitscale.tracking.parent_run import ParentRun

Say = Callable[[str], None]


def open_parent(stage: Stage, *, say: Say) -> ParentRun | None:
    """The MLflow run above the runs of a sweep."""
    return None if stage.grid is None else open_study_parent(stage.grid, say=say)


def children(
    stage: Stage, steps: Iterable[ChainStep], parent: ParentRun | None
) -> Iterator[ChainStep]:
    """The steps, whose runs start as children of the parent."""
    grid = None if stage.grid is None else as_children(stage.grid, parent)
    for step in steps:
        yield step if grid is None else replace(step, run=grid.trainings[step.short_name].run)


def close(stage: Stage, parent: ParentRun | None, *, status: str, say: Say) -> None:
    """Show the results of a sweep. status: of its run in MLflow."""
    if stage.grid is None:
        return
    try:
        show_results(stage.grid, states_of(stage.grid), parent)
    except UserError as error:
        say(f"no table of {stage.name}: {error.text()}")
    close_study_parent(parent, status, say=say)
