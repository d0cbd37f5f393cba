"""The record of what happened to a run; who is named as silent or behind, and why."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.tables import rows
from vitscale.config.errors import (
    FailureKind,
    NodeError,
    PeerLostError,
    StorageError,
    UserError,
    WorkerError,
    on_node,
)
from vitscale.distributed import events, watchdog
from vitscale.distributed.events import (
    ATTEMPT_VARIABLE,
    Failure,
    append_event,
    cause,
    read_events,
    read_failures,
    read_start,
    record_failure,
    record_start,
)
from vitscale.distributed.processes import node_name
from vitscale.distributed.watchdog import (
    Watchdog,
    collectives_begun,
    kind_and_text,
    record_start_failure,
)
from vitscale.distributed.world import HERE, SAVES, World, control_group


def test_failures_are_read_as_written_by_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(
        kind=FailureKind.STORAGE,
        what="no space",
        rank=3,
        node="n2",
        step=7,
        reported_by=3,
    )
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    for attempt in ("17/0", "17/1"):
        monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
        record_failure(tmp_path, failure)
    record_start(tmp_path, first_step=0, total_steps=9)
    assert len(flushed) == 3
    assert [found.attempt for found in read_failures(tmp_path)] == ["17/0", "17/1"]
    (found,) = read_failures(tmp_path, attempt="17/1")
    assert (
        found == replace(failure, attempt="17/1", time=found.time)
        and found.time > 1.7e9
    )
    assert found.text == "no space (storage, step 7)"


def test_events_of_all_nodes_are_read_in_order_without_cut_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, event in (("n2", "one"), ("n1", "two"), ("n2", "three")):
        monkeypatch.setattr(events, "node_name", lambda node=node: node)
        append_event(tmp_path, event, {})
        with open(tmp_path / "events/n2.jsonl", "ab") as file:
            file.write(b'[1]\n{"event": "cut')
        time.sleep(0.002)
    assert [row["event"] for row in read_events(tmp_path)] == ["one", "two", "three"]


def test_the_last_start_counts(tmp_path: Path) -> None:
    assert read_start(tmp_path) is None
    record_start(tmp_path, first_step=0, total_steps=9)
    record_failure(tmp_path, Failure(kind=FailureKind.OTHER, what="an error"))
    record_start(tmp_path, first_step=2, total_steps=12)
    append_event(tmp_path, "started", {"first_step": "none"})
    start = read_start(tmp_path)
    assert start is not None and (start.first_step, start.total_steps) == (2, 12)
    assert start.time > 1.7e9


@rows("""
- [kinds, expected]
- [[peer lost, other, worker, storage], worker]
- [[peer lost, hang, other], other]
- [[peer lost, hang], hang]
- [[hang, killed from outside], killed from outside]
- [[peer lost], peer lost]
""")
def test_the_cause_is_the_report_that_knows_most(
    kinds: list[str], expected: str
) -> None:
    reports = [Failure(kind=FailureKind(kind), what=kind) for kind in kinds]
    found = cause(reports)
    assert found is not None and found.kind == expected


def test_what_a_rank_says_of_itself_is_the_cause() -> None:
    """Others saw only that its process was gone."""
    seen = Failure(kind=FailureKind.KILLED, what="gone", rank=0, reported_by=1)
    own = Failure(kind=FailureKind.OTHER, what="an error", rank=0, reported_by=0)
    assert cause([seen, own]) == own
    assert cause([seen, replace(own, rank=2, reported_by=2)]) == seen


# ---- the watchdog -------------------------------------------------------------------------------

RANKS_PER_NODE = 8
ALONE = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}


class Ranks:
    """Watchdogs of one process, which take turns instead of running threads."""

    def __init__(self, num_ranks: int) -> None:
        store, self.dogs = dist.HashStore(), list[Watchdog]()
        for rank in range(num_ranks):
            store.set(f"{HERE}/{rank}", f"n{rank // RANKS_PER_NODE}")
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

    def turns(self, number: int, among: Sequence[int]) -> Failure | None:
        """Periods of some ranks, until all of them know the same failure."""
        for _ in range(number):
            for rank in among:
                self.dogs[rank]._send(ended=False)
                self.dogs[rank]._find()
            if found := self.dogs[among[0]]._read():
                assert all(self.dogs[rank]._read() == found for rank in among)
                return found
        return None


def test_a_silent_node_is_named() -> None:
    ranks = Ranks(24)
    ranks.dogs[0].step = 5
    rest = [rank for rank in range(24) if rank // 8 != 1]
    assert ranks.turns(3, range(24)) is None
    assert ranks.turns(15, rest) is None  # 45 s
    found = ranks.turns(1, rest)
    assert found is not None and found.kind is FailureKind.KILLED
    assert found.what.startswith(
        "rank 8 on n1 (and 7 more) has sent no heartbeat for 45 s"
    )
    assert (found.rank, found.node, found.step, found.reported_by) == (8, "n1", 5, 0)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_lost_peer_is_named_within_periods(gone: int) -> None:
    ranks, rest = Ranks(4), [rank for rank in range(4) if rank != gone]
    assert ranks.turns(2, range(4)) is None
    ranks.dogs[3]._has_lost = True
    assert ranks.turns(1, range(4)) is None, "all are there"
    found = ranks.turns(3, rest)
    assert found is not None and found.what.startswith(
        f"rank {gone} on n0 has sent no heartbeat for 6 s"
    )


def test_a_rank_that_has_ended_is_not_missed() -> None:
    ranks = Ranks(4)
    ranks.dogs[2]._send(ended=True)
    assert ranks.turns(100, [0, 1, 3]) is None


def test_a_rank_that_failed_is_missed_although_it_ended() -> None:
    ranks = Ranks(4)
    failed = ranks.dogs[2]
    failed._is_failing = True
    failed._end.set()
    failed._run()
    found = ranks.turns(20, [0, 1, 3])
    assert found is not None and found.rank == 2


def test_the_rank_that_is_behind_is_named() -> None:
    ranks, everyone = Ranks(4), range(4)
    for dog in ranks.dogs:
        dog.mark("waiting for data")
    assert ranks.turns(300, everyone) is None, (
        "all at the same place: collectives have timeouts"
    )
    for rank in (0, 1, 3):
        ranks.dogs[rank].mark("training")
    assert ranks.turns(140, everyone) is None  # 7 minutes
    found = ranks.turns(2, everyone)
    assert found is not None and found.kind is FailureKind.HANG
    assert (
        found.what
        == "rank 2 on n0 has kept the others waiting for 420 s (waiting for data)"
    )


def test_every_node_records_that_the_store_of_rank_0_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(watchdog, "end_now", codes.append)
    for rank, recorded in {1: [1], 2: [1], 8: [1, 8]}.items():
        dog, periods = Ranks(16).dogs[rank], iter([False] * 16 + [True])
        dog._end.wait = lambda _, periods=periods: next(periods)  # type: ignore[method-assign]
        dog.folder = tmp_path
        dog._watch_store()
        text = f"error: rank {rank}: rank 0 on n0 has sent no heartbeat for 45 s"
        assert text in capsys.readouterr().err
        found = [each.reported_by for each in read_failures(tmp_path)]
        assert found == recorded
    assert codes == [1, 1, 1]


def test_storage_that_hangs_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, written = threading.Event(), list[bool]()
    monkeypatch.setattr(watchdog, "SEND_S", 0.05)
    monkeypatch.setattr(
        watchdog, "record_failure", lambda *_: written.append(answered.wait(5))
    )
    monkeypatch.setattr(
        os.path, "exists", lambda path: path != tmp_path or answered.wait()
    )
    ranks = Ranks(2)
    for dog in ranks.dogs:
        dog.folder = tmp_path
    ranks.dogs[0].mark("saving")
    found = ranks.turns(200, range(2))
    assert not written
    answered.set()
    assert found is not None and found.kind is FailureKind.STORAGE
    assert found.what.endswith(f"; the storage of {tmp_path} does not answer")


@pytest.mark.parametrize("failing", [[0, 1, 2], [0], [2], [0, 1]])
def test_bad_input_is_what_all_ranks_raise(
    monkeypatch: pytest.MonkeyPatch, failing: list[int]
) -> None:
    """The others may be anywhere, also in a collective."""
    ranks = Ranks(3)
    monkeypatch.setattr(watchdog, "AGREE_S", 0.3)

    def judged(rank: int) -> Exception:
        return ranks.dogs[rank]._judged(
            UserError("no such file", where="objective.teacher")
        )

    with ThreadPoolExecutor(len(failing)) as pool:
        errors = list(pool.map(judged, failing))
    if len(failing) == 3:
        assert {type(error) for error in errors} == {UserError}
    else:
        assert {type(error) for error in errors} == {NodeError}
        assert [str(error) for error in errors] == [
            f"rank {rank} on {node_name()}: objective.teacher: no such file"
            for rank in failing
        ]


@pytest.mark.parametrize(
    "error", [StorageError("full"), WorkerError("died"), KeyError("lost")]
)
def test_other_kinds_stay_what_they_are(error: Exception) -> None:
    ranks = Ranks(2)
    assert ranks.dogs[1]._judged(error) is error


def test_one_rank_alone_is_all_ranks() -> None:
    error = UserError("no such file")
    world = World(device=torch.device("cpu"), store=None, **ALONE)
    assert Watchdog(world, timeout_min=10)._judged(error) is error


START_ERRORS = {
    "of one node": on_node(UserError("no GPU"), rank=5, node="n2"),
    "of all": UserError("no rank has a GPU"),
    "of its own": PeerLostError("not all started"),
}


@rows("""
- [rank, error, recorded]
- [5, of one node, [[node, 5, n2]]]
- [0, of one node, [[node, 5, n2]]]
- [3, of one node, []]
- [0, of all, [[bad input, 0, here]]]
- [3, of all, []]
- [3, of its own, [[peer lost, 3, here]]]
""")
def test_an_error_before_the_watchdog_is_recorded_by_those_who_know_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    error: str,
    recorded: list[list[object]],
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    record_start_failure(tmp_path, START_ERRORS[error])
    found = [[each.kind, each.rank, each.node] for each in read_failures(tmp_path)]
    assert found == recorded


def test_kinds_of_errors() -> None:
    lost = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    for error, kind in {
        RuntimeError(lost): FailureKind.PEER_LOST,
        PeerLostError("x"): FailureKind.PEER_LOST,
        torch.OutOfMemoryError("x"): FailureKind.DEVICE,
        OSError(28, "x"): FailureKind.STORAGE,
        WorkerError("x"): FailureKind.WORKER,
        on_node(UserError("x"), rank=5, node="n2"): FailureKind.NODE,
        KeyError("x"): FailureKind.OTHER,
    }.items():
        assert kind_and_text(error)[0] is kind
    text = "data.path: no such file"
    assert kind_and_text(UserError("no such file", where="data.path"))[1] == text


def test_what_the_loop_begins_is_progress_and_what_a_save_begins_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that save go on while the loop of their rank hangs."""
    sizes = iter((2, 1) * 2)  # a group of one is made for several
    monkeypatch.setattr(dist, "get_world_size", lambda: next(sizes))
    saves, stops = control_group(SAVES), control_group("stop")
    begun = [collectives_begun()]
    for group in (None, saves, stops, saves):
        dist.all_reduce(torch.zeros(1), group=group)
        begun.append(collectives_begun() - begun[0])
    assert begun[1:] == [1, 1, 2, 2]


def test_events_of_a_node_are_in_the_order_of_their_lines(tmp_path: Path) -> None:
    """Its clock was an hour ahead for one start, and n2's was right."""
    folder = tmp_path / "events"
    folder.mkdir()
    for node, seconds in (("n1", (10, 20, 3620, 40)), ("n2", (15, 50))):
        lines = [f'{{"event": "any", "time": {second}}}' for second in seconds]
        (folder / f"{node}.jsonl").write_text("\n".join(lines))
    times = [row["time"] for row in read_events(tmp_path)]
    assert times == [10, 15, 20, 3620, 40, 50]
