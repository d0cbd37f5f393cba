"""Time and bytes of NCCL collectives by formula.

The formulas are those of NCCL's own cost model, by which it chooses among its algorithms: latency
by the number of hops, bytes over bus bandwidth, the fastest of ring and tree in three protocols
(github.com/NVIDIA/nccl, src/graph/tuning.cc, 2023). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launch.planning.scaling.cluster import Cluster

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Protocol:
    """Latencies in microseconds: of the call, of a hop by NVLink, of a hop by network."""

    base: float
    nvlink_hop: float
    network_hop: float
    bandwidth: float
    """Share of the bus bandwidth."""


RING = (
    _Protocol(base=3.6, nvlink_hop=0.47 * 1.8, network_hop=2.7, bandwidth=0.25),  # LL
    _Protocol(base=10.0, nvlink_hop=1.9, network_hop=4.0, bandwidth=0.92),  # LL128
    _Protocol(base=8.4, nvlink_hop=3.4, network_hop=9.6, bandwidth=1.0),  # Simple
)
# All-reduce only.
TREE = (
    _Protocol(base=4.4, nvlink_hop=0.52 * 1.8, network_hop=5.0, bandwidth=0.9 / 3.8),
    _Protocol(base=4.4, nvlink_hop=1.2, network_hop=8.5, bandwidth=0.9 * 0.915),
    _Protocol(base=0.0, nvlink_hop=28.0, network_hop=50.0, bandwidth=0.9),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Nodes of equal size with one rank per GPU."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


def wire_bytes(kind: Kind, num_bytes: float, *, world: int) -> float:
    """Bytes that each rank sends, at least, for a tensor of `num_bytes` on all ranks together.

    num_bytes: of the whole tensor: what is reduced, or what all have after gathering.
    Thakur et al. 2005, Optimization of Collective Communication Operations in MPICH.
    """
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * num_bytes * (world - 1) / world


def collective_seconds(kind: Kind, num_bytes: float, *, ranks: Ranks, cluster: Cluster) -> float:
    """Time of one collective; 0 on one rank."""
    if ranks.world == 1:
        return 0.0
    return min(_candidates(kind, num_bytes, ranks=ranks, cluster=cluster))


def _candidates(kind: Kind, num_bytes: float, *, ranks: Ranks, cluster: Cluster) -> Iterator[float]:
    bandwidth = bus_gb_s(ranks, cluster) * 1e9
    rounds = 2 if kind == "all_reduce" else 1
    inter = rounds * (ranks.nodes - 1)
    intra = rounds * (ranks.world - 1) - inter
    for ring in RING:
        hops = intra * ring.nvlink_hop + inter * ring.network_hop
        latency = 1e-6 * (ring.base + hops)
        sent = wire_bytes(kind, num_bytes, world=ranks.world)
        yield latency + sent / (bandwidth * ring.bandwidth)
    if kind != "all_reduce":
        return
    for tree in TREE:
        depth = math.ceil(math.log2(ranks.nodes))
        hops = 2 * ((ranks.per_node - 1) * tree.nvlink_hop + depth * tree.network_hop)
        latency = 1e-6 * (tree.base + hops)
        yield latency + 2 * num_bytes / (bandwidth * tree.bandwidth)


def bus_gb_s(ranks: Ranks, cluster: Cluster) -> float:
    """GB/s of the slowest link of a ring that uses all network cards."""
    if ranks.nodes == 1:
        return cluster.nvlink_gb_s
    network = cluster.nics_per_node * cluster.nic_gbit_s / 8 * cluster.network_efficiency
    return min(cluster.nvlink_gb_s, network)
