"""Compare a job with the limits of its partition. Beyond them SLURM would let it wait for ever.

Owns: time, nodes, cores, memory and GPUs against `scontrol show partition` and `sinfo`.
Leaves out: accounts, QoS and what is free now. What SLURM does not say is not refused.

With EnforcePartLimits=NO, the default, sbatch accepts such jobs (man slurm.conf).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.jobs.queue import NoAnswerError, ask_slurm
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings

SHOW_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
SHOW_NODES = ("sinfo", "--all", "--noheader", "--Node", "--format=%R|%N|%c|%m|%G")
MB_PER_GB = 1024
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")
# gpu:4, gpu:h200:8, gpu:h200:8(S:0-1); several are separated by commas.
_GPUS = re.compile(r"\bgpu:(?:([^:,()]+):)?(\d+)(?![^,(])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node as configured, whether or not it is free."""

    num_cpus: int
    memory_mb: int
    num_gpus: dict[str, int]
    """GPU type -> number; '' for GPUs without a type."""

    def gpus_of(self, gpu_type: str | None) -> int:
        return self.num_gpus.get(gpu_type, 0) if gpu_type else sum(self.num_gpus.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Limits of a partition; None: no limit, or not known."""

    name: str
    is_default: bool
    max_minutes: int | None
    max_nodes: int | None
    max_cpus_per_node: int | None
    max_memory_mb: int | None
    nodes: tuple[Node, ...]
    """Empty if SLURM's answer lists none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Excess:
    """One request above the limit of one partition."""

    field: str
    asked: str
    limit: int
    unit: str


def partition_problems(launch: LaunchSettings) -> list[UserError]:
    """`limit_problems` with SLURM's answers; empty if it does not answer."""
    try:
        return limit_problems(
            launch,
            partitions_text=ask_slurm(*SHOW_PARTITIONS),
            nodes_text=ask_slurm(*SHOW_NODES),
            # sbatch prefers it to the option in the script.
            names=os.environ.get("SBATCH_PARTITION") or launch.partition,
        )
    except NoAnswerError:
        return []


def limit_problems(
    launch: LaunchSettings, *, partitions_text: str, nodes_text: str, names: str | None
) -> list[UserError]:
    """One error for each setting that no partition of `names` allows.

    partitions_text, nodes_text: the output of SHOW_PARTITIONS and SHOW_NODES.
    names: separated by commas; None: the default partition.
    The job fits if it fits into one of them. Unknown partitions are left to sbatch.
    """
    if "clusters" in launch.sbatch:
        return []  # the answers are of another cluster
    known = read_partitions(partitions_text, nodes_text)
    wanted = set(names.split(",")) if names else {p.name for p in known if p.is_default}
    partitions = [partition for partition in known if partition.name in wanted]
    if not partitions or len(partitions) < len(wanted):
        return []
    excess = {partition.name: list(_excess(launch, partition)) for partition in partitions}
    if not all(excess.values()):
        return []
    fields = dict.fromkeys(each.field for found in excess.values() for each in found)
    return [_error(field, excess) for field in fields]


def read_partitions(partitions_text: str, nodes_text: str) -> list[Partition]:
    """The partitions with their nodes. Lines and values of unknown form are left out."""
    nodes: dict[str, list[Node]] = {}
    for line in nodes_text.splitlines():
        words = line.split("|", 4)
        # A trailing + marks the smallest of several values.
        if len(words) == 5 and words[2].isdecimal() and words[3].isdecimal():
            node = Node(
                num_cpus=int(words[2]), memory_mb=int(words[3]), num_gpus=_num_gpus(words[4])
            )
            nodes.setdefault(words[0], []).append(node)
    found = []
    for line in partitions_text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if name := fields.get("PartitionName"):
            found.append(
                Partition(
                    name=name,
                    is_default=fields.get("Default") == "YES",
                    max_minutes=_minutes(fields.get("MaxTime", "")),
                    max_nodes=_number(fields.get("MaxNodes", "")),
                    max_cpus_per_node=_number(fields.get("MaxCPUsPerNode", "")),
                    max_memory_mb=_number(fields.get("MaxMemPerNode", "")),
                    nodes=tuple(nodes.get(name, ())),
                )
            )
    return found


def _excess(launch: LaunchSettings, partition: Partition) -> Iterator[_Excess]:
    # The flags of a QoS can lift these two limits.
    if launch.qos is None:
        yield from _above(launch.timeout_min, "timeout_min", partition.max_minutes, "minutes")
        yield from _above(launch.nodes, "nodes", partition.max_nodes, "node(s)")
    num_cpus = launch.tasks_per_node * launch.cpus_per_task
    memory_mb = (launch.mem_gb or 0) * MB_PER_GB
    max_cpus = _least(partition.max_cpus_per_node, [node.num_cpus for node in partition.nodes])
    max_memory = _least(partition.max_memory_mb, [node.memory_mb for node in partition.nodes])
    if max_cpus is not None and num_cpus > max_cpus:
        yield _cpu_excess(launch, max_cpus)
    if max_memory is not None and memory_mb > max_memory:
        yield from _above(launch.mem_gb or 0, "mem_gb", max_memory // MB_PER_GB, "GB per node")
    if not partition.nodes:
        return
    num_gpus = 0 if launch.gpu_request == "none" else launch.gpus_per_node
    max_gpus = max(node.gpus_of(launch.gpu_type) for node in partition.nodes)
    kind = f"{launch.gpu_type} GPUs" if launch.gpu_type else "GPUs"
    yield from _above(num_gpus, "gpus_per_node", max_gpus, f"{kind} per node")
    suitable = [
        node
        for node in partition.nodes
        if node.num_cpus >= num_cpus
        and node.memory_mb >= memory_mb
        and node.gpus_of(launch.gpu_type) >= num_gpus
    ]
    # None at all is an excess of another field.
    if suitable:
        yield from _above(launch.nodes, "nodes", len(suitable), "node(s) of this size")


def _above(asked: int, field: str, limit: int | None, unit: str) -> Iterator[_Excess]:
    if limit is not None and asked > limit:
        yield _Excess(field=field, asked=f"{asked} {unit}", limit=limit, unit=unit)


def _cpu_excess(launch: LaunchSettings, max_cpus: int) -> _Excess:
    asked = f"{launch.tasks_per_node} x {launch.cpus_per_task} cores per node"
    if launch.tasks_per_node > max_cpus:
        return _Excess(field="tasks_per_node", asked=asked, limit=max_cpus, unit="tasks")
    return _Excess(
        field="cpus_per_task",
        asked=asked,
        limit=max_cpus // launch.tasks_per_node,
        unit="cores per task",
    )


def _error(field: str, excess: dict[str, list[_Excess]]) -> UserError:
    first = {
        name: next((each for each in found if each.field == field), None)
        for name, found in excess.items()
    }
    above = {name: each for name, each in first.items() if each is not None}
    example = next(iter(above.values()))
    return UserError(
        f"{example.asked} exceed the limit of partition {' and '.join(above)}; SLURM would never "
        "start the job",
        where=f"launch.{field}",
        allowed=", ".join(
            f"at most {each.limit} {each.unit} in {name}" for name, each in above.items()
        ),
        next_step="lower it; the job requeues itself at its time limit and resumes"
        if field == "timeout_min"
        else f"lower launch.{field}, or choose another launch.partition",
    )


def _least(limit: int | None, of_nodes: Sequence[int]) -> int | None:
    """The partition's limit or that of its largest node, whichever is lower."""
    limits = [each for each in (limit, max(of_nodes, default=None)) if each is not None]
    return min(limits, default=None)


def _minutes(text: str) -> int | None:
    """Minutes of [days-]hours:minutes:seconds; None for UNLIMITED and anything else."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes + (seconds > 0)


def _number(text: str) -> int | None:
    """None for UNLIMITED and anything else. SLURM writes 0 for no limit of memory."""
    return int(text) if text.isdecimal() and int(text) else None


def _num_gpus(gres: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, number in _GPUS.findall(gres):
        found[kind] = found.get(kind, 0) + int(number)
    return found
