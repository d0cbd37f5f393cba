"""The arrays of a study, without SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.plans.record import RECORD_NAME
from launch.plans.stages import Plan
from launch.plans.states import plan_states
from launch.plans.submitting import (
    PlanSubmission,
    batch_script,
    missing_steps,
    queued_jobs,
)
from tests.support.study_runs import STUDY, plan_of, write_study, write_training
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def training_of(plan: Plan, name: str):
    return next(step.training for step in plan.stages[0].steps if step.name == name)


def sizes(plan: Plan) -> list[tuple[str, int, int]]:
    arrays = missing_steps(plan.stages[0], plan_states(plan))
    return [(a.name, len(a.steps), a.launch.nodes) for a in arrays]


def test_pretrainings_come_before_transfers(folder: Path) -> None:
    plan = plan_of(write_study(folder))
    assert sizes(plan) == [("small-pretrain", 8, 1), ("small-finetune", 10, 1)]


def test_finished_trainings_are_left_out(folder: Path) -> None:
    plan = plan_of(write_study(folder))
    write_training(training_of(plan, "pretrain_wide_1_seed0"), step=20)
    assert sizes(plan)[0] == ("small-pretrain", 7, 1)


def test_each_set_of_resources_is_an_array(folder: Path) -> None:
    text = STUDY.replace(
        "[model.width=32]", "[model.width=32], pretrain: {overrides: [launch.nodes=2]}"
    )
    plan = plan_of(write_study(folder, text), "max_running_tasks=3")
    assert sizes(plan) == [
        ("small-pretrain", 4, 1),
        ("small-pretrain", 4, 2),
        ("small-finetune", 10, 1),
    ]
    arrays = missing_steps(plan.stages[0], plan_states(plan))
    first, second, third = map(batch_script, arrays)
    assert "#SBATCH --array=0-3%3" in first and "#SBATCH --nodes=2" in second
    assert "--job-name=small-finetune" in third


def submit(plan: Plan) -> list[str]:
    said: list[str] = []
    PlanSubmission(
        plan=plan, states=plan_states(plan), queued=queued_jobs(plan), say=said.append
    ).submit()
    return said


def test_transfers_wait_for_their_pretrainings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch, scancel and squeue are scripts that record what they are given."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in (
        ("sbatch", 'number=$(ls script-* 2>/dev/null | wc -l); cp "$1" "script-$number"; '
         'echo "$1" > newest; echo "Submitted batch job $((71 + number))"'),
        ("srun", "true"),
        ("scancel", 'echo "$@" >> cancelled'),
        ("squeue", '[ ! -e newest ] || echo "72_0|72|PENDING|Dependency|N/A||1|$(cat newest)"'),
    ):  # fmt: skip
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    plan = plan_of(
        write_study(folder), "overrides=[launch.sbatch.dependency=singleton,tracking.uri=null]"
    )
    said = submit(plan)
    assert said == [
        "submitted small-pretrain: array of 8 tasks 71",
        "submitted small-finetune: array of 10 tasks 72, after 71",
    ]
    assert "--dependency=singleton\n" in (folder / "script-0").read_text()
    assert "--dependency=singleton,afterany:71\n" in (folder / "script-1").read_text()

    # Of the first command one transfer is left in the queue; its pre-training is submitted again.
    said = submit(plan)
    assert said == [
        "submitted small-pretrain: array of 8 tasks 73",
        "cancelled small-finetune: job 72_0 waited for jobs that have failed",
        "submitted small-finetune: array of 10 tasks 74, after 73",
    ]
    assert (folder / "cancelled").read_text() == "72_0\n"

    (folder / "runs/small" / RECORD_NAME).unlink()
    with pytest.raises(UserError, match="(?s)jobs 72 of this study.*not in its record.*scancel 72"):
        queued_jobs(plan)
