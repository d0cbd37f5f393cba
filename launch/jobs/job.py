"""Run a stage as a job, locally or under SLURM.

Owns: `StageJob`, the stages' scripts, the record of how each task ended, and requeueing.
Leaves out: submitting (`submission`), signals and checkpoints inside a stage (its script).

A stage stopped by a signal commits a checkpoint on all ranks and ends with EXIT_STOPPED_RESUMABLE.
Only then does rank 0 ask SLURM to requeue the job. submitit's own mechanism, a checkpoint inside
rank 0's signal handler, cannot save a model that is sharded over all ranks.
Each task of an array is a job with one rank and requeues itself.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.jobs.scontrol import is_ended_by_slurm, requeue, restart_count
from launch.jobs.submission import Task, resubmission, start_task
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, skip_teardown
from vitscale.config.site import SITE_VARIABLE
from vitscale.distributed.atomic_files import write_json
from vitscale.tracking.source_version import PROJECT_ROOT, code_version

STAGE_SCRIPTS = {
    "data_prep": "data_prep/make_shards.py",
    "pretrain": "pretrain/main.py",
    "finetune": "finetune/main.py",
    "evaluate": "finetune/evaluate_model.py",
}
# Their tasks share work through files; none waits for another.
INDEPENDENT_STAGES = ("data_prep",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """State of one task, stored as a JSON file beside its log."""

    rank: int
    pid: int
    exit_code: int | None = None
    """None while the task runs."""
    ended: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageJob:
    """Run a stage's script in every task. Small, picklable, stateless, without torch."""

    script: str
    """Absolute path of the stage's script."""
    config: str
    """Absolute path of the resolved configuration."""
    max_requeues: int
    code_version: str | None = None
    """Git commit at submission. Without a snapshot, the job runs the code on disk at its start."""
    independent: bool = False
    """Each task is a job of its own instead of a rank of one job."""

    def __call__(self) -> int:
        task = start_task(independent=self.independent)
        record_path = task_record_path(task.folder, job_id=task.job_id, rank=task.rank)
        running = TaskRecord(rank=task.rank, pid=os.getpid())
        write_record(record_path, running)
        if task.rank == 0 or self.independent:
            self._announce(task)
        code = 1
        try:
            code = run_in_process(self.script, arguments=["--config", self.config])
        finally:
            ended = TaskRecord(rank=task.rank, pid=os.getpid(), exit_code=code, ended=time.time())
            write_record(record_path, ended)
        if code == EXIT_STOPPED_RESUMABLE and task.cluster == "slurm":
            if self._requeue(task):
                skip_teardown(0)
                return code
        skip_teardown(code)
        if code:
            # The script has reported its error; no traceback is needed.
            raise SystemExit(code)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit if a signal comes before the script has set its own handlers."""
        return resubmission(self)

    def _announce(self, task: Task) -> None:
        attempt = restart_count() + 1
        tasks = f"{task.world_size} task(s)"
        if task.array_index is not None:
            tasks = f"task {task.array_index} ({task.array_size} in total)"
        print(
            f"{Path(self.script).parent.name}: {tasks}, attempt {attempt}, config {self.config}",
            flush=True,
        )
        now = code_version()
        if self.code_version is not None and now != self.code_version:
            print(
                f"warning: the code changed since submission ({self.code_version} -> {now}); "
                "this attempt runs the code now on disk",
                flush=True,
            )

    def _requeue(self, task: Task) -> bool:
        """Requeue from rank 0. True on every rank if the job is to run again."""
        requeues = restart_count()
        if requeues >= self.max_requeues:
            if task.rank == 0:
                print(
                    f"stopped, resumable, but not requeued: launch.max_requeues="
                    f"{self.max_requeues} is reached. Submit the same command again to resume.",
                    flush=True,
                )
            return False
        if task.rank != 0:
            return True
        if is_ended_by_slurm(task.job_id):
            print(f"SLURM is ending job {task.job_id}: not requeued from here", flush=True)
            return True
        print(f"requeueing job {task.job_id} ({requeues + 1} of {self.max_requeues})", flush=True)
        requeue(task.job_id)
        return True


def stage_job(stage: str, *, config: Path, max_requeues: int, code: Path | None = None) -> StageJob:
    """The job that runs a stage with a resolved configuration on disk.

    code: the snapshot that contains the stage; None: the code that runs now.
    """
    return StageJob(
        script=str((code or PROJECT_ROOT) / STAGE_SCRIPTS[stage]),
        config=str(config.resolve()),
        max_requeues=max_requeues,
        code_version=code_version(),
        independent=stage in INDEPENDENT_STAGES,
    )


def run_in_process(script: str, *, arguments: list[str]) -> int:
    """Run a script in this process as `python script arguments` would. Return its exit code."""
    argv = sys.argv
    sys.argv = [script, *arguments]
    # The configuration is complete; a site file edited since must not change it.
    os.environ[SITE_VARIABLE] = ""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = argv
    return 0


def task_record_path(folder: Path, *, job_id: str, rank: int) -> Path:
    return folder / f"{job_id}_{rank}_task.json"


def read_task_record(path: Path) -> TaskRecord | None:
    """The record; None before the task has started."""
    try:
        return TaskRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def write_record(path: Path, record: TaskRecord) -> None:
    write_json(
        path,
        {
            "rank": record.rank,
            "pid": record.pid,
            "exit_code": record.exit_code,
            "ended": record.ended,
        },
    )
