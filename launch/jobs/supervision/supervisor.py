"""Run the tasks of a job, record how they end, and start the job again where that helps.

    python -m launch.jobs.supervision --job-folder FOLDER ... -- srun ...

Owns: the record of an attempt, and requeueing, also when a node or another supervisor died.
Leaves out: srun (`step`), how an attempt ended (`outcomes`), what a task does (`job`), and the
limits of restarts (`restarts`).

It runs in the batch script, which starts it again with `--take-over` if it is killed. Only this
process requeues: it outlives every rank, and is outside the container of the tasks.
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
from launch.jobs.scontrol import (
    host_names,
    job_fields,
    leave_nodes,
    requeue,
    restart_count,
    silent_nodes,
    update_queued,
    usable_nodes,
)
from launch.jobs.supervision.causes import Outcome
from launch.jobs.supervision.outcomes import STOP_SIGNALS, classify, ended_with_supervisor
from launch.jobs.supervision.restarts import (
    RestartLimits,
    limit_text,
    nodes_to_exclude,
    refusal,
    suspected_nodes,
)
from launch.jobs.supervision.step import JobStep
from vitscale.config.errors import EXIT_BAD_INPUT, EXIT_STOPPED_RESUMABLE, FailureKind
from vitscale.distributed.failures.events import ATTEMPT_VARIABLE
from vitscale.distributed.failures.storage import forgive_output
from vitscale.distributed.processes import free_port

# After sbatch has accepted a job, the submission moves the pickle to its folder.
PICKLE_S, PICKLE_PAUSE_S = 60.0, 1.0


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
    parser.add_argument("--exclude-failed-nodes", action="store_true")
    parser.add_argument("--exclude", default="", help="nodes that the job already excludes")
    parser.add_argument("--signal-delay", type=int, required=True, help="seconds")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--num-tasks", type=int, required=True)
    parser.add_argument("--decision-descriptor", type=int, help="written to at a planned end")
    parser.add_argument(
        "--take-over", type=int, metavar="CODE", help="after a supervisor that ended with CODE"
    )
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
    if options.take_over is not None:
        return _take_over(run_folder, job_id, job_folder, options, limits=limits)
    attempt = _begin(run_folder, job_id, options)
    say(f"attempt {attempt.number} of the run, job {job_id} on {', '.join(attempt.nodes)}")
    dead: list[str] = []
    outcome = _refused_start(attempt, run_folder, limits) or _cut_off(job_folder, job_id)
    if outcome is None:
        outcome, dead = _run(attempt, run_folder, job_folder, options)
    ended = _end(attempt, run_folder, outcome)
    return _next(ended, run_folder, options, limits=limits, dead=dead)


def _take_over(
    run_folder: Path,
    job_id: str,
    job_folder: Path,
    options: argparse.Namespace,
    *,
    limits: RestartLimits,
) -> int:
    """End the attempt of a supervisor that was killed or failed. Returns the job's exit code."""
    newest = read_attempts(run_folder)[-1:]
    begun = [a for a in newest if (a.job_id, a.restart) == (job_id, restart_count())]
    ended = attempt = begun[0] if begun else _begin(run_folder, job_id, options)
    if attempt.ended is None:
        outcome = ended_with_supervisor(attempt, run_folder, job_folder, code=options.take_over)
        ended = _end(attempt, run_folder, outcome)
    return _next(ended, run_folder, options, limits=limits, dead=[])


def _begin(run_folder: Path, job_id: str, options: argparse.Namespace) -> Attempt:
    return begin_attempt(
        run_folder,
        cluster="slurm",
        job_id=job_id,
        restart=restart_count(),
        nodes=host_names(os.environ["SLURM_JOB_NODELIST"]),
        num_tasks=options.num_tasks,
        dead_nodes=silent_nodes,
    )


def _end(attempt: Attempt, run_folder: Path, outcome: Outcome) -> Attempt:
    return end_attempt(
        attempt,
        run_folder,
        ending=outcome.ending,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
        kind=outcome.kind,
        failed_nodes=outcome.failed_nodes,
    )


def _run(
    attempt: Attempt, run_folder: Path, job_folder: Path, options: argparse.Namespace
) -> tuple[Outcome, list[str]]:
    """Run the tasks to their end. Returns how they ended, and the nodes that died."""
    set_aside_task_records(job_folder, job_id=attempt.job_id, restart=attempt.restart)
    # submitit would draw one from the job id, which may be in use, at every attempt again.
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    step = JobStep(options.command)
    code, dead = step.wait(nodes=attempt.nodes)
    outcome = classify(
        step,
        code,
        dead,
        attempt=attempt,
        run_folder=run_folder,
        records=read_task_records(job_folder, job_id=attempt.job_id),
        signal_delay=options.signal_delay,
    )
    return outcome, dead


def _cut_off(job_folder: Path, job_id: str) -> Outcome | None:
    """A job whose submission was killed after sbatch had accepted it has nothing to run."""
    pickle = job_folder / f"{job_id}_submitted.pkl"
    deadline = time.monotonic() + PICKLE_S
    while not pickle.exists():
        if time.monotonic() > deadline:
            reason = f"the submission was interrupted before it wrote {pickle}"
            return Outcome(
                ending=Ending.BAD_INPUT,
                reason=reason,
                exit_code=EXIT_BAD_INPUT,
                kind=FailureKind.BAD_INPUT,
            )
        time.sleep(PICKLE_PAUSE_S)
    return None


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
    # Also on a disk that is full.
    attempts = [a for a in read_attempts(run_folder) if a.number != ended.number] + [ended]
    suspected = suspected_nodes(attempts, now=time.time())
    if suspected and not options.exclude_failed_nodes:
        say(
            f"{', '.join(suspected)} failed repeatedly. To avoid: "
            f"launch.exclude='{_joined(options.exclude, suspected)}', or "
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
    changes = {"NumNodes": str(options.num_nodes)} if dead else {}
    if options.exclude_failed_nodes:
        changes |= _exclusion(ended.job_id, suspected, options)
    if changes:
        update_queued(ended.job_id, changes)
    return code


def _exclusion(
    job_id: str, suspected: Sequence[str], options: argparse.Namespace
) -> dict[str, str]:
    """The change of the nodes that the job excludes; empty without one."""
    usable = usable_nodes(job_id, without=options.exclude)
    excluded = nodes_to_exclude(suspected, usable=usable, num_nodes=options.num_nodes)
    if spared := [node for node in suspected if node not in excluded]:
        say(
            f"not excluded, though suspected: {', '.join(spared)}; of {len(usable)} usable nodes "
            f"the job needs {options.num_nodes}"
        )
    now = _joined(options.exclude, excluded)
    before = job_fields(job_id).get("ExcNodeList", "").removeprefix("(null)")
    if set(host_names(now)) == set(host_names(before)):
        return {}
    say(f"nodes excluded from now on: {now or 'none'}")
    return {"ExcNodeList": now}


def _joined(node_list: str, nodes: Sequence[str]) -> str:
    return ",".join(filter(None, [node_list, *nodes]))


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)
