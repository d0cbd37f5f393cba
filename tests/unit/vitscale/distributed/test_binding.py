"""Cores of a rank: disjoint, near its GPU, and within what others left."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from vitscale.distributed.binding import (
    bind,
    bound,
    gpu_numa_node,
    own_cores,
    read_topology,
    shown_cores,
)
from vitscale.distributed.threads import RankCpus

# Two sockets of four physical cores with two hardware threads each, numbered as Intel's are.
CORES = tuple(range(16))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Cores 0-3 and their siblings 8-11 on node 0, 4-7 and 12-15 on node 1; two GPUs on each."""
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for core in CORES:
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    for gpu, node in enumerate((1, 0, 1, 0)):
        folder = tmp_path / f"bus/pci/devices/0000:{gpu:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def ranks_of(number: int, sysfs: Path, *, cores: tuple[int, ...] = CORES) -> list[RankCpus]:
    """Ranks of one node that share the cores, each with its GPU."""
    nodes = [gpu_numa_node(f"0000:{gpu:02x}:00.0", sysfs=sysfs) for gpu in range(number)]
    return [RankCpus(node="a", cores=cores, gpu_numa_node=node) for node in nodes]


def divided(ranks: list[RankCpus], sysfs: Path) -> list[tuple[int, ...]]:
    topology = read_topology(CORES, sysfs=sysfs)
    return [own_cores(ranks, rank=rank, topology=topology) for rank in range(len(ranks))]


def test_ranks_get_whole_cores_on_the_node_of_their_gpu(sysfs: Path) -> None:
    assert divided(ranks_of(4, sysfs), sysfs) == [
        (4, 5, 12, 13),
        (0, 1, 8, 9),
        (6, 7, 14, 15),
        (2, 3, 10, 11),
    ]


@pytest.mark.parametrize("number", [2, 3, 5, 8, 11, 16])
def test_every_core_belongs_to_one_rank(number: int, sysfs: Path) -> None:
    shares = divided(ranks_of(number, sysfs), sysfs)
    assert sorted(core for share in shares for core in share) == list(CORES)
    sizes = sorted(map(len, shares))
    # By whole physical cores as long as there is one for each rank.
    assert sizes[-1] - sizes[0] <= (2 if number <= 8 else 1)


def test_unknown_gpus_and_no_sysfs_still_divide(tmp_path: Path) -> None:
    ranks = [RankCpus(node="a", cores=(0, 1, 2, 3))] * 2
    topology = read_topology((0, 1, 2, 3), sysfs=tmp_path)
    assert own_cores(ranks, rank=1, topology=topology) == (2, 3)
    assert gpu_numa_node("0000:00:00.0", sysfs=tmp_path) is None


def test_a_gpu_without_a_node_is_unknown(sysfs: Path) -> None:
    """A machine with one NUMA node says -1."""
    (sysfs / "bus/pci/devices/0000:00:00.0/numa_node").write_text("-1\n")
    assert gpu_numa_node("0000:00:00.0", sysfs=sysfs) is None


def test_other_nodes_have_cores_of_their_own(sysfs: Path) -> None:
    ranks = ranks_of(2, sysfs)
    ranks += [replace(each, node="b") for each in ranks]
    shares = divided(ranks, sysfs)
    assert shares[:2] == shares[2:]
    assert not set(shares[0]) & set(shares[1])


def slurm(ranks: list[RankCpus], cpus: int) -> list[RankCpus]:
    """Each rank in a task of its own, with so many CPUs."""
    return [
        replace(each, slurm_cpus=cpus, slurm_scope=("7", "0", str(task)))
        for task, each in enumerate(ranks)
    ]


def test_what_slurm_has_bound_stays(sysfs: Path) -> None:
    ranks = [RankCpus(node="a", cores=(0, 1)), RankCpus(node="a", cores=(2, 3))]
    assert divided(ranks, sysfs) == [(0, 1), (2, 3)]
    shared = ranks_of(4, sysfs)
    assert divided(slurm(shared, 4), sysfs) == divided(shared, sysfs)
    # SLURM gave half of the node and bound nothing: another job may use any core.
    assert divided(slurm(shared, 2), sysfs) == [CORES] * 4


def test_masks_that_overlap_in_part_stay(sysfs: Path) -> None:
    ranks = [RankCpus(node="a", cores=(0, 1, 2)), RankCpus(node="a", cores=(2, 3))]
    assert divided(ranks, sysfs) == [(0, 1, 2), (2, 3)]


def test_too_few_cores_are_shared(sysfs: Path) -> None:
    assert divided(ranks_of(3, sysfs, cores=(0, 1)), sysfs) == [(0, 1)] * 3


def test_threads_and_processes_follow_the_binding(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    found: dict[str, set[int]] = {}
    started, ready = threading.Event(), threading.Event()

    def report() -> None:
        started.set()
        ready.wait(10)
        found["thread"] = os.sched_getaffinity(0)

    thread = threading.Thread(target=report)
    thread.start()
    started.wait(10)
    ranks = [RankCpus(node="a", cores=tuple(sorted(before)))] * 2
    try:
        own = bound(ranks, rank=1, sysfs=tmp_path)[1].cores
        ready.set()
        thread.join()
        command = ["grep", "Cpus_allowed_list", "/proc/self/status"]
        child = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert os.sched_getaffinity(0) == found["thread"] == set(own)
        assert len(own) == (len(before) + 1) // 2
        assert child.split()[1] == shown_cores(own)
    finally:
        ready.set()
        bind(tuple(before))


def test_cores_are_shown_as_ranges() -> None:
    assert shown_cores((0, 1, 2, 3, 8)) == "0-3,8"
    assert shown_cores((5,)) == "5"
