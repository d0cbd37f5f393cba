"""A run folder with what its stages write, and jobs as SLURM reports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.jobs.attempts import (
    Ending,
    TaskRecord,
    begin_attempt,
    end_attempt,
    task_record_path,
    write_record,
)
from launch.jobs.queue import QueuedJob
from vitscale.distributed.failures.events import STARTED, append_event, read_start
from vitscale.tracking.journal import Row, encode

NOW = 1_700_000_000.0
JOB = "4711"
SCRIPT = "submission_file_1a2b.sh"


class RunFolder:
    """Writes the files of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "slurm" / JOB).mkdir(parents=True)
        (folder / "slurm" / SCRIPT).touch()

    def log(self, step: int, *, total: int = 100, ago: float = 10.0, **metrics: float) -> None:
        """The end of an interval, of a training that has started a minute ago."""
        if read_start(self.folder) is None:
            facts = {"time": NOW - 60, "first_step": 0, "total_steps": total}
            append_event(self.folder, STARTED, facts)
        row = Row(step=step, time=NOW - ago, metrics={"train/loss": 1.25, **metrics})
        with open(self.folder / "journal.jsonl", "ab") as file:
            file.write(encode(row))

    def attempt(self, ending: Ending | None, reason: str = "", **more: Any) -> None:
        started = begin_attempt(
            self.folder, cluster="slurm", job_id=JOB, restart=0, nodes=("n1", "n2"), num_tasks=2,
            started=NOW - 60,
        )  # fmt: skip
        if ending is not None:
            end_attempt(started, self.folder, ending=ending, reason=reason, exit_code=None, **more)

    def checkpoint(self, step: int) -> None:
        folder = self.folder / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    def task(self, rank: int, exit_code: int | None, *log: str, ended: float | None = None) -> None:
        """A task of the job, with its log. A process that has not ended is gone."""
        folder = self.folder / "slurm" / JOB
        record = TaskRecord(rank=rank, pid=2**22 + 1, exit_code=exit_code, ended=ended)
        write_record(task_record_path(folder, job_id=JOB, rank=rank), record)
        (folder / f"{JOB}_{rank}_log.out").write_text("".join(f"{line}\n" for line in log))


def job(state: str, *, reason: str | None = None, **more: Any) -> QueuedJob:
    values: dict[str, Any] = {
        "job_id": JOB, "submitted_id": JOB, "state": state, "reason": reason, "start": None,
        "nodes": None, "submitted": NOW - 720, "script": f"/else/where/{SCRIPT}",
    }  # fmt: skip
    return QueuedJob(**values | more)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "vit")
