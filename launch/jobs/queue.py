"""Ask SLURM about jobs and nodes, and requeue a job.

Owns: every call of squeue, scontrol and sinfo, and one job per run.
Leaves out: submitting (`submission`) and deciding when to requeue
(`requeue_decision`).

Works without accounting, and asks once for all jobs of the user. A job belongs to the folder that
holds its batch script: the name has a random part, so that neither job ids that start again at 1
nor another cluster with the same file system confuse it.
"""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitscale.runs.launching import LaunchSettings

SLURM_SECONDS = 60
# The controller may be restarting, or its substitute starting.
REQUEUE_SECONDS = 300.0
# Less than KillWait (30 s by default), after which SLURM kills what is left of a requeued job.
EXCLUDE_SECONDS = 20.0
PAUSE_SECONDS = 2.0
# From a requeue to the next start: nodes that need longer to end the job cost the full delay.
RESTART_SECONDS = 5
EPILOG_SECONDS = 20
# ESLURM_JOB_PENDING; SLURM does not translate its messages.
ALREADY_QUEUED = "Job is pending execution"
# Of refusals that no repetition changes.
FINAL_REFUSAL = re.compile(
    r"disabled|invalid job id|denied|not permitted", re.IGNORECASE
)
# squeue's names of the fields of `QueuedJob`.
FORMAT = "%i|%F|%T|%r|%S|%N|%V|%o"
# In the output of `squeue --verbose`, between its options and the jobs.
SLURM_CLOCK = re.compile(r"^last_update_time=(\d+).*\n", re.MULTILINE)
# JOB STATE CODES of `man squeue`: states that a job does not leave.
ENDED_STATES = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "PREEMPTED RECONFIG_FAIL REVOKED TIMEOUT".split()
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
    """SLURM's reason for waiting or failing: Resources, Dependency, …"""
    start: float | None
    """When it started; of a waiting job SLURM's estimate, None if it has none."""
    nodes: str | None
    """Its nodes, for example node[3,5-7]; None before it has any."""
    submitted: float | None
    """When it was submitted or, later, requeued."""
    script: str
    seen: float | None = None
    """When SLURM answered, by its own clock; None if it does not say."""

    @property
    def has_ended(self) -> bool:
        """Whether it is in a state that it does not leave. SLURM forgets it minutes later."""
        return self.state in ENDED_STATES

    def __str__(self) -> str:
        """Format the job: 12 (RUNNING on n[1-2]), or 12 (PENDING: Resources)."""
        detail = self.state
        if self.nodes:
            detail += f" on {self.nodes}"
        elif self.reason:
            detail += f": {self.reason}"
        return f"{self.job_id} ({detail})"


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
    environment["SLURM_TIME_FORMAT"] = "%s"

    try:
        done = subprocess.run(
            command,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SLURM_SECONDS,
        )
    except FileNotFoundError:
        raise NoAnswerError(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"{command[0]} did not answer in {SLURM_SECONDS} s"
        ) from None
    except OSError as error:
        raise NoAnswerError(f"{command[0]}: {error.strerror}") from None

    # Messages of SLURM have several lines, and an error is one.
    if done.returncode:
        message = " ".join(done.stderr.split())
        raise NoAnswerError(
            message or f"{command[0]} ended with code {done.returncode}"
        )
    return done.stdout


# ---- jobs of a run ----------------------------------------------------------------------------


def user_jobs() -> list[QueuedJob]:
    """All jobs of this user that SLURM remembers, by submission. Raises NoAnswerError."""
    # Without --all, jobs of hidden partitions would be missing, except for root.
    command = "squeue --verbose --all --noheader --array --states=all".split()
    text = ask_slurm(*command, f"--user={os.getuid()}", f"--format={FORMAT}")

    # The options that come first are left out: the format is among them.
    clock = SLURM_CLOCK.search(text)
    seen = None
    if clock:
        text = text[clock.end() :]
        seen = float(clock[1])

    # A line that is cut off, or a message of a site's own, is no job.
    jobs = [
        _job(line, seen=seen)
        for line in text.splitlines()
        if line.count("|") >= FORMAT.count("|")
    ]
    # 9 comes before 10, and 4711_2 before 4711_10.
    return sorted(jobs, key=lambda job: [*map(int, re.findall(r"\d+", job.job_id))])


def known_jobs() -> list[QueuedJob] | None:
    """Same as `user_jobs`, but None if SLURM does not answer or is not installed."""
    try:
        return user_jobs()
    except NoAnswerError:
        return None


def _job(line: str, *, seen: float | None) -> QueuedJob:
    # The order is that of FORMAT; the script's path may contain the separator.
    job_id, submitted_id, state, reason, start, nodes, submitted, script = line.split(
        "|", 7
    )
    # squeue writes None for a job without a reason.
    if reason == "None":
        reason = ""
    return QueuedJob(
        job_id=job_id,
        submitted_id=submitted_id,
        state=state,
        reason=reason or None,
        start=_seconds(start),
        nodes=nodes or None,
        submitted=_seconds(submitted),
        script=script,
        seen=seen,
    )


def _seconds(text: str) -> float | None:
    """Parse seconds; None for N/A, Unknown or nothing."""
    return float(text) if text.isdecimal() else None


def jobs_of(run_folder: Path, *, jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Those of `jobs` that belong to a run and are queued or running."""
    return [job for job in jobs_with_script(run_folder, jobs) if not job.has_ended]


def jobs_with_script(run_folder: Path, jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Those of `jobs` that belong to a run, also if they have ended."""
    folder = run_folder / "slurm"
    # submitit leaves a link where the script was submitted from.
    return [job for job in jobs if os.path.lexists(folder / Path(job.script).name)]


def submitted_ids(jobs: Iterable[QueuedJob]) -> list[str]:
    """The id of each job or array, once."""
    return list(dict.fromkeys(job.submitted_id for job in jobs))


def depending_on(
    launch: LaunchSettings, how: str, job_ids: Sequence[str]
) -> LaunchSettings:
    """The same resources, with a dependency added to what `launch.sbatch` may have.

    how: afterany, or afterok: SLURM cancels the job when one that it waits for has failed.
    """
    if not job_ids:
        return launch

    dependency = ":".join([how, *sorted(set(job_ids))])
    if before := launch.sbatch.get("dependency"):
        dependency = f"{before},{dependency}"
    sbatch = {**launch.sbatch, "dependency": dependency}
    if how == "afterok":
        # Otherwise it would stay in the queue as DependencyNeverSatisfied.
        sbatch["kill-on-invalid-dep"] = "yes"
    return launch.model_copy(update={"sbatch": sbatch})


# ---- from inside a job ------------------------------------------------------------------------


def restart_count() -> int:
    """Number of requeues of this job. SLURM sets the variable from the first requeue on."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def job_fields(job_id: str) -> dict[str, str]:
    """The controller's fields of a job, such as JobState; empty if SLURM does not answer."""
    try:
        return fields_of(ask_slurm("scontrol", "--oneliner", "show", "job", job_id))
    except NoAnswerError:
        return {}


def fields_of(line: str) -> dict[str, str]:
    """The fields in a line of `scontrol --oneliner show`: NAME=VALUE NAME=VALUE ..."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def is_ended_by_slurm(fields: Mapping[str, str]) -> bool:
    """Return True if SLURM is ending this job after a cancel or requeue, not at its time limit.

    A job that is being cancelled could still be requeued, against the user's intent.
    """
    ends = fields.get("JobState") in ("COMPLETING", "CANCELLED")
    return ends and fields.get("Reason") != "TimeLimit"


def end_time(fields: Mapping[str, str]) -> float:
    """When the job reaches its time limit, unix seconds; infinite if SLURM does not say."""
    return _seconds(fields.get("EndTime", "")) or math.inf


def requeue(job_id: str) -> str | None:
    """Put this job (ARRAY_TASK for a task of an array) back into the queue.

    The job keeps its id and reruns its batch script. Returns SLURM's message if it refuses.
    """

    def is_queued(message: str) -> bool:
        # A job stopped by a preemption or by `scontrol requeue` is already in the queue.
        return ALREADY_QUEUED in message or is_ended_by_slurm(job_fields(job_id))

    refusal = _insist(
        "scontrol", "requeue", job_id, seconds=REQUEUE_SECONDS, unless=is_queued
    )
    if refusal is not None:
        return refusal

    # Unless a start is ahead when the job has ended on all nodes, SLURM delays it until the
    # old credential has expired, for two minutes by default (batch_requeue_fini of slurmctld).
    with suppress(NoAnswerError):
        settings = ask_slurm("scontrol", "show", "config")
        seconds = RESTART_SECONDS
        # A job has ended on a node when the epilog has, too.
        if not re.search(r"^Epilog +=.*null", settings, re.MULTILINE):
            seconds = EPILOG_SECONDS
        ask_slurm("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{seconds}")
    return None


def exclude(
    job_id: str,
    node: str,
    *,
    why: str,
    job: Mapping[str, str],
    script: Path,
    fewest_nodes: int | None = None,
) -> str:
    """Exclude a node from a job that was just requeued. Returns a sentence for the log.

    why: the reason in that sentence.
    job: its fields before: while it ends, SLURM counts only the nodes that have not ended yet.
    script: its batch script, with the nodes and features that it asks for.
    fewest_nodes: on which it can start; None: as many as it had.
    Not if too few others are up, or none of those that the job asks for: it would wait for ever.
    """
    before = job.get("ExcNodeList", "(null)").replace("(null)", node)
    usable = "--states=idle,mixed,allocated,completing"
    command = ["sinfo", "--noheader", "--Node", "--format=%N", usable]
    try:
        # A node is listed once for each of its partitions.
        up = set(ask_slurm(*command, f"--partition={job['Partition']}").split())
        excluded = {node, *ask_slurm("scontrol", "show", "hostnames", before).split()}
    except NoAnswerError as error:
        return f"{node} is not excluded: {error}"

    needed = fewest_nodes or int(job["NumNodes"].partition("-")[0])
    if len(up - excluded) < needed:
        return f"{node} is not excluded: too few other nodes are up"

    # Only SLURM knows whether the others have what the job asks for. A job that this one waited
    # for may be forgotten, so it is asked without the dependency.
    names = ",".join(sorted(excluded))
    test = ["sbatch", "--test-only", "--dependency=", f"--exclude={names}"]
    try:
        ask_slurm(*test, str(script))
    except NoAnswerError as error:
        return f"{node} is not excluded: the job could not start without it ({error})"

    # SLURM changes this of waiting jobs alone, and a job that is requeued still ends for a moment.
    change = [f"JobId={job_id}", f"ExcNodeList={names}"]
    refusal = _insist("scontrol", "update", *change, seconds=EXCLUDE_SECONDS)
    if refusal is not None:
        return f"{node} is not excluded: {refusal}"
    return f"{node} is excluded from job {job_id}: {why}"


def _insist(
    *command: str, seconds: float, unless: Callable[[str], bool] = lambda message: False
) -> str | None:
    """Repeat a command until SLURM takes it: the controller may be restarting.

    Returns SLURM's message if it still refuses after `seconds`, or at once if it never will take
    it. unless: whether a message means that nothing is left to do.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            ask_slurm(*command)
            return None
        except NoAnswerError as error:
            if unless(str(error)):
                return None
            if FINAL_REFUSAL.search(str(error)) or time.monotonic() > deadline:
                return str(error)
        time.sleep(PAUSE_SECONDS)


def reachable_address(node: str) -> str:
    """`node` if its name resolves, else the address that SLURM uses for it.

    Node names need not be host names, and some sites keep them out of DNS. All ranks ask for the
    same node and get the same answer.
    """
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    # The controller may be away just now. With a name that does not resolve, ranks would look for
    # one another for half an hour.
    command = ("scontrol", "--oneliner", "show", "node", node)
    _insist(*command, seconds=REQUEUE_SECONDS)
    with suppress(NoAnswerError):
        address = re.search(r"\bNodeAddr=(\S+)", ask_slurm(*command))
        if address is not None:
            return address[1]
    return node  # torch then reports that the name does not resolve
