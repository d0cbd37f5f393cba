"""Who is named as silent or behind, and of which kind an error is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vitscale.config.errors import FailureKind, PeerLostError, UserError, WorkerError
from vitscale.distributed import watchdog as watchdog_module
from vitscale.distributed.events import Failure
from vitscale.distributed.watchdog import Watchdog, kind_and_text, names
from vitscale.distributed.world import World

RANKS_PER_NODE = 8


class Ranks:
    """Watchdogs of one process, which take turns instead of running threads."""

    def __init__(self, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        store = dist.HashStore()
        store.compare_set(watchdog_module.FAILURE, "", "")
        self.dogs = []
        for rank in range(num_ranks):
            node = f"n{rank // RANKS_PER_NODE}"
            monkeypatch.setattr(watchdog_module, "node_name", lambda node=node: node)
            world = World(
                rank=rank,
                world_size=num_ranks,
                local_rank=rank % RANKS_PER_NODE,
                local_world_size=RANKS_PER_NODE,
                device=torch.device("cpu"),
                store=store,
            )
            self.dogs.append(Watchdog(world, timeout_min=10))
            self.dogs[rank]._send(ended=False)

    def turn(self, among: Sequence[int] | None = None) -> Failure | None:
        """One period of some ranks; the first failure that one finds."""
        found = None
        for rank in range(len(self.dogs)) if among is None else among:
            self.dogs[rank]._send(ended=False)
            found = found or self.dogs[rank]._read() or self.dogs[rank]._find()
        return found

    def turns(self, number: int, among: Sequence[int] | None = None) -> Failure | None:
        for _ in range(number):
            if found := self.turn(among):
                return found
        return None


def test_a_silent_node_is_named_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(24, monkeypatch)
    ranks.dogs[7].step = 5
    assert ranks.turns(3) is None
    rest = [rank for rank in range(24) if rank // 8 != 1]
    assert ranks.turns(15, rest) is None  # 45 s
    found = ranks.turns(4, rest)
    assert found is not None and found.kind is FailureKind.KILLED
    assert found.what.startswith("all of n1 (rank 8 to 15) has sent no heartbeat for 45 s")
    assert (found.rank, found.node, found.step, found.reported_by) == (8, "n1", 5, 7)


def test_a_lost_peer_is_named_within_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch)
    ranks.turn()
    ranks.dogs[0]._is_lost = True
    found = ranks.turns(3, [0, 1, 3])
    assert found is not None and found.what == "rank 2 on n0 sends no heartbeat any more"


def test_the_rank_that_is_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch)
    for rank, dog in enumerate(ranks.dogs):
        dog.mark("waiting for data")
        if rank != 2:
            dog.mark("training")
    assert ranks.turns(140) is None  # 7 minutes
    found = ranks.turns(2)
    assert found is not None and found.kind is FailureKind.HANG
    assert found.what == "rank 2 on n0 has kept the others waiting for 420 s (waiting for data)"
    ranks.dogs[2].mark("training")
    ranks.dogs[2]._send(ended=False)
    assert ranks.turns(300) is None, "all at the same place: collectives have timeouts"


def test_ranks_are_named_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: Any = Ranks(80, monkeypatch).dogs[0]._all()
    assert names(beats, [3, 9]) == "rank 3 on n0, rank 9 on n1"
    text = names(beats, [rank for rank in range(80) if rank != 9])
    assert text.startswith("all of n0 (rank 0 to 7), rank 8, 10, 11")
    assert text.endswith(" and ranks on 6 more nodes")


def test_kinds_of_errors() -> None:
    lost = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    for error, kind in {
        RuntimeError(lost): FailureKind.PEER_LOST,
        PeerLostError("x"): FailureKind.PEER_LOST,
        torch.OutOfMemoryError("x"): FailureKind.DEVICE,
        OSError(28, "x"): FailureKind.STORAGE,
        WorkerError("x"): FailureKind.WORKER,
        KeyError("x"): FailureKind.OTHER,
    }.items():
        assert kind_and_text(error)[0] is kind
    text = "data.path: no such file"
    assert kind_and_text(UserError("no such file", where="data.path"))[1] == text
