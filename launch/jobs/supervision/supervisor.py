"""Run the tasks of a job, record how they end, and start the job again where that helps.

    python -m launch.jobs.supervision --job-folder FOLDER ... -- srun ...

Owns: why an attempt ended, its record, and requeueing, also when a node died.
Leaves out: srun (`step`), what a task does (`job`), and the limits of restarts (`restarts`).

It runs in the batch script. Only this process requeues: it outlives every rank, and is outside the
container of the tasks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.attempts import (
    Attempt,
    Ending,
    begin_attempt,
    end_attempt,
    read_attempts,
    read_task_records,
    set_aside_task_records,
)
from launch.jobs.scontrol import (
    host_names,
    is_ended_by_slurm,
    job_fields,
    leave_nodes,
    requeue,
    restart_count,
    silent_nodes,
    update_queued,
)
from launch.jobs.supervision.restarts import RestartLimits, limit_text, refusal, suspected_nodes
from launch.jobs.supervision.step import Step
from vitscale.config.errors import EXIT_BAD_INPUT, EXIT_STOPPED_RESUMABLE
from vitscale.distributed.processes import free_port

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
OWN_LINES = ("srun:", "slurmstepd")
# A warning that comes this much earlier than `--signal` says is still that of the time limit.
EARLY_S = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended."""

    ending: Ending
    reason: str
    exit_code: int
    failed_nodes: tuple[str, ...] = ()


def main() -> None:
    for number in STOP_SIGNALS:
        # The tasks get them too, and end; their end is recorded here.
        signal.signal(number, signal.SIG_IGN)
    options = parse_arguments(sys.argv[1:])
    sys.exit(supervise(options))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--job-folder", required=True, help="logs; %%j, %%A: ids of the job")
    parser.add_argument("--run-folder", action="append", default=[], help="one per array task")
    parser.add_argument("--max-requeues", type=int, required=True)
    parser.add_argument("--max-fruitless-restarts", type=int, required=True)
    parser.add_argument("--exclude-failed-nodes", action="store_true")
    parser.add_argument("--exclude", default="", help="nodes that the job already excludes")
    parser.add_argument("--signal-delay", type=int, required=True, help="seconds")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--num-tasks", type=int, required=True)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def supervise(options: argparse.Namespace) -> int:
    """Run one attempt. Returns the exit code of the job."""
    env = os.environ
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{index}" if array else env["SLURM_JOB_ID"]
    job_folder = Path(
        options.job_folder.replace("%j", env["SLURM_JOB_ID"]).replace("%A", array or "")
    )
    run_folder = job_folder / job_id
    if options.run_folder:
        run_folder = Path(options.run_folder[int(index or 0)])
    limits = RestartLimits(
        max_requeues=options.max_requeues, max_fruitless_restarts=options.max_fruitless_restarts
    )
    attempt = begin_attempt(
        run_folder,
        cluster="slurm",
        job_id=job_id,
        restart=restart_count(),
        nodes=host_names(env["SLURM_JOB_NODELIST"]),
        num_tasks=options.num_tasks,
        dead_nodes=silent_nodes,
    )
    say(f"attempt {attempt.number} of the run, job {job_id} on {', '.join(attempt.nodes)}")
    outcome = _refused_start(attempt, run_folder, limits)
    dead: list[str] = []
    if outcome is None:
        set_aside_task_records(job_folder, job_id=job_id, restart=attempt.restart)
        # submitit would draw one from the job id, which may be in use, at every attempt again.
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        step = Step(options.command)
        code, dead = step.wait(nodes=attempt.nodes)
        outcome = classify(
            step,
            code,
            dead,
            job_id=job_id,
            job_folder=job_folder,
            signal_delay=options.signal_delay,
        )
    ended = end_attempt(
        attempt,
        run_folder,
        ending=outcome.ending,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
        failed_nodes=outcome.failed_nodes,
    )
    return _next(ended, run_folder, options, limits=limits, dead=dead)


def _refused_start(attempt: Attempt, run_folder: Path, limits: RestartLimits) -> Outcome | None:
    """SLURM also restarts jobs by itself: after a preemption, or the death of this node."""
    if attempt.restart > limits.max_requeues:
        return Outcome(
            ending=Ending.STOPPED, reason=limit_text(limits), exit_code=EXIT_STOPPED_RESUMABLE
        )
    before = [a for a in read_attempts(run_folder)[:-1] if a.job_id == attempt.job_id]
    if before and (why := refusal(before, limits=limits)) and before[-1].ending is not Ending.DONE:
        return Outcome(ending=Ending.FAILED, reason=f"not started: {why}", exit_code=1)
    return None


def _next(
    ended: Attempt,
    run_folder: Path,
    options: argparse.Namespace,
    *,
    limits: RestartLimits,
    dead: Sequence[str],
) -> int:
    """Requeue the job if that helps. Returns the exit code of this attempt."""
    code = ended.exit_code or 0
    if ended.ending is Ending.DONE:
        return 0
    if ended.ending is Ending.ENDED_BY_SLURM:
        say(f"SLURM is ending job {ended.job_id}: not requeued from here")
        return code
    say(f"attempt {ended.number} ended: {ended.reason}")
    attempts = read_attempts(run_folder)
    suspected = suspected_nodes(attempts)
    excluded = ",".join(filter(None, [options.exclude, *suspected]))
    if suspected and not options.exclude_failed_nodes:
        say(
            f"{', '.join(suspected)} failed repeatedly. To avoid: launch.exclude='{excluded}', or "
            "launch.exclude_failed_nodes=true"
        )
    if why := refusal(attempts, limits=limits):
        say(f"not requeued: {why}")
        return code
    say(f"requeueing job {ended.job_id} ({ended.restart + 1} of {limits.max_requeues})")
    if dead:
        own = os.environ.get("SLURMD_NODENAME")  # without it, this script would end
        leave_nodes(ended.job_id, [n for n in ended.nodes if n not in dead or n == own])
    requeue(ended.job_id)
    changes = {}
    if dead:
        changes["NumNodes"] = str(options.num_nodes)
    if suspected and options.exclude_failed_nodes:
        changes["ExcNodeList"] = excluded
        say(f"nodes excluded from now on: {excluded}")
    if changes:
        update_queued(ended.job_id, changes)
    return code


def classify(
    step: Step,
    code: int,
    dead: Sequence[str],
    *,
    job_id: str,
    job_folder: Path,
    signal_delay: int,
) -> Outcome:
    """How an attempt ended. srun reports the task that failed first in its first line."""
    records = read_task_records(job_folder, job_id=job_id)
    if dead:
        lost = [record for record in records if record.node in dead]
        ranks = ", ".join(str(record.rank) for record in sorted(lost, key=lambda r: r.rank))
        who = f"{', '.join(dead)} died (does not answer SLURM)"
        return Outcome(
            ending=Ending.NODE_FAILED,
            reason=f"{who}, and with it rank {ranks}" if ranks else who,
            exit_code=code if code > 0 else 1,
            failed_nodes=tuple(dead),
        )
    if code == 0:
        return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    if is_ended_by_slurm(job_id):
        state = job_fields(job_id).get("JobState", "")
        return Outcome(
            ending=Ending.ENDED_BY_SLURM,
            reason=f"SLURM ended the job ({state})",
            exit_code=code,
        )
    if not step.ends:
        return Outcome(
            ending=Ending.FAILED,
            reason=f"srun ended with code {code}: {step.last_error or 'without a message'}",
            exit_code=code,
        )
    first = step.ends[0]
    if first.exit_code == EXIT_STOPPED_RESUMABLE or first.signal in STOP_SIGNALS:
        return Outcome(
            ending=Ending.STOPPED,
            reason=_why_stopped(job_fields(job_id), signal_delay=signal_delay),
            exit_code=EXIT_STOPPED_RESUMABLE,
        )
    if first.exit_code == EXIT_BAD_INPUT:
        return Outcome(ending=Ending.BAD_INPUT, reason=first.text, exit_code=EXIT_BAD_INPUT)
    reason, killed = first.text, first.exit_code is None
    if not killed and (line := _last_line(job_folder, job_id, first.ranks)):
        reason += f": {line}"
    return Outcome(
        ending=Ending.KILLED if killed else Ending.FAILED,
        reason=reason,
        exit_code=code,
        failed_nodes=first.nodes,
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


def _last_line(job_folder: Path, job_id: str, ranks: str) -> str:
    """The last line that the failed rank wrote: in Python, the exception."""
    rank = re.split("[,-]", ranks)[0]
    try:
        lines = (job_folder / f"{job_id}_{rank}_log.out").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    own = (line.strip() for line in reversed(lines[-50:]) if not line.startswith(OWN_LINES))
    return next(filter(None, own), "")[:200]


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)
