"""Decide what follows an attempt on SLURM: the job is done, starts again, or ends.

    python -m launch.jobs.after RUN_FOLDER --job 17 --code 1 ... < errors of srun

Owns: whether and when the job is requeued, and the limits of restarts.
Leaves out: why an attempt ended (`outcomes`), calling SLURM (`queue`), and the record (`attempts`).

The batch script runs it when srun has ended, on the first node and outside the container of the
tasks. It prints the exit code of the job; all that is for the log goes to standard error. While
ranks train, nothing of ours runs beside them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from launch.jobs.attempts import (
    FAILURES,
    Attempt,
    Ending,
    begin_attempt,
    end_attempt,
    read_attempts,
)
from launch.jobs.outcomes import STOP_SIGNALS, classify
from launch.jobs.queue import end_time, exclude, job_fields, requeue, restart_count
from vitscale.config.errors import FailureKind
from vitscale.distributed.retry import forgive_output

FINAL_TEXTS = {
    Ending.BAD_INPUT: "bad input: a restart would fail in the same way. Correct it and submit "
    "again.",
    Ending.DIVERGED: "the training diverged: a restart would end in the same way. Change the "
    "learning rate or the data, and submit again.",
}
# How long a job waits for a folder that cannot be written, and until when before its time limit.
STORAGE_WAIT_S, STORAGE_POLL_S, STORAGE_MARGIN_S = 1800.0, 10.0, 60.0


def main() -> None:
    for number in STOP_SIGNALS:
        # The ranks have got them too; their end is to be recorded here.
        signal.signal(number, signal.SIG_IGN)
    forgive_output()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--job", required=True, help="its id; ARRAY_TASK in an array")
    parser.add_argument("--code", type=int, required=True, help="of srun")
    parser.add_argument("--signal-delay", type=int, required=True, help="seconds")
    parser.add_argument("--max-requeues", type=int, required=True)
    parser.add_argument("--max-fruitless-restarts", type=int, required=True)
    options = parser.parse_args()
    print(after(options, sys.stdin.read().splitlines()))


def after(options: argparse.Namespace, srun_errors: Sequence[str]) -> int:
    """Record the end of the attempt, and requeue the job if that helps.

    Returns the exit code of the job.
    """
    folder, job_id, restart = options.run_folder, options.job, restart_count()
    fields = job_fields(job_id) if options.code else {}
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
        attempts.append(begin_attempt(folder, cluster="slurm", job_id=job_id, restart=restart))
    attempts[-1] = ended = end_attempt(attempts[-1], folder, outcome)
    if ended.ending is Ending.DONE:
        return 0
    if ended.ending is Ending.ENDED_BY_SLURM:
        say(f"SLURM is ending job {job_id}: not requeued from here")
        return outcome.exit_code
    say(f"attempt {ended.number} ended: {ended.reason}")
    why = restart_refusal(
        attempts,
        max_requeues=options.max_requeues,
        max_fruitless_restarts=options.max_fruitless_restarts,
    )
    if why is None:
        say(f"requeueing job {job_id} ({restart + 1} of {options.max_requeues})")
        if message := requeue(job_id):
            why = f"job {job_id} was not requeued: {message}"
    if why is not None:
        say(f"not requeued: {why}")
    elif fields and (node := blamed_node(attempts)):
        say(exclude(job_id, node, fields=fields))
    return outcome.exit_code


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def restart_refusal(
    attempts: Sequence[Attempt], *, max_requeues: int, max_fruitless_restarts: int
) -> str | None:
    """Why the job of the last attempt, which has ended, is not to start again; None: it is."""
    last = attempts[-1]
    if last.ending in FINAL_TEXTS:
        return FINAL_TEXTS[last.ending]
    row = fruitless_row(attempts)
    if row and len(row) > max_fruitless_restarts:
        return _crash_loop_text(row, max_fruitless_restarts)
    if last.restart >= max_requeues:
        return (
            f"launch.max_requeues={max_requeues} is reached. "
            "Submit the same command again to resume."
        )
    return None


def fruitless_row(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts of the last job that failed in a row at one checkpoint; none if it has not.

    Attempts that a signal, SLURM or a storage outage ended neither count nor end the row.
    """

    def counts(attempt: Attempt) -> bool:
        return attempt.ending in FAILURES and attempt.kind is not FailureKind.STORAGE

    last, row = attempts[-1], []
    for attempt in reversed(attempts):
        if (attempt.job_id, attempt.checkpoint_step) != (last.job_id, last.checkpoint_step):
            break
        row.append(attempt)
    return [attempt for attempt in reversed(row) if counts(attempt)] if counts(last) else []


def blamed_node(attempts: Sequence[Attempt]) -> str | None:
    """The node on which the last two attempts of the last job failed, both of them."""
    last, *before = attempts[:-3:-1]
    if before and last.ending in FAILURES and before[0].ending in FAILURES:
        if (before[0].job_id, before[0].failed_node) == (last.job_id, last.failed_node):
            return last.failed_node
    return None


def _crash_loop_text(row: Sequence[Attempt], max_fruitless_restarts: int) -> str:
    if not max_fruitless_restarts:
        return "launch.max_fruitless_restarts=0: a failure is final."
    lines = [f"{len(row) - 1} restarts in a row brought no newer checkpoint:"]
    for attempt in row:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.ended))
        lines.append(
            f"  attempt {attempt.number}, ended {at} at step {attempt.last_step}: {attempt.reason}"
        )
    lines.append(f"launch.max_fruitless_restarts={max_fruitless_restarts} is reached.")
    nodes = {attempt.failed_node for attempt in row}
    if len(nodes) == 1 and (node := nodes.pop()):
        lines.append(f"Each of them failed on {node}. To avoid it: launch.exclude='{node}'")
    lines.append("Submit the same command again when the cause is removed.")
    return "\n".join(lines)


def wait_for_storage(folder: Path, *, until: float) -> None:
    """Wait until a small file can be written into the folder, for STORAGE_WAIT_S at most.

    until: unix seconds; not longer.
    """
    until = min(until, time.time() + STORAGE_WAIT_S)
    path = folder / f".probe-{uuid.uuid4().hex[:8]}"
    is_said = False
    while True:
        try:
            path.write_bytes(bytes(1 << 16))
            path.unlink()
            return
        except OSError as error:
            path.unlink(missing_ok=True)
            if time.time() > until:
                return
            if not is_said:
                say(f"{folder} cannot be written ({error.strerror}): waiting before the next start")
                is_said = True
        time.sleep(STORAGE_POLL_S)


if __name__ == "__main__":
    main()
