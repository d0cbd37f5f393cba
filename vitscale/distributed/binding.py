"""Bind each rank of a node to cores of its own, near its GPU.

Owns: dividing the cores that ranks share, reading sysfs, and setting the affinity of a process.
Leaves out: the number of threads (`threads`). Needs no torch.

Without binding, threads and loader workers of a rank migrate between sockets, and their memory is
then on the other one. Memory needs no policy: Linux places a page near the core that first uses it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vitscale.distributed.threads import RankCpus

SYSFS = Path("/sys")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Where the cores of this node are. A core is one hardware thread, as the kernel counts."""

    numa_node: dict[int, int]
    """Core -> NUMA node; 0 for cores of which sysfs says nothing."""
    physical: dict[int, int]
    """Core -> the lowest core of the same physical one."""


def read_topology(cores: Sequence[int], *, sysfs: Path = SYSFS) -> Topology:
    """Read what sysfs says of some cores; one NUMA node without hyper-threads where it does not."""
    numa_node = dict.fromkeys(cores, 0)
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        for core in _core_list(folder / "cpulist"):
            if core in numa_node:
                numa_node[core] = int(folder.name.removeprefix("node"))
    physical = {}
    for core in cores:
        file = sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        physical[core] = min([core, *_core_list(file)])
    return Topology(numa_node=numa_node, physical=physical)


def gpu_numa_node(address: str, *, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of the PCI device, such as 0000:1b:00.0; None where sysfs does not say."""
    with suppress(OSError, ValueError):
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def own_cores(ranks: Sequence[RankCpus], *, rank: int, topology: Topology) -> tuple[int, ...]:
    """Cores of one rank: its share of those it has in common with other ranks of the node.

    Ranks with the same affinity mask divide it in the order of the NUMA nodes of their GPUs, cores
    in the order of theirs: whole physical cores, equal shares up to one. Nothing changes where

    - nobody shares the rank's cores: SLURM or the launcher has bound it,
    - masks overlap in part,
    - SLURM gave the job fewer CPUs than the mask has: others use the rest,
    - there are fewer cores than ranks.

    topology: of the cores of this rank.
    """
    own = ranks[rank]
    neighbours = [i for i, each in enumerate(ranks) if each.node == own.node]
    sharing = [i for i in neighbours if set(ranks[i].cores) & set(own.cores)]
    if len(sharing) == 1 or any(ranks[i].cores != own.cores for i in sharing):
        return own.cores
    granted = {ranks[i].slurm_scope: ranks[i].slurm_cpus or math.inf for i in sharing}
    if sum(granted.values()) < len(own.cores):
        return own.cores
    units = list(_units(own.cores, topology, num_ranks=len(sharing)))
    if len(units) < len(sharing):
        return own.cores
    sharing.sort(key=lambda i: (_numa_order(ranks[i]), i))
    place, number = sharing.index(rank), len(sharing)
    taken = units[place * len(units) // number : (place + 1) * len(units) // number]
    return tuple(sorted(core for unit in taken for core in unit))


def _numa_order(rank: RankCpus) -> int:
    return -1 if rank.gpu_numa_node is None else rank.gpu_numa_node


def _units(cores: Sequence[int], topology: Topology, *, num_ranks: int) -> Iterator[list[int]]:
    """Physical cores with their hardware threads, or these alone if there are too few, by node."""
    whole: dict[int, list[int]] = {}
    for core in cores:
        whole.setdefault(topology.physical[core], []).append(core)
    units = list(whole.values())
    if len(units) < num_ranks:
        units = [[core] for core in cores]
    yield from sorted(units, key=lambda unit: (topology.numa_node[unit[0]], unit[0]))


def bind(cores: Sequence[int]) -> None:
    """Let all threads of this process, and those and the processes they start, use these cores."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def bound(ranks: Sequence[RankCpus], *, rank: int, sysfs: Path = SYSFS) -> list[RankCpus]:
    """Bind this process to its `own_cores`; what limits all ranks of the node afterwards."""
    topology = read_topology(ranks[rank].cores, sysfs=sysfs)
    after = list(ranks)
    for i, each in enumerate(ranks):
        if each.node == ranks[rank].node and each.cores == ranks[rank].cores:
            after[i] = replace(each, cores=own_cores(ranks, rank=i, topology=topology))
    if after[rank].cores != ranks[rank].cores:
        bind(after[rank].cores)
    return after


def shown_cores(cores: Sequence[int]) -> str:
    """`0-3,8` for (0, 1, 2, 3, 8)."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _core_list(file: Path) -> Iterator[int]:
    """Cores of the kernel's form `0-3,8`; none if the file is missing or of another form."""
    with suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)
