"""Query and control SLURM from inside a job, through `scontrol`.

Owns: requeueing, excluding nodes, job state, restart count, names and addresses of nodes.
Leaves out: submitting (`submission`) and deciding when to requeue (`supervision`).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from launch.jobs.queue import NoAnswerError, ask_slurm

SCONTROL_SECONDS = 60
REQUEUE_SECONDS, REQUEUE_PAUSE_S = 60.0, 5.0
# Less than KillWait (30 s by default), after which SLURM kills what is left of a requeued job.
EXCLUDE_SECONDS = 20.0
# ESLURM_JOB_PENDING; SLURM does not translate its messages.
ALREADY_QUEUED = "Job is pending execution"


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often this job was requeued. SLURM sets the variable from the first requeue on."""
    return int(environment.get("SLURM_RESTART_COUNT", "0"))


def is_ended_by_slurm(job_id: str) -> bool:
    """Whether SLURM is ending this job after a cancel or requeue, not at its time limit.

    A job that is being cancelled could still be requeued, against the user's intent.
    False if SLURM does not answer.
    """
    fields = job_fields(job_id)
    ends = fields.get("JobState") in ("COMPLETING", "CANCELLED")
    return ends and fields.get("Reason") != "TimeLimit"


def job_fields(job_id: str) -> dict[str, str]:
    """The controller's fields of a job, such as JobState; empty if SLURM does not answer."""
    try:
        words = _scontrol("--oneliner", "show", "job", job_id).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def host_names(node_list: str) -> tuple[str, ...]:
    """The nodes of a list such as n[1-3,7]."""
    if "[" not in node_list and "," not in node_list:
        return (node_list,)
    return tuple(_scontrol("show", "hostnames", node_list).stdout.split())


def requeue(job_id: str) -> None:
    """Put this job (ARRAY_TASK for a task of an array) back into the queue.

    The job keeps its id and reruns its batch script. Retries for a minute, since the controller may
    be restarting.
    Raises RuntimeError with SLURM's message if it still refuses.
    """
    deadline = time.monotonic() + REQUEUE_SECONDS
    while refusal := _refusal(job_id):
        if time.monotonic() > deadline:
            raise RuntimeError(f"job {job_id} was not requeued: {refusal}")
        time.sleep(REQUEUE_PAUSE_S)
        if is_ended_by_slurm(job_id):
            return


def _refusal(job_id: str) -> str | None:
    """SLURM's reason not to requeue the job; None on success."""
    try:
        done = _scontrol("requeue", job_id)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    # A job stopped by a preemption or by `scontrol requeue` is already in the queue.
    if not done.returncode or ALREADY_QUEUED in done.stderr:
        return None
    return done.stderr.strip() or f"scontrol ended with code {done.returncode}"


def exclude(job_id: str, nodes: Sequence[str]) -> str:
    """Keep a job that was just requeued off these nodes. Returns what was done, in words.

    Not if too few others are up: the job would wait for ever. SLURM changes this of waiting jobs
    alone, and a job that is requeued still ends for a moment.
    """
    fields, named = job_fields(job_id), ", ".join(nodes)
    before = fields.get("ExcNodeList", "(null)")
    excluded = {*nodes, *(host_names(before) if before != "(null)" else ())}
    left = usable_nodes(fields.get("Partition", "")) - excluded
    if len(left) < int(fields.get("NumNodes", "1").partition("-")[0]):
        return f"{named} is not excluded: too few other nodes are up"
    deadline = time.monotonic() + EXCLUDE_SECONDS
    while True:
        done = _scontrol("update", f"JobId={job_id}", f"ExcNodeList={','.join(sorted(excluded))}")
        if not done.returncode:
            return f"{named} is excluded from job {job_id}: its last two attempts failed there"
        if time.monotonic() > deadline:
            return f"{named} is not excluded: {done.stderr.strip()}"
        time.sleep(1.0)


def usable_nodes(partitions: str) -> set[str]:
    """The nodes of partitions that run jobs at present; none if SLURM does not answer."""
    command = ["sinfo", "--noheader", "--Node", "--format=%N"]
    command += ["--states=idle,mixed,allocated,completing", f"--partition={partitions}"]
    try:
        return set(ask_slurm(*command).split())
    except NoAnswerError:
        return set()


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run scontrol with SIGTERM blocked.

    SLURM signals every process of a job that it requeues, which would end this call before the
    answer.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return subprocess.run(
            ["scontrol", *arguments],
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def reachable_address(node: str) -> str:
    """`node` if its name resolves, else the address that SLURM uses for it.

    Node names need not be host names, and some sites keep them out of DNS. All ranks ask for the
    same node and get the same answer.
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
        return None  # torch then reports that the name does not resolve
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else None
