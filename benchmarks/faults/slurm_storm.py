"""Interrupt one run on a real SLURM many times and compare it with an undisturbed run.

    python benchmarks/faults/slurm_storm.py --interruptions 50 --steps 3000

Starts a SLURM of two nodes on this machine and submits one training run. It is preempted with and
without grace time, requeued, paused, stopped at its time limit and in its first second, and its
ranks are killed. At the end the journal and the checkpoint must equal those of an undisturbed run
bit by bit, MLflow must have one run, and no process may be left. Prints a Markdown table.

Leaves out: kills at chosen instructions (`kill_storm`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

try:
    import psutil

    from launch.jobs.attempts import Attempt, Ending, read_attempts, read_progress
    from tests.integration.slurm.conftest import SlurmCluster, slurm_cluster
    from tests.support.ranks.run_states import differences, read_state
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

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
KINDS = (
    "preempted, grace time",
    "preempted, no grace time",
    "scontrol requeue",
    "USR2",
    "rank killed (SIGKILL)",
    "USR2 in the first second",
    "time limit",
)
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
        records = [json.loads(path.read_text()) for path in folder.glob("*_task.json")]
        return [record["pid"] for record in records if record["exit_code"] is None]

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


def main() -> None:
    options = parse_arguments()
    work = Path(options.work or tempfile.mkdtemp(prefix="slurm-storm-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        make_shards(work)
        reference = work / "undisturbed"
        if not reference.exists():
            train_undisturbed(work, reference, steps=options.steps)
        with slurm_cluster(more=PARTITIONS) as cluster:
            storm = run_storm(cluster, work, options)
        check_equal(storm.run_folder, reference)
    except CheckFailed as error:
        print(f"FAILED (--seed {options.seed}): {error}\nkept: {work}", file=sys.stderr)
        raise SystemExit(1) from None
    print(summary(storm, minutes=(time.monotonic() - start) / 60))
    if not options.work:
        shutil.rmtree(work)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--interruptions", type=int, default=50)
    parser.add_argument("--steps", type=int, default=3000, help="steps of the run (3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help="folder for the runs, kept; default: temporary")
    options = parser.parse_args()
    if options.interruptions < 1 or options.steps < 20 * options.interruptions:
        raise UserError(
            f"--interruptions {options.interruptions} --steps {options.steps}",
            allowed="at least 1 interruption, and 20 steps for each",
        )
    return options


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


def train_undisturbed(work: Path, folder: Path, *, steps: int) -> None:
    start = time.monotonic()
    script(
        "launch/local.py", "--num-procs", 2, *training(work, folder, steps=steps),
        "tracking.uri=null", work=work, environment=dict(os.environ),
    )  # fmt: skip
    print(f"undisturbed: {steps} steps in {time.monotonic() - start:.0f} s", flush=True)


def run_storm(cluster: SlurmCluster, work: Path, options: argparse.Namespace) -> Storm:
    """Submit the run, interrupt it, and wait for its end."""
    folder = work / "disturbed"
    output = script(
        "launch/slurm.py", *training(work, folder, steps=options.steps),
        f"tracking.uri=sqlite:///{work}/mlflow.db", "launch.partition=low", "launch.nodes=2",
        "launch.tasks_per_node=1", f"launch.timeout_min={LIMIT_MIN}",
        f"launch.signal_delay_s={SIGNAL_DELAY_S}", "launch.max_requeues=1000",
        "launch.doctor_seconds=0",
        work=work, environment=cluster.environment,
    )  # fmt: skip
    found = re.search(r"submitted job (\d+)", output)
    if found is None:
        raise CheckFailed(output)
    rng = random.Random(options.seed)
    storm = Storm(cluster=cluster, job_id=found[1], run_folder=folder, steps=options.steps, rng=rng)
    storm.wait(lambda: storm.step() > 0, "its first step")
    kinds = shuffled_kinds(options.interruptions, rng)
    spacing = options.steps / (options.interruptions + 1)
    for number, kind in enumerate(kinds):
        storm.interrupt(kind, at_step=round(spacing * (number + rng.random())))
    ended = cluster.wait(storm.job_id, states=FINAL_STATES)
    if ended["JobState"] != "COMPLETED":
        raise CheckFailed(f"the job is {ended['JobState']}")
    if left := storm.processes():
        raise CheckFailed(f"processes are left: {left}")
    with sqlite3.connect(work / "mlflow.db") as database:
        runs = database.execute("select run_uuid, status from runs").fetchall()
    if [status for _, status in runs] != ["FINISHED"]:
        raise CheckFailed(f"MLflow has these runs: {runs}")
    return storm


def shuffled_kinds(number: int, rng: random.Random) -> list[str]:
    """Every kind equally often. Time limits, which take up to two minutes, are not near the end of
    the run, which could end before them."""
    kinds = [KINDS[each % len(KINDS)] for each in range(number)]
    others = [kind for kind in kinds if kind != "time limit"]
    rng.shuffle(others)
    for _ in range(kinds.count("time limit")):
        others.insert(rng.randrange(1 + len(others) * 3 // 4), "time limit")
    return others


def check_equal(disturbed: Path, undisturbed: Path) -> None:
    """Journal, weights, optimiser state, averages and counters, bit by bit."""
    if unequal := differences(read_state(disturbed), read_state(undisturbed)):
        raise CheckFailed("\n  ".join(["differs from the undisturbed run:", *unequal]))


def summary(storm: Storm, *, minutes: float) -> str:
    lines = [
        "| Interruption | number | steps lost: mean, most | seconds lost: median, most |",
        "|---|---|---|---|",
    ]
    rows = {kind: [i for i in storm.interruptions if i.kind == kind] for kind in KINDS}
    for kind, found in [*rows.items(), ("all", storm.interruptions)]:
        if found:
            steps = [each.steps_lost for each in found]
            seconds = [each.seconds_lost for each in found]
            lines.append(
                f"| {kind} | {len(found)} | {statistics.mean(steps):.1f}, {max(steps)} | "
                f"{statistics.median(seconds):.1f}, {max(seconds):.1f} |"
            )
    attempts = read_attempts(storm.run_folder)
    lines.append("")
    lines.append(
        f"{len(attempts)} attempts of one job, {storm.steps} steps, a checkpoint every "
        f"{CHECKPOINT_STEPS}; {minutes:.0f} min. One MLflow run, no process left; journal and "
        f"final checkpoint equal the undisturbed run's bit by bit. Endings: {endings(attempts)}."
    )
    return "\n".join(lines)


def endings(attempts: list[Attempt]) -> str:
    counts = {ending: sum(a.ending is ending for a in attempts) for ending in Ending}
    return ", ".join(f"{ending} {number}" for ending, number in counts.items() if number)


if __name__ == "__main__":
    run_script(main)
