"""Measure the seconds from a killed rank to the next step of its training, and where they go.

    python benchmarks/restart_time.py --work /disk/to/measure --json results.json
    python benchmarks/restart_time.py --local

Two ranks train a small ViT on a real SLURM of two nodes, which is started on this machine; with
--local as `vitscale launch --local`, which is started again as soon as it has ended. One of them
gets SIGKILL at a random step. The marks of the table are first calls of functions, which a module
in the ranks' PYTHONPATH notes with the time and the processor seconds; rank 0 counts.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.measuring import ROOT, parser_of, run_benchmark, run_command, spread

CLOCK = "RESTART_CLOCK"
"""Variable with the folder of the marks."""
# What ends at each mark: the first call of a function in rank 0 or in `requeue_decision`, or what
# `measure` and the batch script note.
PYTHON = "start of Python"
STEP = "first step"
# The process that SLURM's batch script runs after srun has ended.
AFTER_MARKS = {
    "after: imports": "launch.jobs.queue:job_fields",
    "after: decision": "launch.jobs.queue:requeue",
}
# In the order in which a start calls them; submitit is there with SLURM alone.
RANK_MARKS = {
    "rank: imports of submitit": "launch.jobs.submission:StageJob.__call__",
    "rank: imports of the script": "vitscale.config.command_line:load_command",
    "rank: configuration, torch": "vitscale.data.loader:start_loader_server",
    "rank: imports of deepspeed, timm": "vitscale.distributed.watchdog:watched_ranks",
    "rank: process group": "vitscale.training.session:TrainingSession.__init__",
    "rank: index": "vitscale.checkpoint.store:run_folder_lock",
    "rank: lock, hashes of the checkpoint": "vitscale.training.session:build_model",
    "rank: model": "vitscale.training.session:build_engine",
    "rank: engine": "vitscale.training.session:restore_engine",
    "rank: checkpoint": "vitscale.training.session:TrainingSession._open_log",
    "rank: log and tracker": "vitscale.data.loader:training_batches",
    "rank: loader": "vitscale.engine.device_batches:DeviceBatches.__next__",
    "rank: first batch": "vitscale.training.session:TrainingSession.update",
    STEP: "vitscale.training.session:TrainingSession.end_step",
}
SETTINGS = (
    "name=restart",
    # Far more steps than it takes: the benchmark ends the run.
    "schedule.epochs=null",
    "schedule.steps=1000000",
    "schedule.warmup_steps=5",
    "data.global_batch=32",
    # Training alone: an evaluation would have to be opened again, too.
    "evaluate=[]",
    "engine.device=cpu",
    "engine.num_threads=1",
    # Often, so that each attempt resumes from a checkpoint of the one before.
    "checkpoint.every_steps=25",
    "tracking.log_every_steps=1",
    "tracking.uri=null",
)
LAUNCH = (
    "launch.nodes=2",
    "launch.tasks_per_node=1",
    # No limit stops the run before the last round.
    "launch.max_requeues=1000",
    "launch.timeout_min=50",
)

# The module that Python imports at its start.
NOTES = f"""
import sys
sys.path.append({str(ROOT)!r})
from benchmarks.restart_time import note_first_calls
note_first_calls()
"""


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument(
        "--local", action="store_true", help="without SLURM, as vitscale launch --local"
    )
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    options = parser.parse_args()
    if options.toy:
        options.local = True
        options.rounds = 1
    run_benchmark(options, lambda work: measure(work, options), "torch", "deepspeed")


# ---- in the processes of the run --------------------------------------------------------------


def note_first_calls() -> None:
    """Note the start of this process, and the first call of each function of the marks."""
    # Every Python of the run comes here: the launcher and the tools of SLURM note nothing.
    if is_after():
        marks = AFTER_MARKS
    elif rank_number() is not None:
        marks = RANK_MARKS
    else:
        return
    note(PYTHON)

    modules: dict[str, dict[str, str]] = {}
    for mark, target in marks.items():
        module, _, function = target.partition(":")
        modules.setdefault(module, {})[function] = mark
    # Before Python's own finders, which would find the modules first.
    sys.meta_path.insert(0, Finder(modules))


def is_after() -> bool:
    """Whether this is the process that decides, after srun, what becomes of the job."""
    return "launch.jobs.requeue_decision" in sys.orig_argv


def rank_number() -> str | None:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID"))


class Finder(importlib.abc.MetaPathFinder):
    """Replaces functions of modules by ones that note their first call."""

    def __init__(self, modules: dict[str, dict[str, str]]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        # None sends Python on to its other finders.
        if name not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        # As soon as the module has run: others then import the replaced functions by name.
        def execute_and_replace(module: Any) -> None:
            execute(module)
            for dotted, mark in self.modules[name].items():
                *owners, function = dotted.split(".")
                owner = module
                for part in owners:
                    owner = getattr(owner, part)
                original = getattr(owner, function)
                setattr(owner, function, noting(original, mark))

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def noting(function: Callable[..., Any], mark: str) -> Callable[..., Any]:
    """The same function, which notes its first call."""
    is_noted = False

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal is_noted
        if not is_noted:
            is_noted = True
            note(mark)
        return function(*arguments, **options)

    return call


def note(mark: str) -> None:
    rank = rank_number()
    # SLURM sets SLURM_PROCID in the batch script, too.
    if is_after():
        rank = "after"
    row = {
        "mark": mark,
        "time": time.time(),
        "cpu": time.process_time(),
        "rank": rank,
        "pid": os.getpid(),
    }
    # One short write to a file that is opened for appending: lines of two ranks never mix.
    with open(Path(os.environ[CLOCK]) / "marks.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


# ---- outside of them --------------------------------------------------------------------------


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill a rank in each round. Returns, by mark, the seconds of all rounds."""
    shards = make_shards(work)
    marks = work / "marks"
    marks.mkdir()
    # Python imports this module at its start, before anything of the run.
    (marks / "sitecustomize.py").write_text(NOTES)
    noted = {CLOCK: str(marks), "PYTHONPATH": f"{marks}:{ROOT}"}
    training = [
        "--config",
        str(ROOT / "configs/digits/pretrain.yaml"),
        *SETTINGS,
        f"data.path={shards}",
        f"output={work / 'run'}",
    ]

    rounds: list[dict[str, Any]] = []
    kind = LocalRun if options.local else SlurmRun
    with kind(training, noted) as run:
        rng = random.Random(options.seed)
        for _ in range(options.rounds):
            result = kill_and_wait(run, marks / "marks.jsonl", rng)
            rounds.append(result)
            # At once: with SLURM a round takes minutes.
            print(json.dumps(result), flush=True)
    print(table(rounds), flush=True)
    return {"measurements": rounds}


def make_shards(work: Path) -> Path:
    images = work / "images"
    shards = work / "shards"
    run_command([sys.executable, "data_prep/make_corpus.py", "digits", images])
    command = [
        sys.executable,
        "data_prep/make_shards.py",
        "--config",
        "configs/data/digits.yaml",
        f"source.path={images}",
        f"output={shards}",
    ]
    run_command(command)
    return shards


class LocalRun:
    """The run as `vitscale launch --local`, started again when it has ended."""

    def __init__(self, training: list[str], noted: dict[str, str]) -> None:
        self.command = [sys.executable, str(ROOT / "launch/local.py"), *training]
        self.command += ["--num-procs", "2"]
        self.environment = os.environ | noted

    def __enter__(self) -> LocalRun:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def restart(self) -> dict[str, float]:
        """Returns when what ended, unix seconds."""
        # Without a pause, as no scheduler is: what remains is the launcher's own time.
        self.process.wait()
        ended = time.time()
        self.start()
        return {"launcher ended": ended}


class SlurmRun:
    """The run as a job of a SLURM of two nodes, which requeues itself."""

    def __init__(self, training: list[str], noted: dict[str, str]) -> None:
        # Needs SLURM and pytest, which --local does not.
        from tests.scripts.slurm.conftest import slurm_cluster

        self.started = Path(noted[CLOCK]) / "started"
        # In the job's script: what this process has in its environment need not reach a job.
        setup = [f"export {name}={value}" for name, value in noted.items()]
        setup.append(f"date +%s.%N >> {self.started}")
        self.training = [*training, *LAUNCH, f"launch.setup={json.dumps(setup)}"]
        self.cluster = slurm_cluster()

    def __enter__(self) -> SlurmRun:
        cluster = self.cluster.__enter__()
        cluster.script("launch/slurm.py", *self.training, cwd=self.started.parent)
        return self

    def __exit__(self, *error: Any) -> None:
        self.cluster.__exit__(*error)

    def restart(self) -> dict[str, float]:
        """Returns when what ended, unix seconds."""
        before = self.start_times()
        while (times := self.start_times()) == before:
            time.sleep(0.1)
        return {"SLURM: requeue, start of the job": float(times[-1])}

    def start_times(self) -> list[str]:
        """One of each start of the job so far, noted by its script."""
        if not self.started.exists():
            return []
        return self.started.read_text().split()


def kill_and_wait(
    run: LocalRun | SlurmRun, marks: Path, rng: random.Random
) -> dict[str, Any]:
    """Kill a rank a random time after its first step, and wait for the next attempt's.

    Returns the load, and for each mark the seconds since the one before and rank 0's processor
    seconds.
    """
    # Of the newest attempt, since the marks are in the order of time.
    pids = wait_for_first_step(marks, since=0.0)
    # At any moment of a step or of a save, as a node fails.
    time.sleep(rng.uniform(2.0, 6.0))
    victim = rng.choice([0, 1])
    # Opened before the kill: the process may be gone, and its number taken, right after it.
    other = os.pidfd_open(pids[1 - victim])
    load = os.getloadavg()[0]

    os.kill(pids[victim], signal.SIGKILL)
    killed = time.time()
    # The end of a process makes its descriptor readable; this is not its parent, so cannot wait.
    select.select([other], [], [])
    times = {"other rank ended": time.time()}
    os.close(other)

    times |= run.restart()
    wait_for_first_step(marks, since=killed)

    # Processor seconds of each process so far.
    used: dict[int, float] = {}
    cpu: dict[str, float] = {}
    for row in read_marks(marks):
        if row["time"] < killed or row["rank"] not in ("0", "after"):
            continue
        mark = row["mark"]
        pid = row["pid"]
        if mark == PYTHON:
            mark = "rank: start"
            # The decision starts when srun has ended.
            if row["rank"] == "after":
                mark = "srun ended"
        # Helpers of a process start a Python of their own later.
        times.setdefault(mark, row["time"])
        cpu.setdefault(mark, row["cpu"] - used.get(pid, 0.0))
        used[pid] = row["cpu"]

    # Sorted by time, since the marks come from several processes.
    seconds: dict[str, float] = {}
    last = killed
    for mark in sorted(times, key=times.__getitem__):
        seconds[mark] = times[mark] - last
        last = times[mark]
    return {
        "victim": victim,
        "load": load,
        "total": last - killed,
        "seconds": seconds,
        "cpu": cpu,
    }


def wait_for_first_step(marks: Path, *, since: float) -> dict[int, int]:
    """Returns the process of each rank."""
    while True:
        pids = {}
        for row in read_marks(marks):
            if row["time"] > since and row["mark"] == STEP:
                pids[int(row["rank"])] = row["pid"]
        if len(pids) == 2:
            return pids
        time.sleep(0.1)


def read_marks(path: Path) -> list[dict[str, Any]]:
    # Until the first process has noted its start, there is no file.
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rounds: list[dict[str, Any]]) -> str:
    """Seconds of each mark since the one before, and those of the processor."""
    lines = [
        "| Until | Seconds, least / median / most | Processor seconds |",
        "|---|---|---|",
    ]
    for mark in rounds[0]["seconds"]:
        # A mark may be missing in a round: a rank that ends early has none of the later ones.
        seconds = [row["seconds"][mark] for row in rounds if mark in row["seconds"]]
        busy = [row["cpu"][mark] for row in rounds if mark in row["cpu"]]
        cell = ""
        # What is noted from outside, as the end of a process, has no processor time.
        if busy:
            cell = f"{median(busy):.1f}"
        lines.append(f"| {mark} | {spread(seconds, '.1f')} | {cell} |")

    totals = [row["total"] for row in rounds]
    lines.append(f"| all | {spread(totals, '.1f')} | |")
    # A high load makes every row longer: results at different loads do not compare.
    loads = [row["load"] for row in rounds]
    return "\n".join([*lines, f"load average: {spread(loads, '.1f')}"])


if __name__ == "__main__":
    main()
