"""Kill something of a running SLURM job once a minute.

Owns: the victims in turn, the comparison with a run without kills, and what the record of attempts
says of each kill.
Leaves out: the run and the checks at its end (`slurm_run`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.slurm_run import (
    CHECKPOINT_STEPS,
    PARTITIONS,
    Storm,
    check_end,
    check_equal,
    submit,
)
from launch.jobs.attempts import Attempt, read_attempts
from tests.integration.slurm.conftest import NODES, slurm_cluster
from vitscale.tracking.journal import JOURNAL_NAME, decode

# To measure the speed; with a kill a minute, so much of the time is training.
MEASURED_STEPS, SHARE_OF_TRAINING = 400, 0.75
PERIOD_S = 60.0
# As systemd does.
DAEMON_DOWN_S = 10.0
VICTIMS = ("rank", "loader worker", "node daemon", "supervisor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One SIGKILL. Times are unix seconds."""

    victim: str
    time: float
    step: int


def kills_only(work: Path, *, minutes: int, seed: int) -> str:
    """Kill something of a run once a minute. Returns the table; work gets it, too, and a log."""

    def say(text: str) -> None:
        print(text, flush=True)
        with open(work / "storm.log", "a") as file:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=file)

    def train(name: str, steps: int, minutes: int = 0) -> tuple[Storm, list[Kill], float]:
        start = time.monotonic()
        storm = submit(cluster, work, name, steps=steps, seed=seed)
        kills = kill_by_the_minute(storm, minutes=minutes, say=say)
        check_end(storm, work)
        took_s = time.monotonic() - start
        say(f"{name}: {steps} steps with {len(kills)} kills in {took_s:.0f} s")
        return storm, kills, took_s

    with slurm_cluster(more=PARTITIONS) as cluster:
        speed = steps_per_s(train("measured", MEASURED_STEPS)[0])
        steps = round(SHARE_OF_TRAINING * speed * 60 * minutes)
        calm, _, calm_s = train("undisturbed", steps)
        storm, kills, took_s = train("disturbed", steps, minutes)
    check_equal(storm.run_folder, calm.run_folder)
    attempts = read_attempts(storm.run_folder)
    table = (
        f"{kill_table(storm, kills)}\n\n{len(kills)} kills, {len(attempts)} attempts of one job, "
        f"{steps} steps, a checkpoint every {CHECKPOINT_STEPS}: {took_s:.0f} s, "
        f"{took_s / calm_s:.2f} of the {calm_s:.0f} s without kills. One MLflow run, no process "
        "left; journal and final checkpoint equal the undisturbed run's bit by bit."
    )
    (work / "table.md").write_text(table + "\n")
    return table


def steps_per_s(storm: Storm) -> float:
    """Steps per second in the second half of the journal of a run without restarts."""
    lines = (storm.run_folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    times = [row.time for row in map(decode, lines) if row is not None]
    half = times[len(times) // 2 :]
    return (len(half) - 1) / (half[-1] - half[0])


def kill_by_the_minute(storm: Storm, *, minutes: int, say: Callable[[str], None]) -> list[Kill]:
    """Kill a victim of the next kind every minute, until the job has ended or for `minutes`."""
    kills: list[Kill] = []
    start = time.monotonic()
    while len(kills) < minutes:
        due = start + (len(kills) + 1) * PERIOD_S
        victim = VICTIMS[len(kills) % len(VICTIMS)]
        # A victim that is just being restarted is waited for.
        while time.monotonic() < due or not (found := _processes(storm, victim)):
            if storm.has_ended():
                return kills
            time.sleep(0.5)
        name, process = found
        kill = Kill(victim=victim, time=time.time(), step=storm.step())
        with suppress(psutil.NoSuchProcess):
            process.kill()
            kills.append(kill)
            say(f"minute {len(kills)}: {name} killed at step {kill.step}")
            if victim == "node daemon":
                storm.cluster.slurmds[name].wait()
                time.sleep(DAEMON_DOWN_S)
                storm.cluster.start_node(name)
    return kills


def _processes(storm: Storm, victim: str) -> tuple[str, psutil.Process] | None:
    """A process of this kind that runs, and its name; None without one."""
    rng = storm.rng
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        if victim == "node daemon":
            node = rng.choice(NODES)
            return node, psutil.Process(storm.cluster.slurmds[node].pid)
        if victim == "supervisor":
            newest = int(storm.job()["Restarts"])
            pids = [pid for pid, restart in storm.processes() if restart == newest]
            processes = [psutil.Process(pid) for pid in pids]
            own = [each for each in processes if "launch.jobs.supervision" in each.cmdline()]
            found = dict(zip(["supervisor"], own, strict=False))
        else:
            for number, pid in enumerate(storm.ranks()):
                rank = psutil.Process(pid)
                # Its children are servers of workers.
                workers = [each for server in rank.children() for each in server.children()]
                # A rank without a worker is still starting.
                if workers:
                    is_rank = victim == "rank"
                    found[f"{victim} {number}"] = rank if is_rank else rng.choice(workers)
        if found:
            return rng.choice(sorted(found.items(), key=lambda item: item[0]))
    return None


def kill_table(storm: Storm, kills: list[Kill]) -> str:
    """What followed the kills of each kind, a Markdown table."""
    attempts = read_attempts(storm.run_folder)
    lines = [
        "| Killed | kills | attempts ended by it | recorded causes | steps lost: most | seconds to "
        "the next attempt: most |",
        "|---|---|---|---|---|---|",
    ]
    ends = [*(kill.time for kill in kills[1:]), float("inf")]
    for victim in VICTIMS:
        spans = [(k.time, end) for k, end in zip(kills, ends, strict=True) if k.victim == victim]
        ended = [
            (attempt, after)
            for attempt, after in zip(attempts, attempts[1:], strict=False)
            if any(start <= (attempt.ended or 0.0) < end for start, end in spans)
        ]
        causes = Counter(str(attempt.kind or attempt.ending) for attempt, _ in ended)
        lines.append(
            f"| {victim} | {len(spans)} | {len(ended)} | "
            + (", ".join(f"{cause} {number}" for cause, number in causes.items()) or "none")
            + f" | {max((a.steps_lost for a, _ in ended), default=0)} | "
            + f"{max((_pause(a, after) for a, after in ended), default=0.0):.0f} |"
        )
    return "\n".join(lines)


def _pause(attempt: Attempt, after: Attempt) -> float:
    return after.started - (attempt.ended or after.started)
