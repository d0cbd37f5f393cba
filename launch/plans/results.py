"""Show the results of a study or a sweep: tables, files and figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launch.comparison.text import plain_text
from launch.plans.stages import Stage, with_choices
from launch.plans.tracking import close_parent, publish
from launch.studies.figure import draw
from launch.studies.grid import Grid
from launch.studies.results import collect, collect_trials, table, write_csv
from launch.studies.selection import selected_table, selections, write_selected
from launch.studies.states import states_of
from launch.studies.tables import markdown_page, paper_table, printed, write_tables
from vitscale.config.errors import UserError
from vitscale.tracking.parent_run import ParentRun

Say = Callable[[str], None]


def finish_stage(stage: Stage, parent: ParentRun | None, *, status: str, say: Say) -> None:
    """Show the results of a stage that has a grid. status: of its run in MLflow.

    Raises UserError for a study without a result, such as one whose metric no run has; for a sweep
    of a chain this is printed.
    """
    if stage.grid is None:
        return
    try:
        show_results(with_choices(stage).grid or stage.grid, parent, say=say)
    except UserError as error:
        if stage.kind == "study":
            raise
        say(f"no table of {stage.name}: {error.text()}")
    finally:
        close_parent(parent, status, say=say)


def show_results(grid: Grid, parent: ParentRun | None, *, say: Say) -> None:
    """Print the tables, write them with the figures, and send them to the study's MLflow run."""
    study, folder, states = grid.study, Path(grid.study.folder), states_of(grid)
    found = selections(grid, states)
    files: list[Path] = []
    selected = selected_table(grid, found) if found else None
    if selected is not None:
        say(plain_text(selected))
    if any(each.label is not None for each in found):
        files.append(write_selected(grid, found, folder=folder))
    by_metric = [collect(grid, states, metric=metric) for metric in study.metrics]
    tables = [paper_table(study, each) for each in by_metric] if study.table is not None else []
    for shown in map(printed, tables) if tables else [table(grid, by_metric[0])]:
        say(plain_text(shown))
    if any(result.by_seed for result in by_metric[0]):
        files.append(write_csv(grid, [r for each in by_metric for r in each], folder=folder))
        if tables:
            page = markdown_page(study, tables, selected, num_seeds=len(study.seeds))
            files += write_tables(folder, page=page, tables=tables)
    for path in files:
        say(f"results: {path}")
    trials = collect_trials(grid, states)
    for path in draw(study, by_metric[0], folder=folder, trials=trials):
        say(f"figure:  {path}, and as PNG")
        files.append(path.with_suffix(".png"))
    publish(grid, found, parent, by_metric=by_metric, files=files, say=say)
