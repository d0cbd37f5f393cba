"""Show a study or a sweep in MLflow: a parent run with the results, its trainings as children.

Leaves out: MLflow itself (`vitscale.tracking.parent_run`), tables and figures (`results`). A store
that does not answer is reported once; it never keeps a run from training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.plans.stages import Stage
from launch.studies.grid import Grid, StudyTraining
from launch.studies.results import StudyResult
from launch.studies.selection import Selection
from launch.studies.settings import slug
from launch.studies.tables import MARKDOWN_NAME
from vitscale.config.loader import run_to_yaml
from vitscale.config.redaction import short_reason
from vitscale.tracking.parent_run import PARENT_TAG, ParentRun
from vitscale.tracking.parent_run import open_parent as open_parent_run
from vitscale.tracking.run_facts import absolute_uri

Say = Callable[[str], None]


def open_parent(stage: Stage, *, say: Say) -> ParentRun | None:
    """The MLflow run above the runs of a grid, set RUNNING.

    It is in the store of the first training. None without a grid or MLflow, or if it does not
    answer.
    """
    if stage.grid is None:
        return None
    uri = next(iter(stage.grid.trainings.values())).run.tracking.uri
    if uri is None:
        return None
    study = stage.grid.study

    def opened() -> ParentRun:
        parent = open_parent_run(
            Path(study.folder),
            uri=absolute_uri(uri),
            experiment=study.experiment or study.name,
            name=study.name,
            tags={"study": study.name, "vitscale.stage": study.stage},
            config_yaml=run_to_yaml(study),
            say=say,
        )
        parent.set_status("RUNNING")
        return parent

    return _attempt(opened, say=say)


def as_children(stage: Stage, parent: ParentRun | None) -> Stage:
    """The stage whose runs start as children of the parent."""
    if parent is None or stage.grid is None:
        return stage
    trainings = stage.grid.trainings.items()
    return stage.with_trainings({name: _child(each, parent) for name, each in trainings})


def _child(training: StudyTraining, parent: ParentRun) -> StudyTraining:
    tracking = training.run.tracking
    tags = tracking.tags | {PARENT_TAG: parent.run_id}
    run = training.run.model_copy(update={"tracking": tracking.model_copy(update={"tags": tags})})
    candidates = tuple(
        replace(each, training=_child(each.training, parent)) for each in training.candidates
    )
    return replace(training, run=run, candidates=candidates)


def publish(
    grid: Grid,
    found: Sequence[Selection],
    parent: ParentRun | None,
    *,
    by_metric: Sequence[Sequence[StudyResult]],
    files: Sequence[Path],
    say: Say,
) -> None:
    """Write the results to the parent; tag the children, and the trials that were chosen."""
    if parent is None:
        return
    best = {name for each in found if each.label is not None for name in each.trials[each.label]}

    def written() -> None:
        for name, training in grid.trainings.items():
            tags = {"study.selected": str(name in best).lower()} if training.kind == "trial" else {}
            parent.adopt(training.folder, tags=tags)
        pages = [path.read_text() for path in files if path.name == MARKDOWN_NAME]
        parent.write_results(metrics=dict(_means(by_metric)), note="".join(pages), files=files)

    _attempt(written, say=say)


def _means(by_metric: Sequence[Sequence[StudyResult]]) -> Iterator[tuple[str, float]]:
    """(metric of the parent, mean over seeds) of every combination, such as val/top1/cifar-10."""
    for results in by_metric:
        for result in results:
            if result.mean is not None:
                labels = [slug(value.label) for value in result.values.values()]
                yield "/".join([result.metric, *labels]), result.mean


def close_parent(parent: ParentRun | None, status: str, *, say: Say) -> None:
    if parent is not None:
        _attempt(lambda: parent.set_status(status), say=say)


def _attempt(action: Callable[[], Any], *, say: Say) -> Any:
    """The action's value; None if the store fails, which is reported."""
    try:
        return action()
    except Exception as error:  # any error of a store or a network
        say(f"warning: the study is not shown in MLflow ({short_reason(error)})")
        return None
