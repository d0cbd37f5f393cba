"""Jobs of a run folder that SLURM knows: queued, running, and for minutes after their end.

Owns: finding them, refusing a second job of the same run, and waiting for one another.
Leaves out: what a job did (its task records and log), and submitting (`submission`).

Works without accounting, and asks once for all jobs of the user. A job belongs to the folder that
holds its batch script: the name has a random part, so that neither job ids that start again at 1
nor another cluster with the same file system confuse it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings

SLURM_SECONDS = 60
# The batch script's path is last: it may contain the separator.
FIELDS = ("%i", "%F", "%T", "%r", "%S", "%N", "%V", "%o")
# JOB STATE CODES of `man squeue`: states that a job does not leave.
ENDED_STATES = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED "
    "TIMEOUT".split()
)


class NoAnswerError(Exception):
    """SLURM's commands are missing, fail, or take too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job, or one task of an array. Times are in seconds since the epoch."""

    job_id: str
    """4711, or 4711_3 for a task of an array."""
    submitted_id: str
    """The id that sbatch printed: of the job, or of the whole array."""
    state: str
    """SLURM's name: PENDING, RUNNING, COMPLETING, CANCELLED, …"""
    reason: str | None
    """Why the job waits or has failed, in SLURM's words: Resources, Dependency, …"""
    start: float | None
    """When it started; of a waiting job SLURM's estimate, None if it has none."""
    nodes: str | None
    """Its nodes, for example node[3,5-7]; None before it has any."""
    submitted: float | None
    """When it was submitted or, later, requeued."""
    script: str
    """Path of its batch script."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES


def jobs_of(run_folder: Path, *, jobs: Sequence[QueuedJob] | None = None) -> list[QueuedJob]:
    """The jobs of a run that are queued or running, oldest first.

    jobs: the answer of `user_jobs`, to ask SLURM once for many runs.
    Raises NoAnswerError.
    """
    folder = run_folder / "slurm"
    return [
        job
        for job in (user_jobs() if jobs is None else jobs)
        # submitit leaves a link where the script was submitted from.
        if os.path.lexists(folder / Path(job.script).name) and not job.has_ended
    ]


def submitted_ids(jobs: Iterable[QueuedJob]) -> list[str]:
    """The id of each job or array, once."""
    return list(dict.fromkeys(job.submitted_id for job in jobs))


def already_queued(jobs: Sequence[QueuedJob], *, run_folder: Path) -> UserError:
    """The error for submitting a run whose `jobs` are queued or running."""
    ids = submitted_ids(jobs)
    shown = ", ".join(f"{job.job_id} ({_shown_state(job)})" for job in jobs[:3])
    more = f" and {len(jobs) - 3} more" if len(jobs) > 3 else ""
    return UserError(
        f"job {shown}{more} of this run has not ended; a second one would fail when it starts",
        where=str(run_folder),
        next_step=f"wait for it, cancel it (scancel {' '.join(ids)}), or add --after (starts when "
        "it has ended)",
    )


def depending_on(
    launch: LaunchSettings,
    job_ids: Iterable[str],
    *,
    how: Literal["afterany", "afterok"] = "afterany",
) -> LaunchSettings:
    """The same resources, with a dependency added to what `launch.sbatch` may have.

    afterok: SLURM cancels the job when one of those that it waits for has failed.
    """
    if not (waited := sorted(set(job_ids))):
        return launch
    own = launch.sbatch.get("dependency")
    dependency = ":".join([how, *waited])
    added = {"dependency": f"{own},{dependency}" if own else dependency}
    if how == "afterok":
        # Otherwise it would stay in the queue as DependencyNeverSatisfied.
        added["kill-on-invalid-dep"] = "yes"
    return launch.model_copy(update={"sbatch": {**launch.sbatch, **added}})


def user_jobs() -> list[QueuedJob]:
    """All jobs of this user that SLURM remembers, by submission. Raises NoAnswerError."""
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"]
    text = ask_slurm(*command, f"--format={'|'.join(FIELDS)}")
    jobs = [_job(line) for line in text.splitlines() if line.count("|") >= len(FIELDS) - 1]
    return sorted(jobs, key=lambda job: _natural(job.job_id))


def ask_slurm(*command: str, stdin: str = "") -> str:
    """The output of one of SLURM's commands, with times in seconds since the epoch.

    Raises NoAnswerError with the command's own message.
    """
    # SQUEUE_PARTITION, SINFO_FORMAT and the like would change what the options ask for.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SQUEUE_", "SINFO_"))
    }
    try:
        done = subprocess.run(
            command,
            env=environment | {"SLURM_TIME_FORMAT": "%s"},
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SLURM_SECONDS,
        )
    except FileNotFoundError:
        raise NoAnswerError(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]} did not answer in {SLURM_SECONDS} s") from None
    except OSError as error:
        raise NoAnswerError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        message = " ".join(done.stderr.split())
        raise NoAnswerError(message or f"{command[0]} ended with code {done.returncode}")
    return done.stdout


def _shown_state(job: QueuedJob) -> str:
    """For example RUNNING on n[1-2], or PENDING: Resources."""
    if job.nodes:
        return f"{job.state} on {job.nodes}"
    return f"{job.state}: {job.reason}" if job.reason else job.state


def _job(line: str) -> QueuedJob:
    job_id, submitted_id, state, reason, start, nodes, submitted, script = line.split(
        "|", len(FIELDS) - 1
    )
    return QueuedJob(
        job_id=job_id,
        submitted_id=submitted_id,
        state=state,
        reason=reason if reason not in ("", "None") else None,
        start=_seconds(start),
        nodes=nodes or None,
        submitted=_seconds(submitted),
        script=script,
    )


def _seconds(text: str) -> float | None:
    """None where SLURM says N/A, Unknown or nothing."""
    return float(text) if text.isdecimal() else None


def _natural(job_id: str) -> list[int]:
    """Numbers in an id, so that 9 comes before 10, and 4711_2 before 4711_10."""
    return [int(part) for part in job_id.split("_") if part.isdecimal()]
