"""Run the node check alone, as a short job with the resources of a run.

Leaves out: what is measured (`vitscale.distributed.node_check`).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.jobs.preparation import LaunchableRun, job_folder, make_private, run_name
from launch.jobs.queue import NoAnswerError, QueuedJob, user_jobs
from launch.jobs.submission import (
    Submission,
    Task,
    require_slurm,
    start_task,
    submit_to_slurm,
)
from launch.planning.checks import Check, ok, warning
from vitscale.config.errors import UserError, run_script
from vitscale.distributed.atomic_files import write_json
from vitscale.runs.training import TrainingRun

RESULT_NAME = "node_check.json"
TIMEOUT_MIN, SIGNAL_DELAY_S = 10, 60
DEFAULT_SECONDS = 10.0
POLL_S = 2.0
LAST_LINES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesCheckJob:
    """What every task runs. Rank 0 writes the lines to RESULT_NAME beside its log."""

    device: Literal["auto", "cuda", "cpu"]
    seconds: float

    def __call__(self) -> int:
        task = start_task()
        run_script(lambda: self._check(task))
        return 0

    def _check(self, task: Task) -> None:
        # Imported on the nodes alone: submitting needs no torch.
        code = importlib.import_module("vitscale.distributed.node_check")
        lines = code.check_alone(device=self.device, seconds=self.seconds)
        if task.rank == 0:
            write_json(task.folder / RESULT_NAME, {"lines": lines})


def nodes_check(run: LaunchableRun) -> Iterator[Check]:
    """Submit the check, wait for its end, and yield its rows. Ctrl-C leaves the job alone.

    Raises UserError if it cannot be submitted or fails.
    """
    if not isinstance(run, TrainingRun):
        raise UserError("--nodes-check is for pre-training and fine-tuning", where="command line")
    require_slurm()
    seconds = run.launch.doctor_seconds or DEFAULT_SECONDS
    launch = run.launch.model_copy(
        update={"timeout_min": TIMEOUT_MIN, "signal_delay_s": SIGNAL_DELAY_S, "max_requeues": 0}
    )
    # Not in the run's own folder: this is no attempt of the run.
    folder = job_folder(run, cluster="nodes-check") / "slurm"
    make_private(folder)
    job = NodesCheckJob(device=run.engine.device, seconds=seconds)
    name = f"{run_name(run)}-nodes-check"
    submission = submit_to_slurm(job, launch=launch, name=name, folder=folder)
    print(
        f"waiting for job {submission.job_id}; log {submission.log(0)}",
        file=sys.stderr,
        flush=True,
    )
    _wait(submission.job_id)
    yield from _rows(submission)


def _wait(job_id: str) -> None:
    """Until SLURM says that the job has ended, or has forgotten it."""
    while True:
        try:
            jobs: list[QueuedJob] = [job for job in user_jobs() if job.submitted_id == job_id]
        except NoAnswerError as error:
            raise UserError(
                f"SLURM does not say how job {job_id} is: {error}", next_step="read its log"
            ) from None
        if all(job.has_ended for job in jobs):
            return
        time.sleep(POLL_S)


def _rows(submission: Submission) -> Iterator[Check]:
    path = submission.folder / RESULT_NAME
    try:
        summary, *slow = json.loads(path.read_text())["lines"]
    except FileNotFoundError:
        what = f"job {submission.job_id} failed: {_last_lines(submission.log(0))}"
        raise UserError(what, next_step=f"read {submission.folder}") from None
    yield ok("nodes", summary)
    if slow:
        *ranks, advice = slow
        for line in ranks:
            yield warning("nodes", line.removeprefix("warning: "), next_step=advice.strip())


def _last_lines(log: Path) -> str:
    """The error message of the task, or the last lines of its log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it has no log"
    errors = [number for number, line in enumerate(lines) if line.startswith("error")]
    first = errors[0] if errors else max(0, len(lines) - LAST_LINES)
    return "\n".join(lines[first : first + LAST_LINES])
