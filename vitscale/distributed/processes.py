"""Count cores and threads, inspect processes of this machine, map a function over processes.

Needs no torch.
Leaves out: work that several machines share (`data_prep.steps.work`).
"""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import psutil

from vitscale.config.errors import UserError
from vitscale.distributed.fork_server import accept_signals, worker_context

Item = TypeVar("Item")
Result = TypeVar("Result")
PENDING_PER_WORKER = 2
# As in the batch script; below what a socket without a port of its own gets.
PORTS = range(20_000, 32_000)
# Reading less than this takes no longer than starting processes.
SMALL_BYTES = 256 << 20


def node_name() -> str:
    """This node's name in SLURM, which may differ from its host name; else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def free_port() -> int:
    """A TCP port that nothing uses at the moment, of those that systems give to no other socket.

    One of theirs (32768 and more) is often taken before the process that is to listen there has
    started: 15 of 300 times beside 800 other sockets.
    """
    for port in random.sample(PORTS, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port from {PORTS.start} to {PORTS.stop - 1}")


def num_cores() -> int:
    """Cores that this process may use; containers and batch systems allow fewer than exist."""
    return len(os.sched_getaffinity(0))


def num_gpus(driver: Path = Path("/proc/driver/nvidia")) -> int:
    """NVIDIA GPUs of this machine, by its driver."""
    gpus = driver / "gpus"
    return len(list(gpus.iterdir())) if gpus.is_dir() else 0


def nvidia_driver(driver: Path = Path("/proc/driver/nvidia")) -> str | None:
    """Version of the NVIDIA driver of this machine; None without one."""
    with suppress(OSError, subprocess.SubprocessError):
        if (driver / "version").exists():
            text = (driver / "version").read_text()
        else:  # WSL
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            text = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
        if found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
            return found.group()
    return None


def threads_per_rank(
    *, world_size: int, local_world_size: int, environment: Mapping[str, str] = os.environ
) -> int:
    """CPU threads of this rank: the CPUs of its SLURM task, else its share of the usable cores.

    OMP_NUM_THREADS limits them further.
    """
    threads = num_cores() // local_world_size
    # Where srun started each rank; a launcher inside one task shares its CPUs.
    if environment.get("SLURM_STEP_NUM_TASKS") == str(world_size):
        threads = min(num_cores(), int(environment.get("SLURM_CPUS_PER_TASK", threads)))
    # A list has one number for each level of nested regions.
    limit = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if limit.isascii() and limit.isdecimal():
        threads = min(threads, int(limit))
    return max(1, threads)


def process_state(pid: int) -> str:
    """The kernel's state of a process, such as `running`, `stopped`, `disk-sleep`; or `gone`."""
    try:
        state: str = psutil.Process(pid).status()
        return state
    except psutil.NoSuchProcess:
        return "gone"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs. A zombie (not reaped by its parent) is dead."""
    return psutil.pid_exists(pid) and process_state(pid) != "zombie"


def descendants(pid: int) -> list[int]:
    """Processes that a process of this machine has started, and theirs."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def workers_for(num_bytes: int, *, num_workers: int | None) -> int | None:
    """`num_workers`; where it is None, 1 for inputs too small to be worth starting processes."""
    return 1 if num_workers is None and num_bytes < SMALL_BYTES else num_workers


def ordered_results(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int | None
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, result) in the order of the items, with at most a few items pending.

    num_workers: None for one per core; 1 works in this process. `function` and items are pickled;
    neither may come from the main script.
    """
    num_workers = num_workers or num_cores()
    items = iter(items)
    first = list(islice(items, 2))
    if num_workers == 1 or len(first) < 2:
        for item in (*first, *items):
            yield item, function(item)
        return
    module = getattr(function, "func", function).__module__  # of a partial: of what it calls
    context = worker_context([module])
    # The pool ends its processes with SIGTERM.
    with ProcessPoolExecutor(num_workers, context, initializer=accept_signals) as pool:
        pending: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in (*first, *items):
                pending.append((item, pool.submit(function, item)))
                if len(pending) >= PENDING_PER_WORKER * num_workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, probably for lack of memory",
                where="num_workers",
                next_step="run the command again, with fewer workers if it recurs",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
