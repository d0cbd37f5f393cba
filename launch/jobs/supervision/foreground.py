"""Run a job on this machine in the foreground: its output shown, its exit code returned.

Leaves out: starting (`submission`) and following the tasks (`monitor`).
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.attempts import Attempt, Ending, begin_attempt, end_attempt
from launch.jobs.job import StageJob
from launch.jobs.monitor import (
    CONTROLLER_SECONDS,
    JobResult,
    StopFlag,
    end,
    failure_report,
    follow,
    records,
)
from launch.jobs.submission import Submission, start_locally
from launch.jobs.supervision.causes import Outcome, failure_outcome, kind_of_exit_code
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, FailureKind
from vitscale.distributed.failures.events import Failure
from vitscale.distributed.processes import node_name
from vitscale.runs.launching import LaunchSettings

EXIT_INTERRUPTED = 130
ENDINGS = {
    0: (Ending.DONE, "done"),
    EXIT_STOPPED_RESUMABLE: (Ending.STOPPED, "stopped by a signal"),
    EXIT_INTERRUPTED: (Ending.STOPPED, "interrupted by Ctrl-C"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedJob:
    """A job on this machine whose attempt is open."""

    submission: Submission
    run_folder: str | None
    attempt: Attempt | None
    """None for jobs without a run folder."""


def start(job: StageJob, *, launch: LaunchSettings, num_procs: int, folder: Path) -> StartedJob:
    """Start the job; record the attempt. `finish` must follow."""
    submission = start_locally(
        job, launch=launch, num_procs=num_procs, folder=folder, independent=job.independent
    )
    attempt = None
    if job.run_folder is not None:
        attempt = begin_attempt(
            job.run_folder,
            cluster="local",
            job_id=submission.job_id,
            restart=0,
            nodes=[node_name()],
            num_tasks=num_procs,
        )
    return StartedJob(submission=submission, run_folder=job.run_folder, attempt=attempt)


def finish(started: StartedJob, result: JobResult) -> int:
    """Record how the attempt ended. Returns the exit code of the job."""
    if started.attempt is None or started.run_folder is None:
        return result.exit_code
    outcome = _outcome(result, started.submission, started.run_folder)
    end_attempt(
        started.attempt,
        started.run_folder,
        ending=outcome.ending,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
        kind=outcome.kind,
        failed_nodes=outcome.failed_nodes,
    )
    if outcome.kind is not None:
        print(f"cause: {outcome.reason}", file=sys.stderr, flush=True)
    return outcome.exit_code


def start_and_watch(
    job: StageJob, *, launch: LaunchSettings, num_procs: int, folder: Path, stop: StopFlag
) -> int:
    """Run the job to its end and return its exit code. SIGTERM stops it with a checkpoint."""
    started = start(job, launch=launch, num_procs=num_procs, folder=folder)
    result = JobResult(exit_code=1, failure=None)
    code = result.exit_code
    try:
        result = watch(started.submission, stop=stop)
    finally:
        code = finish(started, result)
    return code


def _outcome(result: JobResult, submission: Submission, run_folder: str) -> Outcome:
    code = result.exit_code
    if code in ENDINGS:
        ending, reason = ENDINGS[code]
        return Outcome(ending=ending, reason=reason, exit_code=code)
    kind, what, rank = kind_of_exit_code(code), f"ended with code {code}", None
    if (first := result.failure) is not None:
        what = f"rank {first.rank} ended with code {first.exit_code}"
        if first.exit_code is None:
            kind, what, rank = FailureKind.KILLED, f"rank {first.rank} was killed", first.rank
    return failure_outcome(
        Failure(kind=kind, what=what, rank=rank),
        run_folder,
        attempt=submission.folder.name,
        records=records(submission),
        nodes=[node_name()],
    )


def watch(submission: Submission, *, stop: StopFlag) -> JobResult:
    """Follow the job. Ctrl-C ends it at once. No process is left, however this ends."""
    try:
        print(
            f"running {submission.num_tasks} process(es); logs in {submission.folder}", flush=True
        )
        result = follow(submission, output=sys.stdout, stop=stop)
    except KeyboardInterrupt:
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(OSError):
            print("\ninterrupted: ending all processes", file=sys.stderr, flush=True)
        end(submission, wait_first=CONTROLLER_SECONDS)
        return JobResult(exit_code=EXIT_INTERRUPTED, failure=None)
    except BaseException:
        # For example: the reader of our output has closed the pipe, or the disk is full.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert submission.controller is not None
        submission.controller.send_signal(signal.SIGINT)
        end(submission, wait_first=CONTROLLER_SECONDS)
        raise
    if result.exit_code == EXIT_STOPPED_RESUMABLE:
        print("stopped; the same command resumes the run", flush=True)
    elif result.exit_code:
        print(failure_report(submission, result), file=sys.stderr, flush=True)
    return result
