"""Decide what follows an attempt on SLURM: the job is done, starts again, or ends.

    python -m launch.jobs.after RUN_FOLDER --job 17 --code 1 ... < errors of srun

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
from itertools import takewhile
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
# In the log of a task whose command could not be executed; its exit code is errno: 2, as bad input.
NOT_EXECUTED = re.compile(r"slurmstepd\S*: error: execve\(\): (.+)")
# Of a shell whose command is not there, or not executable.
SHELL_CODES = (126, 127)
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
# How long a job waits for a folder that cannot be written, and until when before its time limit.
STORAGE_WAIT_S, STORAGE_POLL_S, STORAGE_MARGIN_S = 1800.0, 10.0, 60.0


def main() -> None:
    for number in (signal.SIGUSR2, signal.SIGTERM):
        # The ranks have got them too; their end is to be recorded here.
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
    print(after(options, sys.stdin.read().splitlines()))


def after(options: argparse.Namespace, srun_errors: Sequence[str]) -> int:
    """Record the end of the attempt, and requeue the job if that helps.

    Returns the exit code of the job.
    """
    folder, job_id, restart = options.run_folder, options.job, restart_count()
    # The record of an array's task has a folder only from its start on.
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
    if outcome.kind is FailureKind.STORAGE:
        wait_for_storage(folder, until=end_time(fields) - STORAGE_MARGIN_S)
    attempts = read_attempts(folder)
    if not attempts or (attempts[-1].job_id, attempts[-1].restart) != (job_id, restart):
        # No rank 0 has started, or storage did not take its record.
        attempts.append(
            begin_attempt(folder, cluster="slurm", job_id=job_id, restart=restart)
        )
    attempts[-1] = ended = end_attempt(attempts[-1], folder, outcome)
    if ended.ending is Ending.DONE:
        return 0
    if ended.ending is Ending.ENDED_BY_SLURM:
        say(f"SLURM is ending job {job_id}: not requeued from here")
        return outcome.exit_code
    say(f"attempt {ended.number} ended: {ended.reason}")
    why = restart_refusal(attempts, max_requeues=options.max_requeues)
    if why is None:
        say(f"requeueing job {job_id} ({restart + 1} of {options.max_requeues})")
        if message := requeue(job_id):
            why = f"job {job_id}: {message}. Submit the same command again to resume."
        else:
            record_requeue(ended, folder)
    if why is not None:
        say(f"not requeued: {why}")
    elif fields and (node := blamed_node(attempts)):
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
    if is_ended_by_slurm(fields):  # srun may then end with 0
        reason = "cancelled, requeued or preempted"
        return Outcome(ending=Ending.ENDED_BY_SLURM, reason=reason, exit_code=code)
    if code == 0:
        return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    # The first line is about the task that failed first.
    lines = (NOT_LAUNCHED.sub(with_node, line) for line in srun_errors)
    found = next(filter(None, map(TASK_ENDED.match, lines)), None)
    if found is None:
        # srun has not heard of the end of its tasks.
        if is_complete(run_folder):
            return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
        return failure_outcome(
            failure_of_srun(code, srun_errors), run_folder, attempt=attempt
        )
    nodes, ranks, first, what = found.groups()
    if what not in STOPPED:
        log = log_of(run_folder, job_id=attempt.partition("/")[0], rank=int(first))
        failure = failure_of_task(nodes, ranks, int(first), what, log)
        return failure_outcome(failure, run_folder, attempt=attempt)
    reason = "stopped by a signal"
    if fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown"):
        reason += ": preempted"
    elif end_time(fields) - time.time() < signal_delay_s + EARLY_S:
        reason += ": the time limit is near"
    return Outcome(
        ending=Ending.STOPPED, reason=reason, exit_code=EXIT_STOPPED_RESUMABLE
    )


def with_node(not_launched: re.Match[str]) -> str:
    """Rewrite srun's line about a task that was not launched: add the node, which it leaves out."""
    rank, why = not_launched.groups()
    tasks, nodes = (
        int(os.environ[name]) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")
    )
    try:
        names = ask_slurm("scontrol", "show", "hostnames").split()
    except NoAnswerError:
        return not_launched[0]
    # Of launch.sbatch.distribution; SLURM's default fills one node after another.
    is_cyclic = os.environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic")
    node = names[int(rank) % nodes if is_cyclic else int(rank) * nodes // tasks]
    return f"srun: error: {node}: task {rank}: {why}"


def failure_of_task(
    nodes: str, ranks: str, first: int, what: str, log: Path
) -> Failure:
    """Describe tasks that ended together, from srun's line: n[1-2], 0-1, 0, Killed.

    log: of the first of them.
    """
    word, were = ("rank", "was") if ranks.isdecimal() else ("ranks", "were")
    who = f"{word} {ranks} on {nodes}"
    if exited := EXITED.match(what):
        code = int(exited[1])
        # A rank that ran has recorded why it ended, so this one did not come so far.
        failure = ended_with(who, code)
        if why := not_started(log, code):
            failure = Failure(
                kind=FailureKind.OTHER, what=f"{who} could not start: {why}"
            )
    else:
        name = SIGNALS.get(what.removesuffix(" (core dumped)"))
        text = f"{who} {were} ended by {name} ({what})" if name else f"{who}: {what}"
        if what == "Out Of Memory":
            text = f"{who} ran out of memory and {were} killed"
        failure = Failure(kind=FailureKind.KILLED, what=text)
    is_of_ranks = failure.kind not in (FailureKind.OTHER, FailureKind.KILLED)
    if is_of_ranks or set(nodes) & set("[,"):
        return failure
    return replace(failure, rank=first, node=nodes)


def log_of(folder: Path, *, job_id: str, rank: int) -> Path:
    """The log of a task. folder: of the run; of a task of an array, the one beside its log."""
    name = f"{job_id}_{rank}_log.out"
    beside = folder.parent / name
    return beside if beside.exists() else folder / "slurm" / job_id / name


def not_started(log: Path, code: int) -> str | None:
    """Return why a task's command could not be executed (no Python, ...), or None."""
    lines = (
        line.decode(errors="replace").strip() for line in reversed(last_lines(log))
    )
    # srun's lines follow in the log of rank 0.
    own = (
        line
        for line in lines
        if not re.match(r"srun: |slurmstepd\S*: error: \*\*\*", line)
    )
    last = next(own, "")
    if found := NOT_EXECUTED.match(last):
        return found[1]
    return last if code in SHELL_CODES else None


def failure_of_srun(code: int, srun_errors: Sequence[str]) -> Failure:
    """Describe a failure of srun itself, when no task has failed."""
    failure = ended_with("srun", code)
    # A shell's code of a command that a signal ended.
    if code - 128 in set(signal.Signals):
        failure = replace(
            failure, what=f"srun was ended by {signal.Signals(code - 128).name}"
        )
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
    row = fruitless_row(attempts)
    if len(row) > MAX_FRUITLESS_RESTARTS:
        return crash_loop_text(row)
    if last.restart >= max_requeues:
        return (
            f"launch.max_requeues={max_requeues} is reached. "
            "Submit the same command again to resume."
        )
    return None


def fruitless_row(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the last job's consecutive failed attempts at its newest checkpoint.

    Attempts that a signal, SLURM or a storage outage ended neither count nor end the row.
    """

    def counts(attempt: Attempt) -> bool:
        return (
            attempt.ending is Ending.FAILED and attempt.kind is not FailureKind.STORAGE
        )

    last = attempts[-1]
    place = (last.job_id, last.checkpoint_step)
    at_place = takewhile(
        lambda each: (each.job_id, each.checkpoint_step) == place, attempts[::-1]
    )
    return [each for each in at_place if counts(each)][::-1] if counts(last) else []


def blamed_node(attempts: Sequence[Attempt]) -> str | None:
    """Return the node that the next attempt should not get, or None.

    It lacks what the others have, or both of the job's last two attempts failed there.
    """
    last = attempts[-1]
    if last.kind is FailureKind.NODE and last.failed_node is not None:
        return last.failed_node
    places = {(each.job_id, each.ending, each.failed_node) for each in attempts[-2:]}
    (_, ending, node), *others = places
    return (
        node if len(attempts) > 1 and not others and ending is Ending.FAILED else None
    )


def crash_loop_text(row: Sequence[Attempt]) -> str:
    """The reason of each attempt, and what to do."""
    lines = [f"{len(row) - 1} restarts in a row brought no newer checkpoint:"]
    for attempt in row:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.ended))
        lines.append(
            f"  attempt {attempt.number}, ended {at} at step {attempt.last_step}: {attempt.reason}"
        )
    nodes = {attempt.failed_node for attempt in row}
    if len(nodes) == 1 and (node := nodes.pop()):
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
    is_said = False
    while (refusal := storage_refusal(folder)) and time.time() < until:
        if not is_said:
            say(f"{refusal}: waiting before the next start")
            is_said = True
        time.sleep(STORAGE_POLL_S)


def storage_refusal(folder: Path) -> str | None:
    """Return why the next checkpoint cannot be written (no space, I/O error), or None."""
    place = folder / "checkpoints"
    if not place.is_dir():
        place = folder
    path = place / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        path.write_bytes(bytes(1 << 16))
        sizes = [
            sum(f.stat().st_size for f in step.iterdir())
            for step in place.glob("step-*")
        ]
        free = shutil.disk_usage(place).free
        needed = max(sizes, default=0)
        if free >= needed:
            return None
        return (
            f"{place} has {format_size(free)} free, "
            f"and a checkpoint needs {format_size(needed)}"
        )
    except OSError as error:
        return f"{place} cannot be written ({error.strerror})"
    finally:
        with suppress(OSError):
            path.unlink()


if __name__ == "__main__":
    main()
