"""The arrays of a study, without SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.studies.arrays import arrays, batch_scripts, submit
from launch.studies.grid import Grid
from launch.studies.states import states_of
from tests.support.study_runs import STUDY, grid_of, write_study, write_training
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sizes(grid: Grid) -> list[tuple[str, int, int]]:
    return [(a.kind, len(a.trainings), a.launch.nodes) for a in arrays(grid, states_of(grid))]


def test_pretrainings_come_before_transfers(folder: Path) -> None:
    grid = grid_of(write_study(folder))
    assert sizes(grid) == [("pretrain", 8, 1), ("finetune", 10, 1)]


def test_finished_trainings_are_left_out(folder: Path) -> None:
    grid = grid_of(write_study(folder))
    write_training(grid.trainings["pretrain_wide_1_seed0"], step=20)
    assert sizes(grid)[0] == ("pretrain", 7, 1)


def test_each_set_of_resources_is_an_array(folder: Path) -> None:
    text = STUDY.replace(
        "[model.width=32]", "[model.width=32], pretrain: {overrides: [launch.nodes=2]}"
    )
    grid = grid_of(write_study(folder, text), "max_running_tasks=3")
    assert sizes(grid) == [("pretrain", 4, 1), ("pretrain", 4, 2), ("finetune", 10, 1)]
    first, second, third = batch_scripts(grid, states_of(grid))
    assert "#SBATCH --array=0-3%3" in first and "#SBATCH --nodes=2" in second
    assert third.startswith("# Array of 10 x finetune, after the pre-trainings")


def test_transfers_wait_for_their_pretrainings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch and squeue are scripts that record what they are given."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in (
        ("sbatch", 'cp "$1" "script-$(ls script-* 2>/dev/null | wc -l)"; echo "$1" > newest; '
         'echo "Submitted batch job $((70 + $(ls script-* | wc -l)))"'),
        ("srun", "true"),
        ("squeue", '[ ! -e newest ] || echo "72_0|72|PENDING|Dependency|N/A||1|$(cat newest)"'),
    ):  # fmt: skip
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    grid = grid_of(write_study(folder), "overrides=[launch.sbatch.dependency=singleton]")
    submitted = submit(grid, states_of(grid))
    assert [submission.job_id for _, submission in submitted] == ["71", "72"]
    assert "--dependency=singleton\n" in (folder / "script-0").read_text()
    assert "--dependency=singleton,afterany:71\n" in (folder / "script-1").read_text()

    with pytest.raises(UserError, match="(?s)jobs 72 of this study are still queued.*scancel 72"):
        submit(grid, states_of(grid))
