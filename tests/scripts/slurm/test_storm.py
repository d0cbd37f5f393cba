"""A chain that a real SLURM interrupts in every way, many times, ends with the bits of an
undisturbed one, as one MLflow run a stage, and leaves no process and no file.

    pytest -s tests/scripts/slurm/test_storm.py --storm-kills 400 --storm-seed 1

There is one interruption for four of --storm-kills. Prints a table: for each fault how often, how
often a person had to act, and the seconds until the first new step (median and largest).
"""

import os
import random
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
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
from tests.support.waiting import ROOT, stacks, wait_until
from vitscale.tracking.journal import decode

# Steps that the chain has for each fault: those until it happens, and those that it costs.
STEPS_OF_A_FAULT = 90
# How long a daemon is away: longer than a save, shorter than what SLURM itself waits.
OUTAGE_S = 30
STAGES = ("pretrain", "finetune")
# With everything that could go on differently after a restart: dropout, an average, evaluations.
CHAIN = """
stage: chain
name: storm
output: {output}
overrides:
  - tracking.uri={uri}
  - tracking.log_every_steps=1
  - schedule.steps={steps}
  - schedule.warmup_steps=5
  - data.path={shards}
  - data.global_batch=32
  - engine.device=cpu
  - engine.num_threads=1
  - engine.timeout_min=1
  - model.dropout=0.1
  - model.depth=2
  - optim.ema.decay=0.98
  - checkpoint.every_steps=10
  - 'evaluate=[{{name: classification, every_steps: 500}}]'
  - launch.python={python}
  - launch.partition=low
  - launch.nodes=2
  - launch.tasks_per_node=1
  - launch.timeout_min=50
  - launch.signal_delay_s=55
  - launch.max_requeues=1000
stages:
  - {{name: pretrain, config: {configs}/pretrain.yaml, overrides: [schedule.epochs=null]}}
  - {{name: finetune, config: {configs}/finetune.yaml, inputs: {{init: pretrain}}}}
"""
# Jobs of the second partition preempt those of the first. Ended jobs stay known for two hours.
PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=7200
PartitionName=low Nodes=n1,n2 PriorityTier=1 MaxTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF MaxTime=120 State=UP
"""
# Batch scripts look for a lock that nobody touches each 6 s, and not each minute.
SUBMIT = """
import runpy, sys
from launch.jobs import submission
submission.LOOK_S = 6
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# As on a node whose clock nobody sets.
SHIFTED_CLOCK = """
import time
now = time.time
time.time = lambda: now() + {seconds}
"""
# ---- faults -------------------------------------------------------------------------------------

# What the commands below share: processes of the job, and questions to SLURM.
SHELL = """
RANDOM={seed}
batch=$(pgrep -o -f "${{SLURM_CONF%/*}}/spool-.*/job0*{job}/slurm_script")
session=$(ps -o sid= -p "$batch" | tr -d " ")
is_in() {{ squeue -hj {job} -t "$1" | grep -q .; }}
restarts() {{ scontrol -o show job {job} | grep -o "Restarts=[0-9]*"; }}
preempt() {{
    scontrol update PartitionName=low GraceTime=$1
    sbatch --partition=high --nodes=2 --exclusive --output=/dev/null --wrap="sleep 1"
}}
# The attempt cannot save when it is to stop; the next begins when the storage is back.
outage() {{
    before=$(restarts)
    scancel --signal=USR2 {job}
    sleep 30
    [ "$(restarts)" = "$before" ] && is_in R
}}
"""
# Each ends with the code of its last line. {rank} and {node} are drawn. Processes of a training,
# processes around it, what SLURM and people do, nodes, and storage.
COMMANDS = r"""
rank_killed:
    kill -KILL {rank}
rank_segv:
    kill -SEGV {rank}
rank_stopped:
    kill -STOP {rank}
worker_killed:
    pkill -KILL -P $(pgrep -d, -P {rank})
worker_stopped:
    pkill -STOP -P $(pgrep -d, -P {rank})
srun_killed:
    kill -KILL $(pgrep -o -s $session -x srun)
tee_and_a_rank_killed:
    kill -KILL $(pgrep -o -s $session -x tee) {rank}
batch_script_killed:
    kill -KILL $batch
after_killed:
    kill -KILL {rank}
    until pkill -KILL -f 'jobs.requeue_decisio[n] {run} '; do sleep .1; done
slurmstepd_and_a_rank_killed:
    kill -KILL $(ps -o ppid= -p {rank}) {rank}
rank_out_of_memory:
    group=/sys/fs/cgroup/memory/storm-{job}
    mkdir $group
    echo 1M > $group/memory.limit_in_bytes
    echo {rank} > $group/cgroup.procs
    until grep -q "oom_kill [1-9]" $group/memory.oom_control; do sleep .1; done
    until rmdir $group; do sleep .1; done
preempted_with_grace:
    preempt 20
preempted_without_grace:
    preempt 0
scontrol_requeue:
    scontrol requeue {job}
requeuehold_and_release:
    scontrol requeuehold {job}
usr2:
    scancel --signal=USR2 {job}
term_to_all:
    scancel --signal=TERM --full {job}
usr2_twice_within_seconds:
    scontrol requeue {job}
    until is_in PD; do sleep .1; done
    until is_in R; do sleep .1; done
    before=$(restarts)
    # Before the batch script runs, SLURM itself drops the signal.
    while [ "$(restarts)" = "$before" ]; do scancel --signal=USR2 {job}; sleep .2; done
signals_in_bursts:
    for name in TERM USR2 USR2 TERM TERM; do
        scancel --signal=$name {job}
        sleep .$((RANDOM % 9))
    done
    true
time_limit:
    started=$(date -d "$(squeue -hj {job} -o %S)" +%s)
    scontrol update JobId={job} TimeLimit=$((($(date +%s) - started) / 60 + 1))
    until is_in PD; do sleep .2; done
    scontrol update JobId={job} TimeLimit=50
suspended:
    scontrol suspend {job}
    sleep $((5 + RANDOM % 15))
    scontrol resume {job}
cancelled_in_a_save:
    until ls -d {run}/checkpoints/.step-*; do sleep .01; done
    scancel {job}
node_down_and_resumed:
    node={node}
    scontrol update nodename=$node state=down reason=test
    sleep 5
    scontrol update nodename=$node state=resume || true
node_drained:
    node={node}
    scontrol update nodename=$node state=drain reason=test
    sleep 3
    scancel --signal=USR2 {job}
    until is_in PD; do sleep .1; done
    scontrol update nodename=$node state=resume
folder_of_the_job_deleted:
    rm -r {run}/slurm/{job}
    kill -KILL {rank}
checkpoints_full:
    head -c 1G /dev/zero > {run}/checkpoints/filler
    outage
    code=$?
    rm {run}/checkpoints/filler
    exit $code
checkpoints_read_only:
    mount -o remount,ro {run}/checkpoints
    outage
    code=$?
    mount -o remount,rw {run}/checkpoints
    exit $code
"""
# What happens to files while the job waits for its next attempt.
BETWEEN = r"""
cancelled_between_attempts:
    scancel {job}
newest_checkpoint_damaged:
    files=($(ls -d {run}/checkpoints/step-*/* | tail -n 3))
    file=${{files[RANDOM % 3]}}
    dd if=/dev/urandom of=$file conv=notrunc bs=64 count=1 seek=$((RANDOM % 9))
journal_with_garbage:
    (head -c 300 /dev/urandom; printf '\n{{}}\n[1]\n') >> {run}/journal.jsonl
journal_with_half_a_line:
    printf '{{"step": 10, "ti' >> {run}/journal.jsonl
events_with_garbage:
    for file in {run}/events/*; do
        truncate -s -9 $file
        head -c 300 /dev/urandom >> $file
    done
logs_deleted:
    rm {run}/logs/*
lock_of_another_node:
    left={run}/checkpoints/.step-00000007.0.tmp
    echo job 7 on n9 > {run}/.lock
    mkdir $left
    touch $left/rank-00000.safetensors
"""
DAEMONS = ("munged", "slurmctld", "slurmd")
MOMENTS = ("start", "step", "save", "end")


@dataclass
class Storm:
    """The chain and what happens to it."""

    cluster: SlurmCluster
    folder: Path
    """Of the configuration and of nodes/, which breaks nodes."""
    chain: Path
    """Of the stages' runs, on a disk that can hang."""
    shards: Path
    rng: random.Random
    stage: int = 0
    """How many stages are done."""
    jobs: dict[str, str] = field(default_factory=dict)
    """The last job of each stage."""
    fault: str = "none"
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By fault: from its beginning to the first new step."""
    by_hand: Counter[str] = field(default_factory=Counter)
    """By fault: how often a person did what `vitscale status` says."""

    def command(self, text):
        words = {
            "job": self.job_id,
            "run": self.run_folder,
            "node": self.rng.choice(NODES),
            "seed": self.rng.randrange(1 << 15),
            "rank": self.rng.choice(self.ranks() or [0]),
        }
        self.cluster.run(["bash", "-c", (SHELL + text).format_map(words)])

    def between_attempts(self, text):
        self.command("kill -KILL {rank}")
        self.wait(lambda: not self.is_running(), "end")
        # The next attempt must not begin while the files are damaged.
        self.command("scontrol hold {job}")
        self.command(text)
        # A job that was cancelled meanwhile cannot be released.
        self.command("scontrol release {job} || true")

    def away(self, daemon, moment):
        """A daemon is away for a while at a moment of an attempt."""
        # Each node has its own slurmd, which the cluster names after it.
        if daemon == "slurmd":
            daemon = self.rng.choice(NODES)
        if moment == "start":
            self.command("kill -KILL {rank}")
            self.wait_restart()
        elif moment == "save":
            self.command("until ls -d {run}/checkpoints/.step-*; do sleep .01; done")
        self.cluster.kill(daemon)
        if moment == "end":
            self.command("kill -KILL {rank}")
        time.sleep(OUTAGE_S)
        self.cluster.start(daemon)

    def node_broken(self, lines):
        with self.broken(lines):
            self.command("kill -KILL {rank}")
            self.wait_restart()
            # It is left, or healed, only after an attempt has failed on it.
            before = self.start()
            self.wait(lambda: self.start() != before, "end of the broken attempt")

    def package_broken(self):
        text = "raise ImportError('half a package')"
        self.node_broken(with_module(self.folder, "deepspeed", text))

    def clock_shifted(self):
        text = SHIFTED_CLOCK.format(seconds=self.rng.choice((-300, 300, 3600)))
        with self.broken(with_module(self.folder, "sitecustomize", text)):
            self.command("kill -KILL {rank}")
            self.wait_restart()
            self.wait_step()

    def node_dead_and_back(self):
        node = self.rng.choice(NODES)
        self.cluster.kill_node(node)
        # What SLURM does itself after SlurmdTimeout.
        down = f"scontrol update nodename={node} state=down reason=died"
        self.command(f"{down}; sleep 10")
        self.cluster.start(node)

    def storage_hung(self, command):
        """All writes to the run folder wait."""
        disk = str(self.chain.parent)
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        try:
            self.command(command)
            time.sleep(15)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)

    def ports_taken(self):
        # Ten thousand of the ports that a rendezvous may draw.
        with ExitStack() as listeners:
            for port in self.rng.sample(range(20000, 32000), 10000):
                listener = listeners.enter_context(socket.socket())
                with suppress(OSError):
                    listener.bind(("", port))
                    listener.listen()
            self.command("kill -KILL {rank}")
            self.wait_restart()
            self.wait_step()

    # ---- what they need --------------------------------------------------------------------------

    def end(self, steps):
        """Wait for the chain; its last end, too, is one that SLURM hears of late."""
        self.fault = "the end"
        almost = (len(STAGES) - 1, steps - 3)
        self.wait(lambda: self.position() >= almost, "last step")
        self.away("munged", "step")
        states = ["COMPLETED", "FAILED", "CANCELLED"]
        for job_id in self.jobs.values():
            ended = self.cluster.wait(job_id, states=states)
            assert ended["JobState"] == "COMPLETED", ended
            assert not [*self.cluster.processes(SLURM_JOB_ID=job_id)]

    def table(self):
        yield "| Fault | Times | By hand | Median s | Largest s |\n|---|---|---|---|---|"
        for fault, seconds in sorted(self.seconds.items()):
            times = f"{median(seconds):.0f} | {max(seconds):.0f}"
            yield f"| {fault} | {len(seconds)} | {self.by_hand[fault]} | {times} |"

    @property
    def job_id(self):
        return self.jobs[STAGES[self.stage]]

    @property
    def run_folder(self):
        return self.chain / STAGES[self.stage]

    def submit(self):
        words = [sys.executable, "-c", SUBMIT, ROOT / "launch/slurm.py"]
        output = self.cluster.run([*words, "--config", "chain.yaml"], cwd=self.folder)
        # Again by hand: only the stages that are not done have new jobs.
        self.jobs |= dict(re.findall(r"submitted (\S+): job (\d+)", output))

    def suffer(self, fault, *, after_steps):
        """Let the fault happen after some more steps, and wait until the chain is further."""
        self.fault = fault
        stage, step = self.position()
        further = (stage, step + after_steps)
        self.wait(lambda: self.position() >= further, "step before it")
        self.wait(lambda: self.is_running() and self.position()[1] > 0, "first step")

        before = self.start()
        stage = self.stage
        began = time.time()
        FAULTS[fault](self)

        def starts_again():
            # A stage that ends at this moment is not started again.
            return self.start() != before or self.stage > stage

        if fault not in GO_ON:
            self.wait(starts_again, "next start")
        self.wait_step()
        seconds = time.time() - began
        self.seconds[fault].append(seconds)
        print(f"{fault} at {further}: {seconds:.0f} s", flush=True)

    def wait_step(self):
        """Wait for a step beyond the last one, by an attempt that runs."""
        before = self.position()
        self.wait(self.is_running, "start")
        since = time.time()

        def is_further():
            now = self.position()
            if now[0] > before[0]:
                return True
            # Written since then: the old attempt may have logged a step while it ended.
            # Clocks of ranks may be shifted; that of the disk is not.
            return now > before and self.journal.stat().st_mtime >= since

        self.wait(is_further, "new step")

    def wait_restart(self):
        before = self.start()
        self.wait(lambda: self.start() != before and self.is_running(), "next start")

    @contextmanager
    def broken(self, lines):
        """What starts on one node inside the block begins with these shell lines."""
        file = self.folder / "nodes" / self.rng.choice(NODES)
        file.write_text(lines)
        yield
        file.unlink()

    @property
    def journal(self):
        return self.run_folder / "journal.jsonl"

    def position(self):
        """(Stages done, last step in the journal of the next one)."""
        while self.cluster.job(self.job_id)["JobState"] == "COMPLETED":
            self.stage += 1
            assert self.stage < len(STAGES), "the chain has ended before the storm"
        lines = []
        with suppress(FileNotFoundError):
            lines = self.journal.read_bytes().splitlines(keepends=True)
        # The last ones: among them may be garbage, but not twenty lines of it.
        steps = [row.step for row in map(decode, lines[-20:]) if row is not None]
        return self.stage, max(steps, default=0)

    def start(self):
        """Of the stage's job, which one it is."""
        return self.job_id, self.cluster.job(self.job_id)["Restarts"]

    def is_running(self):
        return self.cluster.job(self.job_id)["JobState"] == "RUNNING"

    def wait(self, condition, event):
        def happens():
            self.position()  # the next stage may have begun
            job = self.cluster.job(self.job_id)
            has_ended = job["JobState"] in ("FAILED", "CANCELLED", "NODE_FAIL")
            never_starts = re.search("[Hh]eld|NeverSatisfied", job["Reason"])
            # What it will be is not known while it completes.
            if job["JobState"] != "COMPLETING" and (has_ended or never_starts):
                self.act_as_status_says()
            return condition()

        def say():
            running = stacks(self.ranks())
            return f"no {event} ({self.fault})\n{self.cluster.logs()}\n{running}"

        wait_until(happens, else_say=say, every_s=0.2)

    def act_as_status_says(self):
        # Its own words decide, so a wrong advice ends the test.
        text = self.cluster.script("launch/status.py", self.run_folder, cwd=self.folder)
        print(f"by hand after {self.fault}: {text.strip()}", flush=True)
        self.by_hand[self.fault] += 1
        if "scontrol release" not in text:
            assert re.search("submit|same command", text), text
            self.submit()
            return
        if "administrator" in text:
            for node in NODES:
                self.command(f"scontrol update nodename={node} state=resume || true")
        self.command("scontrol release {job}; sleep 2")

    def ranks(self):
        pids = []
        for process, variables in self.cluster.processes(SLURM_JOB_ID=self.job_id):
            # The batch script has no step, or one above all others.
            step = int(variables.get("SLURM_STEP_ID", 1 << 32))
            with suppress(psutil.Error):
                if process.parent().name() == "slurmstepd" and step < 1 << 31:
                    pids.append(process.pid)
        return pids


Fault = Callable[[Storm], None]


def commands_of(text, run):
    """The indented lines below each name, as faults."""
    rows = re.findall(r"(\w+):\n((?:    .*\n)+)", text)
    return {name: partial(run, text=lines) for name, lines in rows}


KILL_A_RANK = "kill -KILL {rank}"
# Those of shell lines, then those that need more than a shell.
FAULTS = {
    **commands_of(COMMANDS, Storm.command),
    **commands_of(BETWEEN, Storm.between_attempts),
    **{
        f"{daemon}_away_at_{moment}": partial(Storm.away, daemon=daemon, moment=moment)
        for daemon, moment in product(DAEMONS, MOMENTS)
    },
    "shards_not_mounted": lambda storm: storm.node_broken(without_folder(storm.shards)),
    "memory_too_small": lambda storm: storm.node_broken("ulimit -v 2000000"),
    "storage_hung": partial(Storm.storage_hung, command="true"),
    "storage_hung_and_a_rank_killed": partial(Storm.storage_hung, command=KILL_A_RANK),
    "package_broken": Storm.package_broken,
    "clock_shifted": Storm.clock_shifted,
    "node_dead_and_back": Storm.node_dead_and_back,
    "ports_taken": Storm.ports_taken,
}
# Those after which the same attempt may go on, or that have waited for the next one.
GO_ON = """
suspended storage_hung clock_shifted ports_taken munged_away_at_start
munged_away_at_step munged_away_at_save slurmctld_away_at_start slurmctld_away_at_step
slurmctld_away_at_save slurmd_away_at_start slurmd_away_at_step slurmd_away_at_save
""".split()
# Those after which a person may have to act, as docs/slurm.md says.
BY_HAND = """
batch_script_killed cancelled_in_a_save cancelled_between_attempts folder_of_the_job_deleted
requeuehold_and_release slurmctld_away_at_start
""".split()


@contextmanager
def disk_that_can_hang(folder):
    """A disk of its own, and on it a small one for the checkpoints of each stage."""
    image = folder / "image"
    make = f"truncate -s 1G {image} && mkfs.ext4 -q {image}"
    subprocess.run(make, shell=True, check=True)
    with ExitStack() as disks:
        # fsfreeze works on a file system of a block device, which tmpfs is not.
        disk = disks.enter_context(mounted(folder / "disk", image, "-o", "loop"))
        chain = disk / "chain"
        for stage in STAGES:
            size = ("-t", "tmpfs", "-o", "size=256m")
            checkpoints = chain / stage / "checkpoints"
            disks.enter_context(mounted(checkpoints, "tmpfs", *size))
        yield chain


@pytest.mark.slurm
@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_interruptions_change_no_bit(digits_shards, tmp_path, pytestconfig):
    number = max(1, pytestconfig.getoption("--storm-kills") // 4)
    rng = random.Random(pytestconfig.getoption("--storm-seed"))
    # Each fault once before any comes a second time.
    faults = []
    while len(faults) < number:
        faults += rng.sample([*FAULTS], k=len(FAULTS))
    # For the ports that are taken.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    # Two chains that differ in their places and in MLflow alone.
    steps = STEPS_OF_A_FAULT * (number + 1) // len(STAGES)
    database = tmp_path / "mlflow.db"
    calm = tmp_path / "calm"
    words = {
        "steps": steps,
        "shards": digits_shards,
        "configs": ROOT / "configs/digits",
        "python": breakable_python(tmp_path),
    }
    uri = f"sqlite:///{database}"
    disturbed = CHAIN.format(output=tmp_path / "disk/chain", uri=uri, **words)
    (tmp_path / "chain.yaml").write_text(disturbed)
    (tmp_path / "calm.yaml").write_text(CHAIN.format(output=calm, uri="null", **words))
    # Beside the storm, with what processor time that leaves.
    here = f"nice {sys.executable} launch/local.py --num-procs 2 --config {calm}.yaml"
    with (
        disk_that_can_hang(tmp_path) as chain,
        subprocess.Popen(here.split(), cwd=ROOT) as undisturbed,
        slurm_cluster(more=PARTITIONS) as cluster,
    ):
        storm = Storm(
            cluster=cluster,
            folder=tmp_path,
            chain=chain,
            shards=digits_shards,
            rng=rng,
        )
        storm.submit()
        for fault in faults[:number]:
            storm.suffer(fault, after_steps=rng.randrange(1, 20))
        print(*storm.table(), sep="\n")
        storm.end(steps)
        assert undisturbed.wait() == 0
        runs = [chain / stage for stage in STAGES]
        for run in runs:
            expected = calm / run.name
            assert differences(read_state(run), read_state(expected)) == []
            assert {*os.listdir(run)} - {*os.listdir(expected)} <= {"slurm"}
            # No folder of an interrupted save, and no holder that a next start would wait for.
            assert not [*run.glob("checkpoints/[!s]*")]
            assert not (run / ".lock").read_text()
        # What a training could not send to MLflow is sent here.
        compare = partial(cluster.script, "launch/compare.py", cwd=tmp_path)
        compare("sync", *runs, "--uri", uri)
        compare(*runs)
    with sqlite3.connect(database) as connection:
        statuses = connection.execute("select status from runs").fetchall()
    assert statuses == [("FINISHED",)] * len(STAGES)
    assert {*storm.by_hand} <= {*BY_HAND}, storm.by_hand
