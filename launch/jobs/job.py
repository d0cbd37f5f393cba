"""Run a stage as a job, locally or under SLURM.

Owns: `StageJob`, the stages' scripts, and stop signals before a script handles them.
Leaves out: submitting (`submission`), signals and checkpoints inside a stage (its script), and
requeueing (`supervision`).

A stage stopped by a signal commits a checkpoint on all ranks and ends with EXIT_STOPPED_RESUMABLE.
submitit's own mechanism, a checkpoint inside rank 0's signal handler, cannot save a model that is
sharded over all ranks.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from launch.jobs.attempts import TaskRecord, task_record_path, write_record
from launch.jobs.scontrol import restart_count
from launch.jobs.submission import Task, start_task
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.loader import SITE_VARIABLE
from vitscale.distributed.failures.ending import skip_teardown
from vitscale.tracking.source_version import PROJECT_ROOT, code_version

STAGE_SCRIPTS = {
    "data_prep": "data_prep/make_shards.py",
    "pretrain": "pretrain/main.py",
    "finetune": "finetune/main.py",
    "evaluate": "finetune/evaluate_model.py",
}
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
# Their tasks share work through files; none waits for another.
INDEPENDENT_STAGES = ("data_prep",)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageJob:
    """Run a stage's script in every task. Small, picklable, stateless, without torch."""

    script: str
    """Absolute path of the stage's script."""
    config: str
    """Absolute path of the resolved configuration."""
    code_version: str | None = None
    """Git commit at submission. Without a snapshot, the job runs the code on disk at its start."""
    run_folder: str | None = None
    """Has its checkpoints and the record of its attempts; None: the job's folder."""
    independent: bool = False
    """Each task is a job of its own instead of a rank of one job."""

    def __call__(self) -> int:
        task = start_task(independent=self.independent)
        record = TaskRecord(rank=task.rank, pid=os.getpid(), node=task.node)
        path = task_record_path(task.folder, job_id=task.job_id, rank=task.rank)
        write_record(path, record)

        def write_end(code: int) -> None:
            write_record(path, replace(record, exit_code=code, ended=time.time()))

        def stop_early(number: int, _: object) -> None:
            # Nothing to save: the script has no handlers, or has not set them yet.
            name = signal.Signals(number).name
            state = "; finished work is kept" if self.independent else " before training started"
            print(f"stopped by {name}{state}", flush=True)
            write_end(EXIT_STOPPED_RESUMABLE)
            os._exit(EXIT_STOPPED_RESUMABLE)

        for number in STOP_SIGNALS:
            signal.signal(number, stop_early)
        if task.rank == 0 or self.independent:
            self._announce(task)
        code = 1
        try:
            code = run_in_process(self.script, arguments=["--config", self.config])
        finally:
            write_end(code)
        skip_teardown(code)
        if code:
            # The script has reported its error; no traceback is needed.
            raise SystemExit(code)
        return code

    def _announce(self, task: Task) -> None:
        tasks = f"{task.world_size} task(s)"
        if task.array_index is not None:
            tasks = f"task {task.array_index} ({task.array_size} in total)"
        restarts = f"restart {number} of the job, " if (number := restart_count()) else ""
        print(
            f"{Path(self.script).parent.name}: {tasks}, {restarts}config {self.config}",
            flush=True,
        )
        now = code_version()
        if self.code_version is not None and now != self.code_version:
            print(
                f"warning: the code changed since submission ({self.code_version} -> {now}); "
                "this attempt runs the code now on disk",
                flush=True,
            )


def stage_job(
    stage: str,
    *,
    config: Path,
    script: str | None = None,
    run_folder: Path | None = None,
    code: Path | None = None,
) -> StageJob:
    """The job that runs a stage with a resolved configuration on disk.

    script: of the project, if it is not the stage's own.
    code: the snapshot that contains the stage; None: the code that runs now.
    """
    return StageJob(
        script=str((code or PROJECT_ROOT) / (script or STAGE_SCRIPTS[stage])),
        config=str(config.resolve()),
        run_folder=None if run_folder is None else str(run_folder.absolute()),
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
