"""Run a stage's script in one task of a SLURM job.

Owns: `StageJob`, which submitit pickles, and stop signals before a script handles them.
Leaves out: submitting (`submission`), signals and checkpoints inside a stage (its script), and what
follows an attempt (`after`).

submitit replays the original pickle after every requeue. The job is therefore stateless: the
position to resume from is in the run folder. A stage stopped by a signal commits a checkpoint on
all ranks and ends with EXIT_STOPPED_RESUMABLE; submitit's own mechanism, a checkpoint inside rank
0's signal handler, cannot save a model that is sharded over all ranks.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.attempts import begin_attempt
from launch.jobs.queue import restart_count
from launch.jobs.submission import enter_task
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.loader import SITE_VARIABLE
from vitscale.distributed.exit import skip_teardown


@dataclass(frozen=True, kw_only=True, slots=True)
class StageJob:
    """Run a stage's script in every task. Small, picklable, without torch."""

    script: str
    """Absolute path of the stage's script."""
    config: str
    """Absolute path of the resolved configuration."""
    run_folder: str | None = None
    """Has its checkpoints and the record of its attempts; None: each task is a job of its own
    instead of a rank of one job, and has its record in the job's folder."""

    @property
    def arguments(self) -> list[str]:
        return [self.script, "--config", self.config]

    def heading(self, num_tasks: int) -> str:
        """The line of a log that says what runs."""
        return f"{Path(self.script).parent.name}: {num_tasks} task(s), config {self.config}"

    def __call__(self) -> int:
        task = enter_task()

        def stop_early(number: int, _: object) -> None:
            # Nothing to save: the script has no handlers, or has not set them yet.
            state = " before training started" if self.run_folder else "; finished work is kept"
            print(f"stopped by {signal.Signals(number).name}{state}", flush=True)
            os._exit(EXIT_STOPPED_RESUMABLE)

        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, stop_early)
        if task.global_rank == 0:
            attempt = begin_attempt(
                self.run_folder or task.paths.folder / task.job_id,
                cluster="slurm",
                job_id=task.job_id,
                restart=restart_count(),
                nodes=task.hostnames,
            )
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            where = f"job {task.job_id} on {', '.join(task.hostnames)}"
            print(f"{now} attempt {attempt.number} of the run, {where}", flush=True)
            print(self.heading(task.num_tasks), flush=True)
        code = run_in_process(self.arguments)
        skip_teardown(code)
        if code:
            # The script has reported its error; no traceback is needed.
            raise SystemExit(code)
        return code


def run_in_process(arguments: list[str]) -> int:
    """Run a script in this process as `python ARGUMENTS` would. Returns its exit code."""
    sys.argv = arguments
    # The configuration is complete; a site file edited since must not change it.
    os.environ[SITE_VARIABLE] = ""
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0
