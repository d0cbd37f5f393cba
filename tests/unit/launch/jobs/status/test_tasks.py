"""The error line of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.status.tasks import JobTasks, last_error
from tests.unit.launch.jobs.status.conftest import job

SRUN = "srun: error: n1: task 0: Exited with exit code 1"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["Traceback", "torch.OutOfMemoryError: CUDA", SRUN], "torch.OutOfMemoryError: CUDA"),
        (["[rank3]: ValueError: no", "bye"], "[rank3]: ValueError: no"),
        (["error:", "data.path: there is no folder x", SRUN], "data.path: there is no folder x"),
        (["step 1/2", SRUN], SRUN),
        (["step 1/2", ""], "last line: step 1/2"),
        (["KeyError: 1", "2026-11-22 19:10:20 attempt 2 of the run, job 4 on n1", SRUN], SRUN),
        ([], None),
    ],
)
def test_the_error_line_is_the_most_telling_one(
    tmp_path: Path, lines: list[str], found: str | None
) -> None:
    log = tmp_path / "log.out"
    log.write_text("".join(f"{line}\n" for line in lines))
    assert last_error(log) == found


def test_two_jobs_of_one_run_are_no_array() -> None:
    """The second was submitted with --after."""
    both = [job("RUNNING", nodes="n1"), job("PENDING", reason="Dependency", job_id="4712")]
    assert JobTasks().counts(both) == {}
    tasks = [job("RUNNING", job_id="12_0"), job("PENDING", job_id="12_1")]
    assert JobTasks().counts(tasks) == {"running": 1, "queued": 1}
