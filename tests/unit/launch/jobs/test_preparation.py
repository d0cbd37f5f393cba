"""Checks and defaults that depend on a job's size."""

from __future__ import annotations

from launch.jobs.preparation import with_num_workers
from vitscale.runs.data_prep import DataPrepRun


def test_num_workers_defaults_to_the_cores_of_a_task() -> None:
    run = DataPrepRun.model_validate({"output": "shards", "source": {"path": "images"}})
    assert with_num_workers(run, num_cores=8).num_workers == 8
    chosen = run.model_copy(update={"num_workers": 3})
    assert with_num_workers(chosen, num_cores=8).num_workers == 3
