"""Time and bytes of collectives."""

from __future__ import annotations

import pytest

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Kind, Ranks, collective_seconds, wire_bytes


def seconds(kind: Kind, num_bytes: float, nodes: int, **inputs: float) -> float:
    ranks = Ranks(nodes=nodes, per_node=8)
    return collective_seconds(kind, num_bytes, ranks=ranks, cluster=Cluster(**inputs))


def test_two_ranks_send_a_tensor_to_reduce_and_half_to_gather() -> None:
    assert wire_bytes("all_reduce", 100, world=2) == 100
    assert (
        wire_bytes("reduce_scatter", 100, world=2) == wire_bytes("all_gather", 100, world=2) == 50
    )


def test_large_tensors_take_their_bytes_over_the_bandwidth() -> None:
    cards = {"nics_per_node": 4, "nic_gbit_s": 200.0, "network_efficiency": 0.5}
    expected = wire_bytes("all_gather", 1e12, world=16) / (4 * 200e9 / 8 * 0.5)
    assert seconds("all_gather", 1e12, 2, **cards) == pytest.approx(expected, rel=1e-3)


def test_a_node_alone_uses_nvlink() -> None:
    expected = wire_bytes("all_reduce", 1e12, world=8) / 370e9
    assert seconds("all_reduce", 1e12, 1, nic_gbit_s=1.0) == pytest.approx(expected, rel=1e-3)


def test_small_tensors_wait_for_hops() -> None:
    """Gathering goes around a ring of all ranks, an all-reduce through a tree of nodes."""
    gather = [seconds("all_gather", 1.0, nodes) for nodes in (64, 128)]
    reduce = [seconds("all_reduce", 1.0, nodes) for nodes in (64, 128)]
    assert gather[1] / gather[0] == pytest.approx(2, rel=0.01)
    assert reduce[1] / reduce[0] < 1.3
    # NCCL's fastest protocol: 448 hops by NVLink, 63 by network.
    hops = 448 * 0.47 * 1.8 + 63 * 2.7
    assert gather[0] == pytest.approx(1e-6 * (3.6 + hops), rel=1e-3)


def test_one_rank_needs_no_time() -> None:
    ranks = Ranks(nodes=1, per_node=1)
    assert collective_seconds("all_reduce", 1e9, ranks=ranks, cluster=Cluster()) == 0
