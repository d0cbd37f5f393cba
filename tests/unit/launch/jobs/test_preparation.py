"""Jobs made of data preparations."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.preparation import prepare_job
from vitscale.runs.data_prep import DataPrepRun


def test_a_job_runs_the_script_of_its_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for script in ("make_shards", "index_shards"):
        source = {"path": "tars", "kind": "webdataset"}
        values = {"output": "shards", "source": source, "script": script}
        job, folder = prepare_job(DataPrepRun.model_validate(values), cluster="slurm")
        assert {each.stat().st_mode & 0o777 for each in (folder, folder.parent)} == {0o700}
        assert Path(job.script).name == f"{script}.py" and Path(job.script).is_file()
        assert job.independent and f"script: {script}" in Path(job.config).read_text()
    source["kind"] = "image_folder"
    problems = dict(DataPrepRun.model_validate(values | {"source": source}).problems())
    assert problems["source.kind"] == "must be webdataset for script=index_shards"
