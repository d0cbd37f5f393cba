"""Checks and defaults that depend on a job's size."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.preparation import prepare_job, with_num_workers
from vitscale.runs.data_prep import DataPrepRun


def test_num_workers_defaults_to_the_cores_of_a_task() -> None:
    run = DataPrepRun.model_validate({"output": "shards", "source": {"path": "images"}})
    assert with_num_workers(run, num_cores=8).num_workers == 8
    chosen = run.model_copy(update={"num_workers": 3})
    assert with_num_workers(chosen, num_cores=8).num_workers == 3


def test_a_job_runs_the_script_of_its_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for script in ("make_shards", "index_shards"):
        source = {"path": "tars", "kind": "webdataset"}
        values = {"output": "shards", "source": source, "script": script}
        job, _ = prepare_job(DataPrepRun.model_validate(values), cluster="slurm")
        assert Path(job.script).name == f"{script}.py" and Path(job.script).is_file()
        assert job.independent and f"script: {script}" in Path(job.config).read_text()
    source["kind"] = "image_folder"
    problems = dict(DataPrepRun.model_validate(values | {"source": source}).problems())
    assert problems["source.kind"] == "must be webdataset for script=index_shards"
