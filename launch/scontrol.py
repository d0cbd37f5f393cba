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
from collections.abc import Mapping

SCONTROL_SECONDS = 60
# ESLURM_JOB_PENDING; SLURM does not translate its messages.
ALREADY_QUEUED = "Job is pending execution"


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often this job was requeued before; SLURM leaves the variable out the first time."""
    return int(environment.get("SLURM_RESTART_COUNT", "0"))


def requeue(job_id: str) -> None:
    """Put this job (ARRAY_TASK for one of an array) back into the queue.

    It keeps its id and replays its batch script. SLURM stops every process of the job when it
    hears of this; held back, its signal does not end `scontrol` before that has heard the answer.
    Raises RuntimeError with SLURM's own words when it refuses.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job_id],
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"job {job_id} was not requeued: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # It is back in the queue already when SLURM (a preemption) or a person requeued it, and that is
    # why it was stopped.
    if done.returncode and ALREADY_QUEUED not in done.stderr:
        raise RuntimeError(f"job {job_id} was not requeued: {done.stderr.strip()}")


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
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", node],
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        # The caller goes on with the name; torch then reports that it cannot be resolved.
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else None
