"""A run that a real SLURM interrupts in every way, many times, ends with the bits of an undisturbed
one, as one MLflow run, and leaves no process.

    pytest -s tests/scripts/slurm/test_storm.py --storm-kills 200 --storm-seed 1

There is one interruption for four of --storm-kills. Prints a table: for each fault how often, and
the seconds until the first new step of the next attempt.
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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.conftest import mounted
from tests.scripts.slurm.conftest import NODES, SlurmCluster, slurm_cluster
from tests.support.ranks.run_states import differences, read_state
from tests.support.waiting import PATIENCE_S, ROOT, wait_until

CHECKPOINT_STEPS, GRACE_S, STEPS_OF_A_FAULT, OUTAGE_S = 25, 20, 120, 120
SETTINGS = (
    *(
        "name=storm",
        "schedule.epochs=null",
        "schedule.warmup_steps=5",
        "data.global_batch=32",
    ),
    *(
        "engine.device=cpu",
        "engine.num_threads=1",
        "engine.timeout_min=1",
        "model.dropout=0.1",
    ),
    *("optim.ema.decay=0.98", f"checkpoint.every_steps={CHECKPOINT_STEPS}"),
    "tracking.log_every_steps=1",
    "evaluate=[{name: classification, every_steps: 500}]",
)
LAUNCH = (
    *(
        "launch.partition=low",
        "launch.nodes=2",
        "launch.tasks_per_node=1",
        "launch.timeout_min=50",
    ),
    *("launch.signal_delay_s=55", "launch.max_requeues=1000"),
)
PARTITIONS = f"""
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 PriorityTier=1 GraceTime={GRACE_S} MaxTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF MaxTime=120 State=UP
"""
# Of cgroups, version 1; root alone may add some.
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(kw_only=True)
class Storm:
    """The run and what happens to it."""

    cluster: SlurmCluster
    run_folder: Path
    command: list[object]
    rng: random.Random
    job_id: str = ""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By fault: from its beginning to the first new step."""

    # ---- faults: each raises the number of restarts, if it does not say otherwise ---------------

    def preempted_with_grace(self) -> None:
        self.preempt(grace_s=GRACE_S)

    def preempted_without_grace(self) -> None:
        self.preempt(grace_s=0)

    def scontrol_requeue(self) -> None:
        self.run("scontrol", "requeue", self.job_id)

    def usr2(self) -> None:
        self.run("scancel", "--signal=USR2", self.job_id)

    def usr2_twice_within_seconds(self) -> None:
        restarts = self.restarts()
        self.scontrol_requeue()
        self.wait(
            lambda: self.restarts() > restarts and self.is_running(), "its next start"
        )
        # Before the batch script runs, SLURM itself drops the signal.
        again = f"scancel --signal=USR2 {self.job_id} || true"
        self.wait(
            lambda: self.run("bash", "-c", again) or self.restarts() > restarts + 1,
            "end",
        )

    def time_limit(self) -> None:
        minutes = 1 + int(time.time() - self.started()) // 60
        self.run("scontrol", "update", f"JobId={self.job_id}", f"TimeLimit={minutes}")
        restarts = self.restarts()
        self.wait(lambda: self.restarts() > restarts, "end at the time limit")
        self.run("scontrol", "update", f"JobId={self.job_id}", "TimeLimit=50")

    def rank_out_of_memory(self) -> None:
        """By the kernel, at the limit of a group: what SLURM does where it limits memory."""
        rank = psutil.Process(self.rng.choice(self.ranks()))
        group = MEMORY_GROUPS / f"storm-{rank.pid}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("1M")
        (group / "cgroup.procs").write_text(str(rank.pid))
        rank.wait(timeout=PATIENCE_S)
        assert "oom_kill 1" in (group / "memory.oom_control").read_text()
        group.rmdir()

    def srun_killed(self) -> None:
        sruns = [each.pid for each, _ in self.processes() if each.name() == "srun"]
        os.kill(min(sruns), signal.SIGKILL)

    def slurmd_killed_and_back(self) -> int:
        node = self.rng.choice(NODES)
        self.cluster.kill(node)
        self.cluster.start(node)
        return 0  # the job may go on

    def node_dead_and_back(self) -> None:
        node = self.rng.choice(NODES)
        self.cluster.kill_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=died")
        time.sleep(10)
        self.cluster.start(node)

    def node_drained(self) -> None:
        node = self.rng.choice(NODES)
        self.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        before = self.step()
        self.wait(lambda: self.step() > before, "step while its node drains")
        self.usr2()
        self.wait(lambda: not self.is_running(), "end")
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def controller_away_while_a_rank_is_killed(self) -> None:
        rank = self.rng.choice(self.ranks())
        self.cluster.kill("slurmctld")
        os.kill(rank, signal.SIGKILL)
        time.sleep(30)
        self.cluster.start("slurmctld")

    def checkpoints_full(self, seconds: float = OUTAGE_S) -> None:
        filler = self.run_folder / "checkpoints/filler"
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
            for _ in range(1 << 18):
                file.write(bytes(4096))
        self.outage(seconds)
        filler.unlink()

    def checkpoints_read_only(self, seconds: float = OUTAGE_S) -> None:
        self.run("mount", "-o", "remount,ro", self.run_folder / "checkpoints")
        self.outage(seconds)
        self.run("mount", "-o", "remount,rw", self.run_folder / "checkpoints")

    def checkpoints_full_for_10_min(self) -> None:
        self.checkpoints_full(600)

    def checkpoints_read_only_for_10_min(self) -> None:
        self.checkpoints_read_only(600)

    def cancelled_and_submitted_again(self) -> int:
        self.run("scancel", self.job_id)
        self.cluster.wait(self.job_id, states=["CANCELLED"])
        self.submit()
        return 0  # a new job

    # ---- what they need --------------------------------------------------------------------------

    def submit(self) -> None:
        output = self.cluster.script(*self.command, cwd=self.run_folder.parent)
        found = re.search(r"submitted job (\d+)", output)
        assert found, output
        self.job_id = found[1]

    def suffer(self, fault: str, *, after_steps: int) -> None:
        """Let the fault happen after some more steps, and wait until the run is further."""
        at_step = self.step() + after_steps
        self.wait(lambda: self.step() >= at_step, f"step {at_step}")
        before, restarts, began = self.step(), self.restarts(), time.time()
        if fault in SIGNALS:
            pids_of, number = SIGNALS[fault]
            os.kill(self.rng.choice(pids_of(self)), number)
        if fault in SIGNALS or getattr(self, fault)() is None:
            self.wait(lambda: self.restarts() > restarts, f"restart after {fault}")
        self.wait(self.is_running, f"start after {fault}")
        since = max(began, self.started())
        self.wait(lambda: self.step(since=since) > before, f"new step after {fault}")
        self.seconds[fault].append(time.time() - began)
        print(f"{fault} at step {before}: {self.seconds[fault][-1]:.0f} s", flush=True)

    def preempt(self, *, grace_s: int) -> None:
        self.run("scontrol", "update", "PartitionName=low", f"GraceTime={grace_s}")
        job = ("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
        self.run("sbatch", *job, "--output=/dev/null")

    def outage(self, seconds: float) -> None:
        """The attempt cannot save when it is to stop; the next begins when the storage is back."""
        restarts = self.restarts()
        self.usr2()
        time.sleep(seconds)
        assert self.restarts() == restarts and self.is_running()

    def step(self, *, since: float = 0.0) -> int:
        """The last step in the journal; 0 if it is older than `since`, unix seconds."""
        journal = self.run_folder / "journal.jsonl"
        lines = journal.read_text().splitlines()[:-1] if journal.exists() else []
        last = json.loads(lines[-1]) if lines else {"step": 0, "time": 0}
        return last["step"] if last["time"] >= since else 0

    def restarts(self) -> int:
        return int(self.cluster.job(self.job_id)["Restarts"])

    def is_running(self) -> bool:
        return self.cluster.job(self.job_id)["JobState"] == "RUNNING"

    def started(self) -> float:
        started = self.cluster.job(self.job_id)["StartTime"]
        return time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%S"))

    def run(self, *words: object) -> None:
        self.cluster.run(words)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def happens() -> bool:
            state = self.cluster.job(self.job_id)["JobState"]
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"), (
                state,
                what,
            )
            return condition()

        wait_until(
            happens, else_say=lambda: f"no {what}\n{self.cluster.logs()}", every_s=0.2
        )

    def ranks(self) -> list[int]:
        def is_rank(process: psutil.Process, own: dict[str, str]) -> bool:
            # The batch script has no step, or one above all others.
            step = int(own.get("SLURM_STEP_ID", 1 << 32))
            return process.parent().name() == "slurmstepd" and step < 1 << 31

        return [
            process.pid for process, own in self.processes() if is_rank(process, own)
        ]

    def workers(self) -> list[int]:
        """Children of the server of each rank."""
        servers = [
            each for pid in self.ranks() for each in psutil.Process(pid).children()
        ]
        return [worker.pid for server in servers for worker in server.children()]

    def processes(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        """Everything in the job, with its environment."""
        return list(self.cluster.processes(SLURM_JOB_ID=self.job_id))


# Whose process gets a signal, and which.
SIGNALS = {
    "rank_killed": (Storm.ranks, signal.SIGKILL),
    "rank_segv": (Storm.ranks, signal.SIGSEGV),
    "rank_stopped": (Storm.ranks, signal.SIGSTOP),
    "worker_killed": (Storm.workers, signal.SIGKILL),
    "worker_stopped": (Storm.workers, signal.SIGSTOP),
}
EVERY = [
    *SIGNALS,
    *"""
    preempted_with_grace preempted_without_grace scontrol_requeue usr2 usr2_twice_within_seconds
    time_limit srun_killed slurmd_killed_and_back node_dead_and_back node_drained
    controller_away_while_a_rank_is_killed cancelled_and_submitted_again checkpoints_full
    checkpoints_read_only
    """.split(),
]
if MEMORY_GROUPS.is_dir():
    EVERY.append("rank_out_of_memory")
ONCE = ("checkpoints_full_for_10_min", "checkpoints_read_only_for_10_min")


@pytest.mark.slurm
@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_interruptions_change_no_bit(
    digits_shards: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    number = max(1, pytestconfig.getoption("--storm-kills") // 4)
    rng = random.Random(pytestconfig.getoption("--storm-seed"))
    faults = [EVERY[each % len(EVERY)] for each in range(number)]
    if number > len(EVERY):
        faults[-len(ONCE) :] = ONCE
    rng.shuffle(faults)
    steps = STEPS_OF_A_FAULT * (number + 1)
    training = ["--config", ROOT / "configs/digits/pretrain.yaml", *SETTINGS]
    training += [f"schedule.steps={steps}", f"data.path={digits_shards}"]
    calm, run, database = (
        tmp_path / name for name in ("calm", "disturbed", "mlflow.db")
    )
    here = [ROOT / "launch/local.py", "--num-procs", 2, *training, f"output={calm}"]
    here += ["tracking.uri=null"]
    undisturbed = subprocess.Popen([sys.executable, *map(str, here)], cwd=tmp_path)
    disk = mounted(run / "checkpoints", "tmpfs", "-t", "tmpfs", "-o", "size=256m")
    with disk, undisturbed, slurm_cluster(more=PARTITIONS) as cluster:
        uri = f"sqlite:///{database}"
        there = ["launch/slurm.py", *training, *LAUNCH, f"output={run}"]
        there += [f"tracking.uri={uri}"]
        storm = Storm(cluster=cluster, run_folder=run, command=there, rng=rng)
        storm.submit()
        for fault in faults:
            storm.suffer(fault, after_steps=rng.randrange(1, 40))
        ended = cluster.wait(storm.job_id, states=["COMPLETED", "FAILED", "CANCELLED"])
        assert ended["JobState"] == "COMPLETED"
        assert not storm.processes()
        assert undisturbed.wait() == 0
        assert differences(read_state(run), read_state(calm)) == []
        cluster.script("launch/compare.py", "sync", run, "--uri", uri, cwd=tmp_path)
    with sqlite3.connect(database) as connection:
        assert connection.execute("select status from runs").fetchall() == [
            ("FINISHED",)
        ]
    print("fault, times, seconds to the next new step (least and most)")
    for fault, seconds in sorted(storm.seconds.items()):
        name = fault.replace("_", " ")
        print(f"{name:40} {len(seconds):3} {min(seconds):5.0f} {max(seconds):5.0f}")
