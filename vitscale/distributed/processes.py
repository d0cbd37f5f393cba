"""Count cores, GPUs and threads, inspect processes, find a free port. Needs no torch."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import psutil

# As in the batch script; below what a socket without a port of its own gets.
PORTS = range(20_000, 32_000)


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


def num_gpus() -> int:
    """NVIDIA GPUs of this machine, by its driver."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def threads_per_rank(*, world_size: int, local_world_size: int) -> int:
    """CPU threads of this rank: the CPUs of its SLURM task, else its share of the usable cores.

    OMP_NUM_THREADS limits them further.
    """
    threads = num_cores() // local_world_size
    # Where srun started each rank; a launcher inside one task shares its CPUs.
    if os.environ.get("SLURM_STEP_NUM_TASKS") == str(world_size):
        threads = min(num_cores(), int(os.environ.get("SLURM_CPUS_PER_TASK", threads)))
    # A list has one number for each level of nested regions.
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if limit.isdecimal():
        threads = min(threads, int(limit))
    return max(1, threads)


def process_state(pid: int) -> str:
    """The kernel's state of a process, such as `running`, `stopped`, `disk-sleep`; or `gone`."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs. A zombie (not reaped by its parent) is dead."""
    return process_state(pid) not in ("gone", "zombie")


def descendants(pid: int) -> list[int]:
    """Processes that a process of this machine has started, and theirs."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
