"""The error line of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.status.tasks import last_error

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
