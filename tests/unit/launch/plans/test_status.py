"""The states of a plan's stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.jobs.attempts import Ending
from launch.jobs.status.reading import RunState
from launch.plans.status import PlanStatus, plan_lines, plan_values, read_plan
from tests.unit.launch.jobs.status.conftest import JOB, NOW, SCRIPT, RunFolder, job


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Shards are there, pre-training runs, one of two transfers failed, evaluation waits."""
    folder, place = tmp_path / "chain", {"shards": "tars"}

    def stage(name: str, kind: str, needs: list[str], steps: dict[str, str | None]) -> dict:
        return {
            "name": name, "kind": kind, "needs": needs,
            "jobs_folder": str(folder / name / "slurm"),
            "steps": [
                {"name": step, "folder": str(folder / place.get(step, step)), "job": job_id}
                for step, job_id in steps.items()
            ],
        }  # fmt: skip

    pretrain = RunFolder(folder / "pretrain")
    pretrain.attempt(None)
    pretrain.log(40)
    failed = RunFolder(folder / "finetune/b")
    (failed.folder / "slurm" / SCRIPT).unlink()
    failed.log(4)
    failed.attempt(Ending.FAILED, "rank 0 on n1 ended with code 1")
    prepared = folder / "shards/slurm/9/9_0_0_task.json"
    prepared.parent.mkdir(parents=True)
    prepared.write_text('{"rank": 0, "pid": 1, "exit_code": 0, "ended": 1.0}')
    (folder / "tars").mkdir()
    (folder / "tars/manifest.json").touch()
    stages = [
        stage("shards", "data_prep", [], {"shards": None}),
        stage("pretrain", "pretrain", ["shards"], {"pretrain": JOB}),
        stage("finetune", "finetune", ["pretrain"], {"finetune/a": "12_0", "finetune/b": "12_1"}),
        stage("evaluate", "evaluate", ["finetune"], {"evaluate": "13"}),
    ]
    (folder / "plan.json").write_text(json.dumps({"kind": "chain", "stages": stages}))
    return folder


@pytest.fixture
def status(chain: Path) -> PlanStatus:
    jobs = [
        job("RUNNING", nodes="n1"),
        job("PENDING", reason="Dependency", job_id="12_0", submitted_id="12", script="x"),
        job("PENDING", reason="Dependency", job_id="13", submitted_id="13", script="y"),
    ]
    return read_plan(chain, jobs=jobs, now=NOW)


def test_stages_are_in_order_with_the_states_of_their_runs(status: PlanStatus) -> None:
    found = {stage.name: [run.state for run in stage.runs.values()] for stage in status.stages}
    assert list(found.items()) == [
        ("shards", [RunState.FINISHED]),
        ("pretrain", [RunState.RUNNING]),
        ("finetune", [RunState.QUEUED, RunState.FAILED]),
        ("evaluate", [RunState.QUEUED]),
    ]
    assert status.stages[0].runs["shards"].tasks == {"finished": 1}


def test_a_chain_shows_what_runs_and_what_failed(status: PlanStatus) -> None:
    lines = plan_lines(status, now=NOW)
    assert lines[0].endswith("chain: chain of 4 stages")
    assert "  shards: finished" in lines
    assert any(x.startswith("  pretrain (after shards): running, step 40 of 100") for x in lines)
    assert "  finetune (after pretrain): 2 runs, 1 queued, 1 failed" in lines
    assert any(line.startswith("    b: failed at step 4 of 100") for line in lines)
    assert "      rank 0 on n1 ended with code 1" in lines
    assert "    job 13: waits for another job (Dependency)" in lines


def test_a_chain_that_has_not_begun_is_not_started(chain: Path) -> None:
    (chain / "tars/manifest.json").unlink()
    found = read_plan(chain, jobs=[], now=NOW)
    assert [run.state for run in found.stages[0].runs.values()] == [RunState.NOT_STARTED]
    # Its job is no longer known: SLURM has cancelled it, because pre-training failed.
    assert "    job 13 was cancelled before it started" in plan_lines(found, now=NOW)
    assert json.loads(json.dumps(plan_values(found)))["stages"][0]["kind"] == "data_prep"
