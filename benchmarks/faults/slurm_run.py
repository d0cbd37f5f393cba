"""A training run on a real SLURM of two nodes on this machine, to be disturbed.

Owns: shards, submitting the run, what it does now, interrupting it, and the checks at its end.
Leaves out: which interruptions, and when (`slurm_storm`, `slurm_kills`).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.jobs.attempts import read_attempts, read_progress
from tests.integration.slurm.conftest import SlurmCluster
from tests.support.ranks.run_states import differences, read_state

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT_STEPS, GRACE_S, SIGNAL_DELAY_S, LIMIT_MIN = 25, 20, 30, 50
SETTINGS = (
    *("name=storm", "schedule.epochs=null", "schedule.warmup_steps=5", "data.global_batch=32"),
    *("engine.device=cpu", "engine.num_threads=1", "model.dropout=0.1", "optim.ema.decay=0.98"),
    *(f"checkpoint.every_steps={CHECKPOINT_STEPS}", "tracking.log_every_steps=1"),
    "evaluate=[{name: classification, every_steps: 500}]",
)
PARTITIONS = f"""
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 PriorityTier=1 GraceTime={GRACE_S} MaxTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF MaxTime=120 State=UP
"""
FINAL_STATES = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
PATIENCE_S = 600.0


class CheckFailed(Exception):
    """A property that must hold does not."""


@dataclass(kw_only=True)
class Interruption:
    """One interruption and what it cost."""

    kind: str
    steps_lost: int
    seconds_lost: float
    """From the interruption until the run is at its step again."""


@dataclass(kw_only=True)
class Storm:
    """The run and its interruptions."""

    cluster: SlurmCluster
    job_id: str
    run_folder: Path
    steps: int
    rng: random.Random
    interruptions: list[Interruption] = field(default_factory=list)

    def interrupt(self, kind: str, *, at_step: int) -> None:
        """Interrupt the run after `at_step`, and wait until it is further than before."""
        attempts = len(read_attempts(self.run_folder))
        if kind != "USR2 in the first second":
            self.wait(lambda: self.step() >= at_step, f"step {at_step}")
        before, start = self.step(), time.monotonic()
        if before >= self.steps - 3:
            raise CheckFailed(f"the run is at step {before}: --steps is too small")
        self.send(kind)
        start = start if kind != "time limit" else time.monotonic()
        self.wait(lambda: len(read_attempts(self.run_folder)) > attempts, f"a restart ({kind})")
        ended = read_attempts(self.run_folder)[attempts - 1]
        reached = max(before, ended.last_step or 0)
        self.wait(lambda: self.step() > reached, f"step {reached + 1} ({kind})")
        seconds = time.monotonic() - start
        self.check_no_orphans()
        if kind == "time limit":
            self.update_job(f"TimeLimit={LIMIT_MIN}")
            seconds = time.time() - (ended.ended or 0.0)
        self.interruptions.append(
            Interruption(kind=kind, steps_lost=ended.steps_lost, seconds_lost=seconds)
        )
        print(
            f"{len(self.interruptions)}: {kind} at step {before}: {ended.reason}; "
            f"{ended.steps_lost} steps, {seconds:.1f} s lost",
            flush=True,
        )

    def send(self, kind: str) -> None:
        if kind.startswith("preempted"):
            grace = 0 if "no grace" in kind else GRACE_S
            self.control("update", "PartitionName=low", f"GraceTime={grace}")
            command = ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1"]
            self.cluster.run([*command, "--output=/dev/null"])
        elif kind == "scontrol requeue":
            self.control("requeue", self.job_id)
        elif kind == "USR2":
            self.cluster.run(["scancel", "--signal=USR2", self.job_id])
        elif kind == "rank killed (SIGKILL)":
            os.kill(self.rng.choice(self.ranks()), signal.SIGKILL)
        elif kind == "USR2 in the first second":
            self.control("requeue", self.job_id)
            attempts = len(read_attempts(self.run_folder))
            self.wait(lambda: len(read_attempts(self.run_folder)) > attempts, "its next start")
            time.sleep(self.rng.random())
            self.cluster.run(["scancel", "--signal=USR2", self.job_id])
        else:
            hours, minutes, seconds = self.job()["RunTime"].split(":")
            ran_s = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
            limit = ran_s // 60 + 2
            self.update_job(f"TimeLimit={limit}")

    def ranks(self) -> list[int]:
        """Process ids of the running tasks."""
        folder = self.run_folder / "slurm" / self.job_id
        records = [json.loads(path.read_text()) for path in sorted(folder.glob("*_task.json"))]
        return [record["pid"] for record in records if record["exit_code"] is None]

    def has_ended(self) -> bool:
        return self.job()["JobState"] in FINAL_STATES

    def step(self) -> int:
        return read_progress(self.run_folder).last_step

    def job(self) -> dict[str, str]:
        return self.cluster.job(self.job_id)

    def control(self, *words: str) -> None:
        self.cluster.run(["scontrol", *words])

    def update_job(self, change: str) -> None:
        self.control("update", f"JobId={self.job_id}", change)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            state = self.job()["JobState"]
            if state in FINAL_STATES and not condition():
                hint = ": --steps is too small" if state == "COMPLETED" else ""
                raise CheckFailed(f"the job is {state} before {what}{hint}")
            if time.monotonic() > deadline:
                raise CheckFailed(f"no {what} within {PATIENCE_S:.0f} s; the job is {state}")
            time.sleep(0.2)

    def check_no_orphans(self) -> None:
        """No process of an earlier attempt may be left."""
        restarts = int(self.job()["Restarts"])
        if left := [pid for pid, restart in self.processes() if restart < restarts]:
            raise CheckFailed(f"processes of earlier attempts are left: {left}")

    def processes(self) -> list[tuple[int, int]]:
        """(process id, restart of the job that started it) of everything in the job."""
        found = []
        for process in psutil.process_iter():
            try:
                own = process.environ()
            except psutil.Error:
                continue
            if own.get("SLURM_CONF") == self.cluster.environment["SLURM_CONF"]:
                if own.get("SLURM_JOB_ID") == self.job_id and process.status() != "zombie":
                    found.append((process.pid, int(own.get("SLURM_RESTART_COUNT", "0"))))
        return found


def script(name: str, *arguments: object, work: Path, environment: dict[str, str]) -> str:
    """Run one of the project's scripts; its output."""
    command = [sys.executable, str(ROOT / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"{name} ended with code {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


def make_shards(work: Path) -> None:
    if (work / "shards").exists():
        return
    env = dict(os.environ)
    script("data_prep/make_corpus.py", "digits", "images", work=work, environment=env)
    script(
        "data_prep/make_shards.py", "--config", ROOT / "configs/data/digits.yaml",
        "source.path=images", "output=shards", work=work, environment=env,
    )  # fmt: skip


def training(work: Path, folder: Path, *, steps: int) -> list[str]:
    settings = ["--config", str(ROOT / "configs/digits/pretrain.yaml"), *SETTINGS]
    settings += [f"schedule.steps={steps}", f"data.path={work / 'shards'}", f"output={folder}"]
    return settings


def submit(cluster: SlurmCluster, work: Path, name: str, *, steps: int, seed: int) -> Storm:
    """Submit a run and wait for its first step."""
    output = script(
        "launch/slurm.py", *training(work, work / name, steps=steps),
        f"tracking.uri=sqlite:///{work}/{name}.db", "launch.partition=low", "launch.nodes=2",
        "launch.tasks_per_node=1", f"launch.timeout_min={LIMIT_MIN}",
        f"launch.signal_delay_s={SIGNAL_DELAY_S}", "launch.max_requeues=1000",
        "launch.doctor_seconds=0",
        work=work, environment=cluster.environment,
    )  # fmt: skip
    found = re.search(r"submitted job (\d+)", output)
    if found is None:
        raise CheckFailed(output)
    storm = Storm(
        cluster=cluster,
        job_id=found[1],
        run_folder=work / name,
        steps=steps,
        rng=random.Random(seed),
    )
    storm.wait(lambda: storm.step() > 0, "its first step")
    return storm


def check_end(storm: Storm, work: Path) -> None:
    """Wait until the job is done. Neither a process nor a second MLflow run may be there."""
    reached, since = storm.step(), time.monotonic()
    while not storm.has_ended():
        if storm.step() > reached:
            reached, since = storm.step(), time.monotonic()
        if time.monotonic() - since > PATIENCE_S:
            raise CheckFailed(f"no step after {reached} within {PATIENCE_S:.0f} s")
        time.sleep(1)
    if (state := storm.job()["JobState"]) != "COMPLETED":
        raise CheckFailed(f"the job is {state}")
    if left := storm.processes():
        raise CheckFailed(f"processes are left: {left}")
    with sqlite3.connect(work / f"{storm.run_folder.name}.db") as database:
        runs = database.execute("select run_uuid, status from runs").fetchall()
    if [status for _, status in runs] != ["FINISHED"]:
        raise CheckFailed(f"MLflow has these runs: {runs}")


def check_equal(disturbed: Path, undisturbed: Path) -> None:
    """Journal, weights, optimiser state, averages and counters, bit by bit."""
    if unequal := differences(read_state(disturbed), read_state(undisturbed)):
        raise CheckFailed("\n  ".join(["differs from the undisturbed run:", *unequal]))
