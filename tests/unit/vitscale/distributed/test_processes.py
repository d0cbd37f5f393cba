"""Usable cores, liveness of processes, and free ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from vitscale.distributed.processes import (
    free_port,
    is_alive,
    process_state,
    threads_per_rank,
)


@pytest.mark.parametrize(
    ("local_ranks", "environment", "threads"),
    [
        (1, {}, 8),
        (2, {}, 4),
        (16, {}, 1),
        (2, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "3"}, 3),
        (2, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "12"}, 8),
        # A launcher inside one task of each node, and one in a batch script.
        (2, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_CPUS_PER_TASK": "8"}, 4),
        (2, {"SLURM_CPUS_PER_TASK": "8"}, 4),
        (1, {"OMP_NUM_THREADS": "4,2"}, 4),
        (4, {"OMP_NUM_THREADS": "4"}, 2),
        *((1, {"OMP_NUM_THREADS": text}, 8) for text in ("", "-1", "²")),
        (1, {"OMP_NUM_THREADS": "0"}, 1),
    ],
)
def test_ranks_share_the_cores_of_a_node(
    monkeypatch: pytest.MonkeyPatch, local_ranks: int, environment: dict[str, str], threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "environ", environment)
    assert threads_per_rank(world_size=4, local_world_size=local_ranks) == threads


def test_a_zombie_counts_as_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid) and is_alive(os.getpid()) and is_alive(1)
    process.kill()
    wait_until(lambda: process_state(process.pid) == "zombie")
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid) and process_state(process.pid) == "gone"


def test_a_free_port_is_none_that_other_sockets_get() -> None:
    port = free_port()
    with socket.create_server(("", port)), socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        assert free_port() != port
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert port < first
