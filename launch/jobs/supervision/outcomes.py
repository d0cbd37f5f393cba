"""Find out how an attempt on SLURM ended: done, stopped, ended by SLURM, or failed.

Owns: what srun, SLURM's state of the job and dead nodes say about it.
Leaves out: the reports of ranks and what they weigh (`causes`), running srun (`step`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.jobs.attempts import Attempt, Ending, TaskRecord, read_task_records
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
    dead: Sequence[str],
    *,
    attempt: Attempt,
    run_folder: Path,
    records: Sequence[TaskRecord],
    signal_delay: int,
) -> Outcome:
    """How an attempt ended."""
    if not dead:
        if code == 0:
            return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
        if is_ended_by_slurm(attempt.job_id):
            return _ended_by_slurm(attempt.job_id, code)
        if _was_stopped(step):
            why = _why_stopped(job_fields(attempt.job_id), signal_delay=signal_delay)
            return Outcome(ending=Ending.STOPPED, reason=why, exit_code=EXIT_STOPPED_RESUMABLE)
    seen = _seen_failure(step, code, dead, records=records)
    outcome = failure_outcome(
        seen,
        run_folder,
        attempt=os.environ[ATTEMPT_VARIABLE],
        records=records,
        nodes=attempt.nodes,
    )
    if dead and (not outcome.failed_nodes or set(outcome.failed_nodes) & set(dead)):
        return replace(
            outcome, ending=Ending.NODE_FAILED, reason=seen.what, failed_nodes=tuple(dead)
        )
    return outcome


def _was_stopped(step: JobStep) -> bool:
    """Whether the task that ended first did so by a stop signal."""
    return bool(step.ends) and (
        step.ends[0].exit_code == EXIT_STOPPED_RESUMABLE or step.ends[0].signal in STOP_SIGNALS
    )


def _ended_by_slurm(job_id: str, code: int) -> Outcome:
    state = job_fields(job_id).get("JobState", "")
    return Outcome(
        ending=Ending.ENDED_BY_SLURM, reason=f"SLURM ended the job ({state})", exit_code=code
    )


def _seen_failure(
    step: JobStep, code: int, dead: Sequence[str], *, records: Sequence[TaskRecord]
) -> Failure:
    """What srun says. Its first line is about the task that failed first.

    A task that ended by itself is no culprit: it may have noticed the failure of another.
    """
    if dead:
        lost = sorted(record.rank for record in records if record.node in dead)
        what = f"{', '.join(dead)} died (does not answer SLURM)"
        what += f", and with it rank {', '.join(map(str, lost))}" if lost else ""
        rank = lost[0] if lost else None
        return Failure(kind=FailureKind.KILLED, what=what, rank=rank, node=dead[0])
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


def ended_with_supervisor(
    attempt: Attempt, run_folder: Path, job_folder: Path, *, code: int
) -> Outcome:
    """The outcome of an attempt whose supervisor ended with `code`, without a decision.

    The shell adds 128 to the number of the signal that killed it.
    """
    if is_ended_by_slurm(attempt.job_id):
        return _ended_by_slurm(attempt.job_id, code)
    killed = code > 128
    how = f"was ended by {signal.Signals(code - 128).name}" if killed else f"ended with code {code}"
    node = os.environ.get("SLURMD_NODENAME", attempt.nodes[0])
    seen = Failure(
        kind=FailureKind.KILLED if killed else FailureKind.OTHER,
        what=f"the supervisor of the job on {node} {how}",
        node=node if killed else None,
    )
    return failure_outcome(
        seen,
        run_folder,
        attempt=os.environ[ATTEMPT_VARIABLE],
        records=read_task_records(job_folder, job_id=attempt.job_id),
        nodes=attempt.nodes,
    )
