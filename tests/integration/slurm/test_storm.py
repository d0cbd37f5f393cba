"""A run that a real SLURM interrupts in every way, many times, ends with the bits of an undisturbed
one, as one MLflow run, and leaves no process.

    pytest tests/integration/slurm/test_storm.py --storm-kills 200 --storm-seed 1

There is one interruption for four of --storm-kills.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.slurm.conftest import (
    NODES,
    ROOT,
    SlurmCluster,
    missing_daemons,
    slurm_cluster,
)
from tests.support.ranks.run_states import differences, read_state
from tests.support.required import skip_or_fail
from tests.support.waiting import wait_until

CHECKPOINT_STEPS, GRACE_S, STEPS_BETWEEN = 25, 20, 60
SETTINGS = (
    *("name=storm", "schedule.epochs=null", "schedule.warmup_steps=5", "data.global_batch=32"),
    *("engine.device=cpu", "engine.num_threads=1", "model.dropout=0.1", "optim.ema.decay=0.98"),
    *(f"checkpoint.every_steps={CHECKPOINT_STEPS}", "tracking.log_every_steps=1"),
    "evaluate=[{name: classification, every_steps: 500}]",
)
LAUNCH = (
    *("launch.partition=low", "launch.nodes=2", "launch.tasks_per_node=1", "launch.timeout_min=50"),
    *("launch.signal_delay_s=30", "launch.max_requeues=1000"),
)
PARTITIONS = f"""
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 PriorityTier=1 GraceTime={GRACE_S} MaxTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF MaxTime=120 State=UP
"""
KINDS = (
    *("preempted, grace time", "preempted, no grace time", "scontrol requeue", "USR2"),
    *("a rank or worker killed", "USR2 in the first seconds", "node daemon killed"),
)


@dataclass(kw_only=True)
class Storm:
    """The run and its interruptions."""

    cluster: SlurmCluster
    job_id: str
    run_folder: Path
    rng: random.Random

    def interrupt(self, kind: str, *, at_step: int) -> None:
        """Interrupt the run after `at_step`, and wait until it is further than before."""
        self.wait(lambda: self.step() >= at_step, f"step {at_step}")
        before, restarts = self.step(), self.restarts()
        if kind.startswith("preempted"):
            grace = 0 if "no grace" in kind else GRACE_S
            self.run("scontrol", "update", "PartitionName=low", f"GraceTime={grace}")
            job = ("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
            self.run("sbatch", *job, "--output=/dev/null")
        elif kind == "USR2":
            self.run("scancel", "--signal=USR2", self.job_id)
        elif kind == "a rank or worker killed":
            os.kill(self.rng.choice(self.processes(of_step=True)), signal.SIGKILL)
        elif kind == "node daemon killed":
            node = self.rng.choice(NODES)
            self.cluster.slurmds[node].kill()
            self.cluster.slurmds[node].wait()
            self.cluster.start_node(node)
            restarts -= 1  # the job may go on
        else:
            self.run("scontrol", "requeue", self.job_id)
        if kind == "USR2 in the first seconds":
            self.wait(lambda: self.restarts() > restarts and self.is_running(), "its next start")
            restarts += 1
            # Before the batch script runs, SLURM itself drops the signal.
            again = f"scancel --signal=USR2 {self.job_id} || true"
            self.wait(lambda: self.run("bash", "-c", again) or self.restarts() > restarts, kind)
        self.wait(lambda: self.restarts() > restarts, f"a restart ({kind})")
        self.wait(lambda: self.step() > before, f"step {before + 1} ({kind})")
        print(f"{kind} at step {before}", flush=True)

    def step(self) -> int:
        journal = self.run_folder / "journal.jsonl"
        lines = journal.read_text().splitlines()[:-1] if journal.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def restarts(self) -> int:
        return int(self.cluster.job(self.job_id)["Restarts"])

    def is_running(self) -> bool:
        return self.cluster.job(self.job_id)["JobState"] == "RUNNING"

    def run(self, *words: str) -> None:
        self.cluster.run(words)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def happens() -> bool:
            state = self.cluster.job(self.job_id)["JobState"]
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"), (state, what)
            return condition()

        wait_until(happens, else_say=lambda: f"no {what}\n{self.cluster.logs()}", every_s=0.2)

    def processes(self, *, of_step: bool = False) -> list[int]:
        """Process ids of everything in the job; of_step: of what srun started."""
        found = []
        for process in psutil.process_iter():
            try:
                own, status = process.environ(), process.status()
            except psutil.Error:
                continue
            is_own = own.get("SLURM_CONF") == self.cluster.environment["SLURM_CONF"]
            # The batch script has a number above all others.
            in_step = int(own.get("SLURM_STEP_ID", 1 << 32)) < 1 << 31
            if is_own and own.get("SLURM_JOB_ID") == self.job_id and status != "zombie":
                if in_step or not of_step:
                    found.append(process.pid)
        return found


@pytest.mark.slurm
@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_interruptions_change_no_bit(
    digits_shards: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if missing := missing_daemons():
        skip_or_fail(f"no {', '.join(missing)} here")
    number = max(1, pytestconfig.getoption("--storm-kills") // 4)
    rng = random.Random(pytestconfig.getoption("--storm-seed"))
    kinds = [KINDS[each % len(KINDS)] for each in range(number)]
    rng.shuffle(kinds)
    steps = STEPS_BETWEEN * (number + 2)
    training = ["--config", ROOT / "configs/digits/pretrain.yaml", *SETTINGS]
    training += [f"schedule.steps={steps}", f"data.path={digits_shards}"]
    calm, run, database = (tmp_path / name for name in ("calm", "disturbed", "mlflow.db"))
    here = [ROOT / "launch/local.py", "--num-procs", 2, *training, f"output={calm}"]
    here += ["tracking.uri=null"]
    subprocess.run([sys.executable, *map(str, here)], cwd=tmp_path, check=True)
    with slurm_cluster(more=PARTITIONS) as cluster:
        there = ["launch/slurm.py", *training, *LAUNCH, f"output={run}"]
        there += [f"tracking.uri=sqlite:///{database}"]
        output = cluster.script(*there, cwd=tmp_path)
        found = re.search(r"submitted job (\d+)", output)
        assert found, output
        storm = Storm(cluster=cluster, job_id=found[1], run_folder=run, rng=rng)
        for place, kind in enumerate(kinds):
            storm.interrupt(kind, at_step=round(STEPS_BETWEEN * (place + rng.random())) + 1)
        ended = cluster.wait(found[1], states=["COMPLETED", "FAILED", "CANCELLED"])
        assert ended["JobState"] == "COMPLETED"
        assert not storm.processes()
    assert differences(read_state(run), read_state(calm)) == []
    with sqlite3.connect(database) as connection:
        assert connection.execute("select status from runs").fetchall() == [("FINISHED",)]
