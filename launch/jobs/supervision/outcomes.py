"""Find out how an attempt on SLURM ended: done, stopped, ended by SLURM, or failed.

Owns: what srun and SLURM's state of the job say about it.
Leaves out: the reports of ranks and what they weigh (`causes`), running srun (`step`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from launch.jobs.attempts import Attempt, Ending, TaskRecord
from launch.jobs.scontrol import is_ended_by_slurm, job_fields
from launch.jobs.supervision.causes import Outcome, failure_outcome, kind_of_exit_code
from launch.jobs.supervision.step import JobStep
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, FailureKind
from vitscale.distributed.failures.events import ATTEMPT_VARIABLE, Failure

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
# A warning that comes this much earlier than `--signal` says is still that of the time limit.
EARLY_S = 90


def classify(
    step: JobStep,
    code: int,
    *,
    attempt: Attempt,
    run_folder: Path,
    records: Sequence[TaskRecord],
    signal_delay: int,
) -> Outcome:
    """How an attempt ended."""
    if code == 0:
        return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    if is_ended_by_slurm(attempt.job_id):
        state = job_fields(attempt.job_id).get("JobState", "")
        reason = f"SLURM ended the job ({state})"
        return Outcome(ending=Ending.ENDED_BY_SLURM, reason=reason, exit_code=code)
    if _was_stopped(step):
        why = _why_stopped(job_fields(attempt.job_id), signal_delay=signal_delay)
        return Outcome(ending=Ending.STOPPED, reason=why, exit_code=EXIT_STOPPED_RESUMABLE)
    return failure_outcome(
        _seen_failure(step, code),
        run_folder,
        attempt=os.environ[ATTEMPT_VARIABLE],
        records=records,
        nodes=attempt.nodes,
    )


def _was_stopped(step: JobStep) -> bool:
    """Whether the task that ended first did so by a stop signal."""
    return bool(step.ends) and (
        step.ends[0].exit_code == EXIT_STOPPED_RESUMABLE or step.ends[0].signal in STOP_SIGNALS
    )


def _seen_failure(step: JobStep, code: int) -> Failure:
    """What srun says. Its first line is about the task that failed first.

    A task that ended by itself is no culprit: it may have noticed the failure of another.
    """
    if not step.ends:
        what = f"srun ended with code {code}: {step.last_error or 'without a message'}"
        return Failure(kind=FailureKind.OTHER, what=what)
    first = step.ends[0]
    if first.exit_code is not None:
        return Failure(kind=kind_of_exit_code(first.exit_code), what=first.text)
    is_one = len(first.nodes) == 1
    return Failure(
        kind=FailureKind.KILLED,
        what=first.text,
        rank=first.first_rank if is_one else None,
        node=first.nodes[0] if is_one else None,
    )


def _why_stopped(fields: dict[str, str], *, signal_delay: int) -> str:
    """What a stop signal was for, from `scontrol show job`."""
    if fields.get("PreemptTime", "None") not in ("None", "N/A"):
        return "stopped by a signal: preempted"
    try:
        end = time.mktime(time.strptime(fields["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    except (KeyError, ValueError):
        return "stopped by a signal"
    if end - time.time() < signal_delay + EARLY_S:
        return "stopped by a signal: the time limit is near"
    return "stopped by a signal"
