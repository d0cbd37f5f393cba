"""A chain that a real SLURM interrupts in every way, many times, ends with the bits of an
undisturbed one, as one MLflow run a stage, and leaves no process and no file.

    pytest -s tests/scripts/slurm/test_storm.py --storm-kills 400 --storm-seed 1

There is one interruption for four of --storm-kills. Prints a table: for each fault how often, how
often a person had to act, and the seconds until the first new step (median and largest).
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.conftest import mounted
from tests.scripts.slurm.conftest import (
    NODES,
    SlurmCluster,
    breakable_python,
    slurm_cluster,
    with_module,
    without_folder,
)
from tests.support.ranks.run_states import differences, read_state
from tests.support.waiting import PATIENCE_S, ROOT, stacks, wait_until
from vitscale.tracking.journal import decode

GRACE_S, STEPS_OF_A_FAULT, OUTAGE_S = 20, 60, 30
STAGES = ("pretrain", "finetune")
SETTINGS = """
schedule.epochs=null schedule.warmup_steps=5 data.global_batch=32 engine.device=cpu
engine.num_threads=1 engine.timeout_min=1 model.dropout=0.1 optim.ema.decay=0.98
checkpoint.every_steps=10 model.depth=2 tracking.log_every_steps=1 launch.partition=low
launch.nodes=2 launch.tasks_per_node=1 launch.timeout_min=50 launch.signal_delay_s=55
launch.max_requeues=1000
""".split()
EVALUATE = "evaluate=[{name: classification, every_steps: 500}]"
PARTITIONS = f"""
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=7200
PartitionName=low Nodes=n1,n2 PriorityTier=1 GraceTime={GRACE_S} MaxTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF MaxTime=120 State=UP
"""
# Of cgroups, version 1; root alone may add some.
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
SHIFTED_CLOCK = """
import time
now = time.time
time.time = lambda: now() + {seconds}
"""
# Batch scripts look for a lock that nobody touches each 6 s, and not each minute.
SUBMIT = """
import runpy, sys
from launch.jobs import submission
submission.LOOK_S = 6
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
GOES_ON = False
"""Of an event that may end without a restart."""


@dataclass(kw_only=True)
class Storm:
    """The chain and what happens to it."""

    cluster: SlurmCluster
    folder: Path
    """Of the configuration and of nodes/, which breaks nodes."""
    chain: Path
    """Of the stages' runs, on a disk that can hang."""
    shards: Path
    database: Path
    rng: random.Random
    stage: int = 0
    """How many stages are done."""
    jobs: dict[str, str] = field(default_factory=dict)
    """The last job of each stage."""
    fault: str = "none"
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By fault: from its beginning to the first new step."""
    without_advice: list[str] = field(default_factory=list)
    """What `vitscale status` said where a person had to submit the chain again."""
    by_hand: Counter[str] = field(default_factory=Counter)
    """By fault: how often a person did what `vitscale status` says."""

    # ---- faults: each starts the job again, if it does not return GOES_ON ------------------------

    def preempted_with_grace(self) -> None:
        self.preempt(grace_s=GRACE_S)

    def preempted_without_grace(self) -> None:
        self.preempt(grace_s=0)

    def scontrol_requeue(self) -> None:
        self.run("scontrol", "requeue", self.job_id)

    def requeuehold_and_release(self) -> None:
        self.run("scontrol", "requeuehold", self.job_id)

    def usr2(self) -> None:
        self.run("scancel", "--signal=USR2", self.job_id)

    def term_to_all(self) -> None:
        self.run("scancel", "--signal=TERM", "--full", self.job_id)

    def signals_in_bursts(self) -> None:
        for _ in range(6):
            name = self.rng.choice(("USR2", "TERM"))
            self.try_to(f"scancel --signal={name} {self.job_id}")
            time.sleep(self.rng.random())

    def usr2_twice_within_seconds(self) -> None:
        self.scontrol_requeue()
        self.wait_restart()
        restarts = self.restarts()
        # Before the batch script runs, SLURM itself drops the signal.
        again = f"scancel --signal=USR2 {self.job_id}"
        self.wait(lambda: self.try_to(again) or self.restarts() > restarts, "end")

    def time_limit(self) -> None:
        minutes = 1 + int(time.time() - self.started()) // 60
        self.run("scontrol", "update", f"JobId={self.job_id}", f"TimeLimit={minutes}")
        self.wait_restart()
        self.run("scontrol", "update", f"JobId={self.job_id}", "TimeLimit=50")

    def suspended(self) -> bool:
        self.run("scontrol", "suspend", self.job_id)
        time.sleep(self.rng.uniform(5, 20))
        self.run("scontrol", "resume", self.job_id)
        return GOES_ON

    def cancelled_in_a_save(self) -> None:
        saves = self.run_folder / "checkpoints"
        wait_until(lambda: any(saves.glob(".step-*")))
        self.run("scancel", self.job_id)

    def cancelled_between_attempts(self) -> None:
        with self.between_attempts():
            self.run("scancel", self.job_id)

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
        os.kill(min(self.named("srun")), signal.SIGKILL)

    def tee_and_a_rank_killed(self) -> None:
        os.kill(min(self.named("tee")), signal.SIGKILL)
        self.kill_a_rank()

    def batch_script_killed(self) -> None:
        os.kill(min(self.named("bash")), signal.SIGKILL)

    def after_killed(self) -> None:
        self.kill_a_rank()
        afters: list[int] = []

        def has_begun() -> bool:
            afters[:] = self.named("python", "launch.jobs.after")
            return bool(afters)

        wait_until(has_begun)
        with suppress(ProcessLookupError):
            os.kill(afters[0], signal.SIGKILL)

    def slurmstepd_and_a_rank_killed(self) -> None:
        rank = psutil.Process(self.rng.choice(self.ranks()))
        rank.parent().kill()
        self.kill_a_rank()

    def slurmd_killed_and_back(self) -> bool:
        node = self.rng.choice(NODES)
        self.cluster.kill(node)
        self.cluster.start(node)
        return GOES_ON

    def slurmd_stopped_while_a_rank_is_killed(self) -> None:
        daemon = self.cluster.daemons[self.rng.choice(NODES)]
        daemon.send_signal(signal.SIGSTOP)
        self.kill_a_rank()
        time.sleep(OUTAGE_S)
        daemon.send_signal(signal.SIGCONT)

    def node_dead_and_back(self) -> None:
        node = self.rng.choice(NODES)
        self.cluster.kill_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=died")
        time.sleep(10)
        self.cluster.start(node)

    def node_down_and_resumed(self) -> None:
        node = self.rng.choice(NODES)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        time.sleep(5)
        self.try_to(f"scontrol update nodename={node} state=resume")

    def node_drained(self) -> None:
        node = self.rng.choice(NODES)
        self.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        before = self.position()
        self.wait(lambda: self.position() > before, "step while its node drains")
        self.usr2()
        self.wait(lambda: not self.is_running(), "end")
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def controller_away(self) -> bool:
        with self.away("slurmctld"):
            pass
        return GOES_ON

    def controller_away_while_a_rank_is_killed(self) -> None:
        with self.away("slurmctld"):
            self.kill_a_rank()

    def controller_killed_at_a_start(self) -> None:
        self.kill_a_rank()
        self.wait_restart()
        with self.away("slurmctld", seconds=5):
            pass

    def munge_away(self) -> bool:
        with self.away("munged"):
            pass
        return GOES_ON

    def munge_away_while_a_rank_is_killed(self) -> None:
        with self.away("munged"):
            self.kill_a_rank()

    def checkpoints_full(self) -> None:
        filler = self.run_folder / "checkpoints/filler"
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
            for _ in range(1 << 18):
                file.write(bytes(4096))
        self.outage()
        filler.unlink()

    def checkpoints_read_only(self) -> None:
        self.run("mount", "-o", "remount,ro", self.run_folder / "checkpoints")
        self.outage()
        self.run("mount", "-o", "remount,rw", self.run_folder / "checkpoints")

    def storage_hung(self) -> bool:
        with self.frozen(seconds=10):
            pass
        return GOES_ON

    def storage_hung_while_a_rank_is_killed(self) -> None:
        with self.frozen(seconds=20):
            self.kill_a_rank()

    def mlflow_hung(self) -> bool:
        with closing(sqlite3.connect(self.database, timeout=60)) as connection:
            connection.execute("begin exclusive")
            time.sleep(15)
        return GOES_ON

    def mlflow_hung_at_a_start(self) -> None:
        self.kill_a_rank()
        with closing(sqlite3.connect(self.database, timeout=60)) as connection:
            connection.execute("begin exclusive")
            time.sleep(30)

    def ports_taken(self) -> None:
        with ExitStack() as listeners:
            for port in self.rng.sample(range(20000, 32000), 10000):
                listener = listeners.enter_context(socket.socket())
                with suppress(OSError):
                    listener.bind(("", port))
                    listener.listen()
            self.kill_a_rank()
            self.wait_restart()
            self.wait_step()

    def newest_checkpoint_damaged(self) -> None:
        with self.between_attempts():
            newest = max((self.run_folder / "checkpoints").glob("step-*"), default=None)
            if newest is not None:
                file = self.rng.choice(sorted(newest.iterdir()))
                content = bytearray(file.read_bytes())
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
                file.write_bytes(content)

    def journal_with_garbage(self) -> None:
        with self.between_attempts(), open(self.journal, "ab") as file:
            file.write(self.rng.randbytes(300) + b"\n{}\n[1]\n")

    def journal_cut_in_a_line(self) -> None:
        with self.between_attempts(), open(self.journal, "ab") as file:
            file.write(b'{"step": 10, "ti')

    def events_with_garbage(self) -> None:
        with self.between_attempts():
            for path in (self.run_folder / "events").iterdir():
                path.write_bytes(path.read_bytes()[:-9] + self.rng.randbytes(300))

    def logs_deleted(self) -> None:
        with self.between_attempts():
            for path in (self.run_folder / "logs").iterdir():
                path.unlink()

    def folder_of_the_job_deleted(self) -> None:
        self.run("rm", "-r", self.run_folder / "slurm" / self.job_id)
        self.kill_a_rank()

    def leftovers_of_another_node(self) -> None:
        with self.between_attempts():
            (self.run_folder / ".lock").write_text("job 7 on n9")
            left = self.run_folder / "checkpoints/.step-00000007.0.tmp"
            left.mkdir()
            (left / "rank-00000.safetensors").write_bytes(bytes(1000))

    def package_broken(self) -> None:
        text = "raise ImportError('half a package')"
        self.break_node(with_module(self.folder, "deepspeed", text))

    def shards_not_mounted(self) -> None:
        self.break_node(without_folder(self.shards))

    def memory_too_small(self) -> None:
        self.break_node("ulimit -v 2000000")

    def clock_shifted(self) -> bool:
        text = SHIFTED_CLOCK.format(seconds=self.rng.choice((-300, 300, 3600)))
        with self.broken(with_module(self.folder, "sitecustomize", text)):
            self.kill_a_rank()
            self.wait_restart()
            self.wait_step()
        return GOES_ON

    # ---- what they need --------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        return self.jobs[STAGES[self.stage]]

    @property
    def run_folder(self) -> Path:
        return self.chain / STAGES[self.stage]

    @property
    def journal(self) -> Path:
        return self.run_folder / "journal.jsonl"

    def submit(self) -> None:
        words = [sys.executable, "-c", SUBMIT, ROOT / "launch/slurm.py"]
        output = self.cluster.run([*words, "--config", "chain.yaml"], cwd=self.folder)
        self.jobs |= dict(re.findall(r"submitted (\S+): job (\d+)", output))

    def suffer(self, fault: str, *, after_steps: int) -> None:
        """Let the fault happen after some more steps, and wait until the chain is further."""
        self.fault = fault
        stage, step = self.position()
        self.wait(
            lambda: self.position() >= (stage, step + after_steps), "step before it"
        )
        self.wait(lambda: self.is_running() and self.position()[1] > 0, "first step")
        stage, step = self.position()
        before, began = self.start(), time.time()
        goes_on = None
        if fault in SIGNALS:
            pids_of, number = SIGNALS[fault]
            os.kill(self.rng.choice(pids_of(self)), number)
        else:
            goes_on = getattr(self, fault)()
        if goes_on is None:
            self.wait(
                lambda: self.start() != before or self.stage > stage, "next start"
            )
        self.wait_step()
        self.seconds[fault].append(time.time() - began)
        print(
            f"{time.strftime('%H:%M:%S')} {fault} in {STAGES[stage]} at step {step}: "
            f"{self.seconds[fault][-1]:.0f} s",
            flush=True,
        )

    def wait_step(self) -> None:
        """Wait for a step beyond the last one, by an attempt that runs."""
        before = self.position()
        self.wait(self.is_running, "start")
        since = max(time.time(), self.started())

        def is_further() -> bool:
            return self.position() > before and (
                self.stage > before[0] or self.journal.stat().st_mtime >= since
            )

        self.wait(is_further, "new step")

    def wait_restart(self) -> None:
        before = self.start()
        self.wait(lambda: self.start() != before and self.is_running(), "next start")

    def preempt(self, *, grace_s: int) -> None:
        self.run("scontrol", "update", "PartitionName=low", f"GraceTime={grace_s}")
        job = ("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
        self.run("sbatch", *job, "--output=/dev/null")

    def outage(self) -> None:
        """The attempt cannot save when it is to stop; the next begins when the storage is back."""
        start = self.start()
        self.usr2()
        time.sleep(OUTAGE_S)
        assert self.start() == start and self.is_running()

    @contextmanager
    def away(self, daemon: str, *, seconds: float = OUTAGE_S) -> Iterator[None]:
        self.cluster.kill(daemon)
        yield
        time.sleep(seconds)
        self.cluster.start(daemon)

    @contextmanager
    def frozen(self, *, seconds: float) -> Iterator[None]:
        """All writes to the run folder wait."""
        disk = self.chain.parent
        subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
        try:
            yield
            time.sleep(seconds)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)

    @contextmanager
    def between_attempts(self) -> Iterator[None]:
        """The job waits after a rank was killed, until the block ends."""
        self.kill_a_rank()
        self.wait(lambda: not self.is_running(), "end")
        self.run("scontrol", "hold", self.job_id)
        yield
        self.try_to(f"scontrol release {self.job_id}")

    @contextmanager
    def broken(self, shell: str) -> Iterator[None]:
        """What starts on one node inside the block begins with these lines."""
        file = self.folder / "nodes" / self.rng.choice(NODES)
        file.write_text(shell)
        yield
        file.unlink()

    def break_node(self, shell: str) -> None:
        with self.broken(shell):
            self.kill_a_rank()
            self.wait_restart()
            restarts = self.restarts()
            self.wait(lambda: self.restarts() > restarts, "end of the broken attempt")

    def position(self) -> tuple[int, int]:
        """(Stages done, last step in the journal of the next one)."""
        while self.stage < len(STAGES) and self.state() == "COMPLETED":
            self.stage += 1
        assert self.stage < len(STAGES), "the chain has ended before the storm"
        lines = []
        with suppress(FileNotFoundError):
            lines = self.journal.read_bytes().splitlines(keepends=True)[-20:]
        return self.stage, max(
            (row.step for row in map(decode, lines) if row), default=0
        )

    def state(self) -> str:
        return self.cluster.job(self.job_id)["JobState"]

    def restarts(self) -> int:
        return int(self.cluster.job(self.job_id)["Restarts"])

    def start(self) -> tuple[str, int]:
        """Of the stage's job, which one it is."""
        return self.job_id, self.restarts()

    def is_running(self) -> bool:
        return self.state() == "RUNNING"

    def started(self) -> float:
        started = self.cluster.job(self.job_id)["StartTime"]
        return time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%S"))

    def run(self, *words: object) -> None:
        self.cluster.run(words)

    def try_to(self, command: str) -> None:
        self.run("bash", "-c", f"{command} || true")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def happens() -> bool:
            job = self.cluster.job(self.job_id)
            ended = job["JobState"] in ("FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
            if ended or re.search("held|Held|NeverSat", job["Reason"]):
                self.act_as_status_says()
            return condition()

        def say() -> str:
            running = stacks(self.ranks())
            return f"no {what} ({self.fault})\n{self.cluster.logs()}\n{running}"

        wait_until(happens, else_say=say, every_s=0.2)

    def act_as_status_says(self) -> None:
        said = self.cluster.script("launch/status.py", self.run_folder, cwd=self.folder)
        print(f"by hand after {self.fault}: {said.strip()}", flush=True)
        self.by_hand[self.fault] += 1
        if "scontrol release" not in said:
            if not re.search("submit|same command", said):
                self.without_advice.append(said)
            self.submit()
            return
        for node in NODES if "administrator" in said else ():
            self.try_to(f"scontrol update nodename={node} state=resume")
        self.run("scontrol", "release", self.job_id)
        time.sleep(2)

    def ranks(self) -> list[int]:
        def is_rank(process: psutil.Process, own: dict[str, str]) -> bool:
            # The batch script has no step, or one above all others.
            step = int(own.get("SLURM_STEP_ID", 1 << 32))
            return process.parent().name() == "slurmstepd" and step < 1 << 31

        return [
            process.pid for process, own in self.processes() if is_rank(process, own)
        ]

    def kill_a_rank(self) -> None:
        os.kill(self.rng.choice(self.ranks()), signal.SIGKILL)

    def workers(self) -> list[int]:
        """Children of the server of each rank."""
        servers = [
            each for pid in self.ranks() for each in psutil.Process(pid).children()
        ]
        return [worker.pid for server in servers for worker in server.children()]

    def named(self, name: str, argument: str = "") -> list[int]:
        """Processes of the job by their names and arguments."""
        return [
            process.pid
            for process, _ in self.processes()
            if process.name().startswith(name)
            and argument in " ".join(process.cmdline())
        ]

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
# They need a person, as docs/slurm.md says.
BY_HAND = """
batch_script_killed cancelled_in_a_save cancelled_between_attempts folder_of_the_job_deleted
requeuehold_and_release controller_killed_at_a_start
""".split()
EVERY = [
    *SIGNALS,
    *BY_HAND,
    *"""
    preempted_with_grace preempted_without_grace scontrol_requeue usr2 usr2_twice_within_seconds
    term_to_all signals_in_bursts time_limit suspended srun_killed tee_and_a_rank_killed
    after_killed slurmstepd_and_a_rank_killed slurmd_killed_and_back
    slurmd_stopped_while_a_rank_is_killed node_dead_and_back node_down_and_resumed node_drained
    controller_away controller_away_while_a_rank_is_killed munge_away munge_away_while_a_rank_is_killed
    checkpoints_full checkpoints_read_only storage_hung storage_hung_while_a_rank_is_killed
    mlflow_hung mlflow_hung_at_a_start ports_taken newest_checkpoint_damaged journal_with_garbage
    journal_cut_in_a_line events_with_garbage logs_deleted leftovers_of_another_node package_broken
    shards_not_mounted memory_too_small clock_shifted
    """.split(),
]
if MEMORY_GROUPS.is_dir():
    EVERY.append("rank_out_of_memory")


@contextmanager
def disk_that_can_hang(folder: Path) -> Iterator[Path]:
    """A disk of its own, and on it a small one for the checkpoints of each stage."""
    image = folder / "image"
    with open(image, "wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with ExitStack() as disks:
        disk = disks.enter_context(mounted(folder / "disk", image, "-o", "loop"))
        for stage in STAGES:
            checkpoints = disk / "chain" / stage / "checkpoints"
            size = ("-t", "tmpfs", "-o", "size=256m")
            disks.enter_context(mounted(checkpoints, "tmpfs", *size))
        yield disk / "chain"


def write_chain(folder: Path, *, shards: Path, steps: int) -> None:
    data = [f"schedule.steps={steps}", f"data.path={shards}", EVALUATE]
    settings = [*SETTINGS, *data, f"launch.python={breakable_python(folder)}"]
    finetune = [each for each in settings if not each.startswith("schedule.epochs")]
    stages = [
        {
            "name": "pretrain",
            "config": f"{ROOT}/configs/digits/pretrain.yaml",
            "overrides": settings,
        },
        {
            "name": "finetune",
            "config": f"{ROOT}/configs/digits/finetune.yaml",
            "overrides": finetune,
            "inputs": {"init": "pretrain"},
        },
    ]
    for name, output, uri in (
        ("chain", "disk/chain", f"sqlite:///{folder}/mlflow.db"),
        ("calm", "calm", "null"),
    ):
        chain = {"stage": "chain", "name": "storm", "output": str(folder / output)}
        chain |= {"overrides": [f"tracking.uri={uri}"], "stages": stages}
        (folder / f"{name}.yaml").write_text(json.dumps(chain))


@pytest.mark.slurm
@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_interruptions_change_no_bit(
    digits_shards: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = max(1, pytestconfig.getoption("--storm-kills") // 4)
    rng = random.Random(pytestconfig.getoption("--storm-seed"))
    faults: list[str] = []
    while len(faults) < number:
        faults += rng.sample(EVERY, k=len(EVERY))
    faults = faults[:number]
    import json as j

    dev = j.loads(Path("/tmp/storm_dev.json").read_text())
    faults = dev.get("only") or faults
    monkeypatch.setattr("tests.support.waiting.PATIENCE_S", 300.0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    write_chain(
        tmp_path,
        shards=digits_shards,
        steps=dev.get("steps") or STEPS_OF_A_FAULT * (number + 1) // 2,
    )
    here = [
        "launch/local.py",
        "--num-procs",
        "2",
        "--config",
        str(tmp_path / "calm.yaml"),
    ]
    undisturbed = subprocess.Popen(["nice", sys.executable, *here], cwd=ROOT)
    disk = disk_that_can_hang(tmp_path)
    with disk as chain, undisturbed, slurm_cluster(more=PARTITIONS) as cluster:
        storm = Storm(
            cluster=cluster,
            folder=tmp_path,
            chain=chain,
            shards=digits_shards,
            database=tmp_path / "mlflow.db",
            rng=rng,
        )
        storm.submit()
        for fault in faults:
            if os.path.exists(str(tmp_path.parent) + "-stop"):
                break
            try:
                storm.suffer(fault, after_steps=rng.randrange(1, 20))
            except Exception:
                if not dev.get("go_on"):
                    raise
                print(f"{time.strftime('%H:%M:%S')} BROKEN {fault}", flush=True)
                traceback.print_exc()
        storm.fault = "the storm"
        print(table(storm), flush=True)
        for stage in STAGES[storm.stage :]:
            ended = cluster.wait(
                storm.jobs[stage], states=["COMPLETED", "FAILED", "CANCELLED"]
            )
            assert ended["JobState"] == "COMPLETED"
            assert not [*cluster.processes(SLURM_JOB_ID=storm.jobs[stage])]
        assert undisturbed.wait() == 0
        for stage in STAGES:
            run, calm = chain / stage, tmp_path / "calm" / stage
            assert differences(read_state(run), read_state(calm)) == []
            names = {path.name for path in (run / "checkpoints").iterdir()}
            assert all(name.startswith("step-") for name in names), names
            assert (run / ".lock").read_text() == ""
            assert {*os.listdir(calm)} >= {*os.listdir(run)} - {"slurm"}
        runs = [chain / stage for stage in STAGES]
        cluster.script(
            "launch/compare.py",
            "sync",
            *runs,
            "--uri",
            f"sqlite:///{storm.database}",
            cwd=tmp_path,
        )
        cluster.script("launch/compare.py", *runs, cwd=tmp_path)
    with sqlite3.connect(storm.database) as connection:
        statuses = connection.execute("select status from runs").fetchall()
    assert statuses == [("FINISHED",)] * len(STAGES)
    assert not storm.without_advice
    assert {*storm.by_hand} <= {*BY_HAND}, storm.by_hand


def table(storm: Storm) -> str:
    lines = [
        "| Fault | Times | By hand | Median s | Largest s |",
        "|---|---|---|---|---|",
    ]
    for fault, seconds in sorted(storm.seconds.items()):
        cells = (
            fault.replace("_", " "),
            len(seconds),
            storm.by_hand[fault],
            f"{median(seconds):.0f}",
            f"{max(seconds):.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
