"""Find out why an attempt ended, from srun's errors and what the ranks recorded.

Leaves out: what follows from it (`after`), and which report of ranks names the cause
(`vitscale.distributed.events`).
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.jobs.attempts import Ending, Outcome
from launch.jobs.queue import end_time, is_ended_by_slurm
from vitscale.config.errors import EXIT_CODES, EXIT_STOPPED_RESUMABLE, FailureKind
from vitscale.distributed.events import Failure, cause, read_failures, record_failure

# srun: error: n[1-2]: tasks 0-1: Exited with exit code 75
TASK_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? ([\d,-]+): (.+)")
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
OUT_OF_MEMORY = "Out Of Memory"
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
SIGNALS = {signal.strsignal(number): number for number in signal.Signals}
# A shell's code of a command that a signal ended is above it.
SIGNALLED = 128
KIND_OF_EXIT_CODE = {code: kind for kind, code in EXIT_CODES.items()}
ENDINGS = {
    FailureKind.BAD_INPUT: Ending.BAD_INPUT,
    FailureKind.DIVERGED: Ending.DIVERGED,
    FailureKind.KILLED: Ending.KILLED,
}
# A warning that comes this much earlier than `--signal` says is still that of the time limit.
EARLY_S = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """A line of srun about tasks that ended together."""

    nodes: str
    """As srun writes them: n1, or n[1-2]."""
    ranks: str
    """As srun writes them: 1, or 0-3,7."""
    what: str
    """As srun writes it: Killed, or Exited with exit code 1."""

    @property
    def exit_code(self) -> int | None:
        """None if a signal ended the tasks."""
        found = EXIT_CODE.search(self.what)
        return int(found[1]) if found else None

    @property
    def signal(self) -> signal.Signals | None:
        return SIGNALS.get(self.what.removesuffix(" (core dumped)"))

    @property
    def failure(self) -> Failure:
        """Tasks that ended by themselves are no culprits: they may have noticed another's end."""
        who = f"rank{'s' * (not self.ranks.isdecimal())} {self.ranks} on {self.nodes}"
        if self.exit_code is not None:
            kind = kind_of_exit_code(self.exit_code)
            return Failure(kind=kind, what=f"{who} ended with code {self.exit_code}")
        text = f"{who}: {self.what}"
        if self.what == OUT_OF_MEMORY:
            text = f"{who} ran out of memory and was killed"
        elif self.signal is not None:
            text = f"{who} was ended by {self.signal.name} ({self.what})"
        is_one = not set(self.nodes) & set("[,")
        return Failure(
            kind=FailureKind.KILLED,
            what=text,
            rank=int(re.split("[,-]", self.ranks)[0]) if is_one else None,
            node=self.nodes if is_one else None,
        )


def kind_of_exit_code(code: int) -> FailureKind:
    """The kind that a rank's exit code stands for."""
    return KIND_OF_EXIT_CODE.get(code, FailureKind.OTHER)


def classify(
    code: int,
    srun_errors: Sequence[str],
    run_folder: Path,
    *,
    attempt: str,
    fields: Mapping[str, str],
    signal_delay_s: int,
) -> Outcome:
    """How an attempt ended, by the code and errors of srun, and by what its ranks recorded.

    attempt: `ATTEMPT_VARIABLE` of its ranks; fields: the controller's fields of the job.
    """
    if code == 0:
        return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    if is_ended_by_slurm(fields):
        reason = f"SLURM ended the job ({fields['JobState']})"
        return Outcome(ending=Ending.ENDED_BY_SLURM, reason=reason, exit_code=code)
    # The first line is about the task that failed first.
    found = next(filter(None, map(TASK_ENDED.match, srun_errors)), None)
    if found is None:
        what = f"srun ended with code {code}"
        if code > SIGNALLED and code - SIGNALLED in set(signal.Signals):
            what = f"srun was ended by {signal.Signals(code - SIGNALLED).name}"
        errors = [line for line in srun_errors if line.startswith("srun: error:")]
        what += f": {errors[-1].removeprefix('srun: error:').strip()}" if errors else ""
        return failure_outcome(
            Failure(kind=kind_of_exit_code(code), what=what), run_folder, attempt=attempt
        )
    end = TaskEnd(nodes=found[1], ranks=found[2], what=found[3].strip())
    if end.exit_code == EXIT_STOPPED_RESUMABLE or end.signal in STOP_SIGNALS:
        reason = "stopped by a signal"
        if fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown"):
            reason += ": preempted"
        elif end_time(fields) - time.time() < signal_delay_s + EARLY_S:
            reason += ": the time limit is near"
        return Outcome(ending=Ending.STOPPED, reason=reason, exit_code=EXIT_STOPPED_RESUMABLE)
    return failure_outcome(end.failure, run_folder, attempt=attempt)


def failure_outcome(seen: Failure, run_folder: Path | str, *, attempt: str) -> Outcome:
    """The outcome of a failed attempt.

    seen: what srun, or the parent of the ranks, saw. It is recorded, and counts, if no rank
    reported the failure: a killed rank cannot, and one that has only lost its peer does not know
    the cause.
    """
    reports = read_failures(run_folder, attempt=attempt)

    def is_same(report: Failure) -> bool:
        is_rank = seen.rank is not None and report.rank == seen.rank
        return is_rank and report.kind is seen.kind is FailureKind.KILLED

    by_itself = any(seen.rank is not None and each.reported_by == seen.rank for each in reports)
    is_needed = not (by_itself or any(map(is_same, reports)))
    if is_needed if seen.kind is FailureKind.KILLED else not reports:
        record_failure(run_folder, replace(seen, attempt=attempt))
        reports.append(seen)
    found = cause(reports)
    assert found is not None
    # Of a killed rank, srun knows the signal; the other ranks only that it is gone.
    is_seen = found is seen or is_same(found)
    blamed = seen if is_seen else found
    return Outcome(
        ending=ENDINGS.get(found.kind, Ending.FAILED),
        reason=seen.what if is_seen else found.text,
        exit_code=found.kind.exit_code,
        kind=found.kind,
        failed_node=None if found.kind is FailureKind.PEER_LOST else blamed.node,
    )
