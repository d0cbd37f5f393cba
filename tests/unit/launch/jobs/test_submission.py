"""Requests of GPUs, and submissions in one folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from launch.jobs.preparation import prepare_job, submitting
from launch.jobs.submission import sbatch_text
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.launching import LaunchSettings


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"gpu_request": "gpus_per_node", "gpu_type": "h200"}, "--gpus-per-node=h200:8"),
        ({"gpu_request": "gres"}, "--gres=gpu:8"),
        ({"gpu_request": "none"}, None),  # they come with the partition
    ],
)
def test_gpus_are_requested_in_the_sites_way(fields: dict[str, Any], option: str | None) -> None:
    launch = LaunchSettings(gpus_per_node=8, tasks_per_node=8, **fields)
    text = sbatch_text(launch, name="run", folder=Path("/jobs"))
    found = [line for line in text.splitlines() if "--gpus" in line or "--gres" in line]
    assert found == ([] if option is None else [f"#SBATCH {option}"])


def test_a_refusal_removes_no_files_of_other_submissions(tmp_path: Path) -> None:
    folder = tmp_path / "run/slurm"

    def submit() -> None:
        with submitting(folder):
            (folder / "12").mkdir()
            (folder / "config-2.yaml").touch()

    other = threading.Thread(target=submit)
    with pytest.raises(UserError), submitting(folder):
        (folder / "config-1.yaml").touch()
        other.start()
        other.join(0.2)
        raise UserError("refused")
    other.join()
    assert {path.name for path in folder.iterdir()} == {"12", "config-2.yaml"}


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
