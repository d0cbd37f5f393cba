"""Run the tasks of a job, record how they end, and start the job again where that helps.

    python -m launch.jobs.supervision --job-folder FOLDER ... -- srun ...

Owns: the record of an attempt, and requeueing.
Leaves out: srun (`step`), how an attempt ended (`outcomes`), what a task does (`job`), and the
limits of restarts (`restarts`).

It runs in the batch script, which requeues the job itself if this process does not start or is
killed. It outlives every rank, and is outside the container of the tasks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
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
from launch.jobs.scontrol import exclude, host_names, requeue, restart_count
from launch.jobs.supervision.causes import Outcome
from launch.jobs.supervision.outcomes import STOP_SIGNALS, classify
from launch.jobs.supervision.restarts import (
    RestartLimits,
    blamed_nodes,
    limit_text,
    refusal,
)
from launch.jobs.supervision.step import JobStep
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.distributed.failures.events import ATTEMPT_VARIABLE
from vitscale.distributed.failures.storage import forgive_output
from vitscale.distributed.processes import free_port


def main() -> None:
    for number in STOP_SIGNALS:
        # The tasks get them too, and end; their end is recorded here.
        signal.signal(number, signal.SIG_IGN)
    forgive_output()
    options = parse_arguments(sys.argv[1:])
    code = supervise(options)
    if options.decision_descriptor is not None:
        os.write(options.decision_descriptor, b"decided\n")
    sys.exit(code)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--job-folder", required=True, help="logs; %%j, %%A: ids of the job")
    parser.add_argument("--run-folder", action="append", default=[], help="one per array task")
    parser.add_argument("--max-requeues", type=int, required=True)
    parser.add_argument("--max-fruitless-restarts", type=int, required=True)
    parser.add_argument("--signal-delay", type=int, required=True, help="seconds")
    parser.add_argument("--num-tasks", type=int, required=True)
    parser.add_argument("--decision-descriptor", type=int, help="written to at a planned end")
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
    env[ATTEMPT_VARIABLE] = f"{job_id}/{restart_count()}"
    attempt = begin_attempt(
        run_folder,
        cluster="slurm",
        job_id=job_id,
        restart=restart_count(),
        nodes=host_names(env["SLURM_JOB_NODELIST"]),
        num_tasks=options.num_tasks,
    )
    say(f"attempt {attempt.number} of the run, job {job_id} on {', '.join(attempt.nodes)}")
    outcome = _refused_start(attempt, run_folder, limits)
    if outcome is None:
        outcome = _run(attempt, run_folder, job_folder, options)
    ended = end_attempt(
        attempt,
        run_folder,
        ending=outcome.ending,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
        kind=outcome.kind,
        failed_nodes=outcome.failed_nodes,
    )
    return _next(ended, run_folder, limits=limits)


def _run(
    attempt: Attempt, run_folder: Path, job_folder: Path, options: argparse.Namespace
) -> Outcome:
    """Run the tasks to their end."""
    set_aside_task_records(job_folder, job_id=attempt.job_id, restart=attempt.restart)
    # submitit would draw one from the job id, which may be in use, at every attempt again.
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    step = JobStep(options.command)
    code = step.wait()
    return classify(
        step,
        code,
        attempt=attempt,
        run_folder=run_folder,
        records=read_task_records(job_folder, job_id=attempt.job_id),
        signal_delay=options.signal_delay,
    )


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


def _next(ended: Attempt, run_folder: Path, *, limits: RestartLimits) -> int:
    """Requeue the job if that helps. Returns the exit code of this attempt."""
    code = ended.exit_code or 0
    if ended.ending is Ending.DONE:
        return 0
    if ended.ending is Ending.ENDED_BY_SLURM:
        say(f"SLURM is ending job {ended.job_id}: not requeued from here")
        return code
    say(f"attempt {ended.number} ended: {ended.reason}")
    # Also on a disk that is full.
    attempts = [a for a in read_attempts(run_folder) if a.number != ended.number] + [ended]
    if why := refusal(attempts, limits=limits):
        say(f"not requeued: {why}")
        return code
    say(f"requeueing job {ended.job_id} ({ended.restart + 1} of {limits.max_requeues})")
    requeue(ended.job_id)
    if nodes := blamed_nodes(attempts):
        say(exclude(ended.job_id, nodes))
    return code


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)
