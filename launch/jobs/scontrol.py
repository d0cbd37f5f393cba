"""Questions and orders to SLURM from inside a job.

Owns: the calls of `scontrol`, and the two environment variables read with them.
Leaves out: submitting (`submission`) and deciding when to requeue (`job`).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping

SCONTROL_SECONDS = 60
REQUEUE_SECONDS, REQUEUE_PAUSE_S = 60.0, 5.0
# ESLURM_JOB_PENDING; SLURM does not translate its messages.
ALREADY_QUEUED = "Job is pending execution"


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often this job was requeued before; SLURM leaves the variable out the first time."""
    return int(environment.get("SLURM_RESTART_COUNT", "0"))


def is_ended_by_slurm(job_id: str) -> bool:
    """Whether SLURM ends this job already, cancelled or put back by somebody, not for its time.

    A job that is being cancelled could still be requeued, against the will of who cancelled it.
    False where SLURM does not answer.
    """
    try:
        words = _scontrol("--oneliner", "show", "job", job_id).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return False
    ends = any(f"JobState={state}" in words for state in ("COMPLETING", "CANCELLED"))
    return ends and "Reason=TimeLimit" not in words


def requeue(job_id: str) -> None:
    """Put this job (ARRAY_TASK for one of an array) back into the queue.

    It keeps its id and replays its batch script. Asks again for a minute when SLURM does not want
    to: its controller may be starting anew.
    Raises RuntimeError with SLURM's own words when it refuses to the end.
    """
    deadline = time.monotonic() + REQUEUE_SECONDS
    while refusal := _refusal(job_id):
        if time.monotonic() > deadline:
            raise RuntimeError(f"job {job_id} was not requeued: {refusal}")
        time.sleep(REQUEUE_PAUSE_S)
        if is_ended_by_slurm(job_id):
            return


def _refusal(job_id: str) -> str | None:
    """Why SLURM does not requeue the job; None when it does."""
    try:
        done = _scontrol("requeue", job_id)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    # It is back in the queue already when SLURM (a preemption) or a person requeued it, and that is
    # why it was stopped.
    if not done.returncode or ALREADY_QUEUED in done.stderr:
        return None
    return done.stderr.strip() or f"scontrol ended with code {done.returncode}"


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Call it, SIGTERM held back: SLURM stops every process of a job that it requeues, and would
    stop this one before it has heard the answer.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=SCONTROL_SECONDS
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def reachable_address(node: str) -> str:
    """`node` where its name resolves, else the address SLURM itself uses for it.

    Node names need not be host names, and some sites keep them out of DNS. Every rank asks for the
    same node, so all agree.
    """
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return _node_address(node) or node
    return node


def _node_address(node: str) -> str | None:
    try:
        done = _scontrol("--oneliner", "show", "node", node)
    except (OSError, subprocess.TimeoutExpired):
        # The caller goes on with the name; torch then reports that it cannot be resolved.
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else None
