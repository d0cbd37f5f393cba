"""Decide what follows an attempt on SLURM: the job is done, starts again, or ends.

    python -m launch.jobs.requeue_decision RUN_FOLDER --job 17 --code 1 ... < errors of srun

Owns: how the attempt ended, by srun's errors and SLURM; whether and when the job is requeued, and
the limits of restarts.
Leaves out: calling SLURM (`queue`), and the record with the causes of failures (`attempts`).

The batch script runs it when srun has ended, on the first node and outside the container of the
tasks. It prints the exit code of the job; all that is for the log goes to standard error. While
ranks train, nothing of ours runs beside them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launch.jobs.attempts import (
    Attempt,
    Ending,
    Outcome,
    begin_attempt,
    end_attempt,
    ended_with,
    failure_outcome,
    is_complete,
    last_lines,
    read_attempts,
    record_requeue,
)
from launch.jobs.queue import (
    NoAnswerError,
    ask_slurm,
    end_time,
    exclude,
    is_ended_by_slurm,
    job_fields,
    requeue,
    restart_count,
)
from launch.jobs.status_text import format_size
from launch.jobs.submission import MAX_FRUITLESS_RESTARTS
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, FailureKind
from vitscale.distributed.events import Failure
from vitscale.distributed.processes import forgive_output

# srun: error: n[1-2]: tasks 0-1: Exited with exit code 75
TASK_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? ((\d+)[\d,-]*): (.+?)\s*$")
# srun: error: task 1 launch failed: Slurmd could not connect IO
NOT_LAUNCHED = re.compile(r"srun: error: task (\d+) (launch failed: .+)")
EXITED = re.compile(r"Exited with exit code (\d+)")
# A task whose command could not be executed has this in its log; its exit code is errno, such as
# 2, which from a stage would mean bad input.
NOT_EXECUTED = re.compile(r"slurmstepd\S*: error: execve\(\): (.+)")
# A shell ends with these if its command is not executable, or not there.
SHELL_CODES = (126, 127)
# srun and its daemon write these into the log of rank 0, below what the rank has written.
SRUN_LINE = re.compile(r"srun: |slurmstepd\S*: error: \*\*\*")
STOPPED = (
    f"Exited with exit code {EXIT_STOPPED_RESUMABLE}",
    signal.strsignal(signal.SIGUSR2),
    signal.strsignal(signal.SIGTERM),
)
SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}
# A warning that comes this much earlier than `--signal` says is still that of the time limit.
EARLY_S = 90
FINAL_TEXTS = {
    FailureKind.BAD_INPUT: "bad input: a restart would fail in the same way. Correct it and submit "
    "again.",
    FailureKind.DIVERGED: "the training diverged: a restart would end in the same way. Change the "
    "learning rate or the data, and submit again.",
}
# A job waits this long for a folder that cannot be written, and looks at it this often.
STORAGE_WAIT_S = 1800.0
STORAGE_POLL_S = 10.0
# The wait ends so much before the time limit, while the job can still be requeued.
STORAGE_MARGIN_S = 60.0


def main() -> None:
    # The ranks have got these signals too; their end is to be recorded here.
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    forgive_output()

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--job", required=True, help="its id; ARRAY_TASK in an array")
    parser.add_argument("--code", type=int, required=True, help="of srun")
    parser.add_argument("--signal-delay", type=int, required=True, help="seconds")
    parser.add_argument("--max-requeues", type=int, required=True)
    parser.add_argument("--script", type=Path, required=True, help="of the job")
    parser.add_argument("--fewest-nodes", type=int, help="default: as many as it has")
    options = parser.parse_args()

    print(finish_attempt(options, sys.stdin.read().splitlines()))


def finish_attempt(options: argparse.Namespace, srun_errors: Sequence[str]) -> int:
    """Record the end of the attempt, and requeue the job if that helps.

    Returns the exit code of the job.
    """
    folder = options.run_folder
    job_id = options.job
    restart = restart_count()

    # An array's task gets its folder when it starts, so there a missing one says nothing.
    if "_" not in job_id and not folder.is_dir():
        say(
            f"not requeued: {folder} was moved or removed. Submit the run from where it is now."
        )
        return int(options.code) or FailureKind.STORAGE.exit_code

    fields = job_fields(job_id)
    outcome = classify(
        options.code,
        srun_errors,
        folder,
        attempt=f"{job_id}/{restart}",
        fields=fields,
        signal_delay_s=options.signal_delay,
    )
    # A start at once would fail in the same way, and so would the record of this end.
    if outcome.kind is FailureKind.STORAGE:
        wait_for_storage(folder, until=end_time(fields) - STORAGE_MARGIN_S)

    attempts = read_attempts(folder)
    if not attempts or (attempts[-1].job_id, attempts[-1].restart) != (job_id, restart):
        # No rank 0 has started, or storage did not take its record.
        attempts.append(
            begin_attempt(folder, cluster="slurm", job_id=job_id, restart=restart)
        )
    ended = end_attempt(attempts[-1], folder, outcome)
    attempts[-1] = ended

    if ended.ending is Ending.DONE:
        return 0
    if ended.ending is Ending.ENDED_BY_SLURM:
        say(f"SLURM is ending job {job_id}: not requeued from here")
        return outcome.exit_code
    say(f"attempt {ended.number} ended: {ended.reason}")

    refusal = restart_refusal(attempts, max_requeues=options.max_requeues)
    if refusal is None:
        say(f"requeueing job {job_id} ({restart + 1} of {options.max_requeues})")
        if message := requeue(job_id):
            refusal = (
                f"job {job_id}: {message}. Submit the same command again to resume."
            )
    if refusal is not None:
        say(f"not requeued: {refusal}")
        return outcome.exit_code
    record_requeue(ended, folder)

    # Without its fields, nobody knows how many nodes the job needs.
    node = blamed_node(attempts)
    if fields and node is not None:
        why = "its last two attempts failed there"
        if ended.kind is FailureKind.NODE:
            why = "it lacks what the run needs"
        say(
            exclude(
                job_id,
                node,
                why=why,
                job=fields,
                script=options.script,
                fewest_nodes=options.fewest_nodes,
            )
        )
    return outcome.exit_code


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- how it ended -----------------------------------------------------------------------------


def classify(
    code: int,
    srun_errors: Sequence[str],
    run_folder: Path,
    *,
    attempt: str,
    fields: Mapping[str, str],
    signal_delay_s: int,
) -> Outcome:
    """Classify the end of an attempt by srun's exit code and errors, and by its ranks' records.

    attempt: `ATTEMPT_VARIABLE` of its ranks; fields: the controller's fields of the job.
    """
    # srun may end with 0 when SLURM has ended its tasks.
    if is_ended_by_slurm(fields):
        reason = "cancelled, requeued or preempted"
        return Outcome(ending=Ending.ENDED_BY_SLURM, reason=reason, exit_code=code)
    done = Outcome(ending=Ending.DONE, reason="done")
    if code == 0:
        return done

    task_ended = first_ended_task(srun_errors)
    if task_ended is None:
        # srun has not heard of the end of its tasks.
        if is_complete(run_folder):
            return done
        failure = failure_of_srun(code, srun_errors)
        return failure_outcome(failure, run_folder, attempt=attempt)

    nodes, ranks, first, how = task_ended.groups()
    if how not in STOPPED:
        log = log_of(run_folder, job_id=attempt.partition("/")[0], rank=int(first))
        failure = failure_of_task(nodes, ranks, int(first), how, log)
        return failure_outcome(failure, run_folder, attempt=attempt)

    # Ranks stop for a signal alone; SLURM knows why it came.
    reason = "stopped by a signal"
    if fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown"):
        reason += ": preempted"
    elif end_time(fields) - time.time() < signal_delay_s + EARLY_S:
        reason += ": the time limit is near"
    return Outcome(
        ending=Ending.STOPPED, reason=reason, exit_code=EXIT_STOPPED_RESUMABLE
    )


def first_ended_task(srun_errors: Sequence[str]) -> re.Match[str] | None:
    """Find srun's first line about the end of a task: that of the task that failed first."""
    for line in srun_errors:
        if task_ended := TASK_ENDED.match(NOT_LAUNCHED.sub(with_node, line)):
            return task_ended
    return None


def with_node(not_launched: re.Match[str]) -> str:
    """Rewrite srun's line about a task that was not launched: add the node, which it leaves out."""
    rank = int(not_launched[1])
    num_tasks = int(os.environ["SLURM_NTASKS"])
    num_nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    try:
        names = ask_slurm("scontrol", "show", "hostnames").split()
    except NoAnswerError:
        return not_launched[0]

    # SLURM fills one node after another, unless launch.sbatch.distribution says otherwise.
    position = rank * num_nodes // num_tasks
    if os.environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        position = rank % num_nodes
    return f"srun: error: {names[position]}: task {rank}: {not_launched[2]}"


def failure_of_task(nodes: str, ranks: str, first: int, how: str, log: Path) -> Failure:
    """Describe tasks that ended together, from srun's line: n[1-2], 0-1, 0, Killed.

    log: of the first of them.
    """
    who = f"ranks {ranks} on {nodes}"
    were = "were"
    if ranks.isdecimal():
        who = f"rank {ranks} on {nodes}"
        were = "was"

    if exited := EXITED.match(how):
        code = int(exited[1])
        failure = ended_with(who, code)
        # A rank that ran has recorded why it ended, so this one may never have started.
        if why := not_started(log, code):
            what = f"{who} could not start: {why}"
            failure = Failure(kind=FailureKind.OTHER, what=what)
    else:
        what = f"{who}: {how}"
        if name := SIGNALS.get(how.removesuffix(" (core dumped)")):
            what = f"{who} {were} ended by {name} ({how})"
        elif how == "Out Of Memory":
            what = f"{who} ran out of memory and {were} killed"
        failure = Failure(kind=FailureKind.KILLED, what=what)

    # Any other kind comes from an exit code of ours, whose rank has recorded the cause itself. Of
    # several nodes, srun does not say which was the first.
    is_explained = failure.kind not in (FailureKind.OTHER, FailureKind.KILLED)
    if is_explained or "[" in nodes or "," in nodes:
        return failure
    return replace(failure, rank=first, node=nodes)


def log_of(folder: Path, *, job_id: str, rank: int) -> Path:
    """The log of a task. folder: of the run; of a task of an array, the one beside its log."""
    name = f"{job_id}_{rank}_log.out"
    beside = folder.parent / name
    return beside if beside.exists() else folder / "slurm" / job_id / name


def not_started(log: Path, code: int) -> str | None:
    """Return why a task's command could not be executed (no Python, ...), or None."""
    for raw_line in reversed(last_lines(log)):
        line = raw_line.decode(errors="replace").strip()
        if SRUN_LINE.match(line):
            continue
        # Only the last line of the task itself counts.
        if not_executed := NOT_EXECUTED.match(line):
            return not_executed[1]
        if code in SHELL_CODES:
            return line
        break
    return None


def failure_of_srun(code: int, srun_errors: Sequence[str]) -> Failure:
    """Describe a failure of srun itself, when no task has failed."""
    failure = ended_with("srun", code)

    # A shell adds 128 to the number of the signal that ended a command.
    number = code - 128
    if number in set(signal.Signals):
        what = f"srun was ended by {signal.Signals(number).name}"
        failure = replace(failure, what=what)

    if errors := [line for line in srun_errors if line.startswith("srun: error: ")]:
        last = errors[-1].removeprefix("srun: error: ").strip()
        failure = replace(failure, what=f"{failure.what}: {last}")
    return failure


# ---- again or not -----------------------------------------------------------------------------


def restart_refusal(attempts: Sequence[Attempt], *, max_requeues: int) -> str | None:
    """Return the reason not to restart the job after its last attempt, or None."""
    last = attempts[-1]
    if last.kind in FINAL_TEXTS:
        return FINAL_TEXTS[last.kind]

    fruitless = fruitless_attempts(attempts)
    if len(fruitless) > MAX_FRUITLESS_RESTARTS:
        return crash_loop_text(fruitless)

    if last.restart >= max_requeues:
        return (
            f"launch.max_requeues={max_requeues} is reached. "
            "Submit the same command again to resume."
        )
    return None


def fruitless_attempts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the last job's consecutive failed attempts at its newest checkpoint.

    Attempts that a signal, SLURM or a storage outage ended neither count nor end the row; the list
    is empty if the last attempt is one of them.
    """
    last = attempts[-1]
    fruitless: list[Attempt] = []
    for attempt in reversed(attempts):
        # Another job, or an earlier checkpoint, ends the row.
        if attempt.job_id != last.job_id:
            break
        if attempt.checkpoint_step != last.checkpoint_step:
            break

        has_failed = attempt.ending is Ending.FAILED
        if has_failed and attempt.kind is not FailureKind.STORAGE:
            fruitless.append(attempt)
        elif not fruitless:
            # The last attempt itself has not failed, so no row leads up to it.
            break
    return fruitless[::-1]


def blamed_node(attempts: Sequence[Attempt]) -> str | None:
    """Return the node that the next attempt should not get, or None.

    It lacks what the others have, or both of the job's last two attempts failed there.
    """
    last = attempts[-1]
    if last.kind is FailureKind.NODE and last.failed_node is not None:
        return last.failed_node

    # One failure may have any cause; two in a row on the same node speak against the node.
    failed_on = [
        attempt.failed_node
        for attempt in attempts[-2:]
        if attempt.job_id == last.job_id and attempt.ending is Ending.FAILED
    ]
    if failed_on == [last.failed_node] * 2:
        return last.failed_node
    return None


def crash_loop_text(fruitless: Sequence[Attempt]) -> str:
    """Explain the reason of each attempt, and what to do."""
    lines = [f"{len(fruitless) - 1} restarts in a row brought no newer checkpoint:"]
    for attempt in fruitless:
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.ended))
        lines.append(
            f"  attempt {attempt.number}, ended {ended} at step {attempt.last_step}: "
            f"{attempt.reason}"
        )

    # Several nodes, or none that is known, point to another cause.
    node, *others = {attempt.failed_node for attempt in fruitless}
    if node and not others:
        lines.append(
            f"Each of them failed on {node}. To avoid it: launch.sbatch.exclude='{node}'"
        )
    lines.append("Submit the same command again when the cause is removed.")
    return "\n".join(lines)


def wait_for_storage(folder: Path, *, until: float) -> None:
    """Wait until the next checkpoint can be written, for STORAGE_WAIT_S at most.

    until: unix seconds; not longer.
    """
    until = min(until, time.time() + STORAGE_WAIT_S)
    is_announced = False
    while (refusal := storage_refusal(folder)) and time.time() < until:
        if not is_announced:
            say(f"{refusal}: waiting before the next start")
            is_announced = True
        time.sleep(STORAGE_POLL_S)


def storage_refusal(folder: Path) -> str | None:
    """Return why the next checkpoint cannot be written (no space, I/O error), or None."""
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        checkpoints = folder

    # Only a write shows whether a file system takes one.
    probe = checkpoints / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        probe.write_bytes(bytes(1 << 16))
        sizes = [
            sum(file.stat().st_size for file in step.iterdir())
            for step in checkpoints.glob("step-*")
        ]
        # The next checkpoint is as large as the others.
        needed = max(sizes, default=0)
        free = shutil.disk_usage(checkpoints).free
        if free >= needed:
            return None
        return (
            f"{checkpoints} has {format_size(free)} free, "
            f"and a checkpoint needs {format_size(needed)}"
        )
    except OSError as error:
        return f"{checkpoints} cannot be written ({error.strerror})"
    finally:
        with suppress(OSError):
            probe.unlink()


if __name__ == "__main__":
    main()
