"""The record of what happened to a run; who is named as silent or behind, and why."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.support.ranks.thread_ranks import world_of
from tests.support.tables import every, rows
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
from vitscale.distributed.world import HERE, SAVES, control_group


def test_failures_are_read_as_written_by_attempt(tmp_path, monkeypatch):
    failure = Failure(
        kind=FailureKind.STORAGE,
        what="no space",
        rank=3,
        node="n2",
        step=7,
        reported_by=3,
    )
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    for attempt in ("17/0", "17/1"):
        monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
        record_failure(tmp_path, failure)
    record_start(tmp_path, first_step=0, total_steps=9)

    # Flushed one by one, so that each record outlives its node.
    assert len(flushed) == 3
    attempts = [read.attempt for read in read_failures(tmp_path)]
    assert attempts == ["17/0", "17/1"]

    # Attempt and time are added; the rest is what was given.
    (read,) = read_failures(tmp_path, attempt="17/1")
    assert read == replace(failure, attempt="17/1", time=read.time)
    assert read.time > 1.7e9
    assert read.text == "no space (storage, step 7)"


def test_events_of_all_nodes_are_read_in_order_without_cut_lines(tmp_path, monkeypatch):
    for node, event in (("n2", "one"), ("n1", "two"), ("n2", "three")):
        monkeypatch.setattr(events, "node_name", lambda node=node: node)
        append_event(tmp_path, event, {})
        # A node that died while it wrote, and a line of something else.
        with open(tmp_path / "events/n2.jsonl", "ab") as file:
            file.write(b'[1]\n{"event": "cut')

        # For times that differ.
        time.sleep(0.002)
    assert [row["event"] for row in read_events(tmp_path)] == ["one", "two", "three"]


def test_the_last_start_counts(tmp_path):
    assert read_start(tmp_path) is None
    record_start(tmp_path, first_step=0, total_steps=9)
    record_failure(tmp_path, Failure(kind=FailureKind.OTHER, what="an error"))
    record_start(tmp_path, first_step=2, total_steps=12)

    # A line of an older version, or one that was edited.
    append_event(tmp_path, "started", {"first_step": "none"})
    start = read_start(tmp_path)
    assert start.first_step == 2
    assert start.total_steps == 12
    assert start.time > 1.7e9


# A rank that lost its peers knows less than one that hangs, and that less than one with an error.
@rows("""
- [kinds, expected]
- [[peer lost, other, worker, storage], worker]
- [[peer lost, hang, other], other]
- [[peer lost, hang], hang]
- [[hang, killed from outside], killed from outside]
- [[peer lost], peer lost]
""")
def test_the_cause_is_the_report_that_knows_most(kinds, expected):
    reports = [Failure(kind=FailureKind(kind), what=kind) for kind in kinds]
    found = cause(reports)
    assert found.kind == expected


def test_what_a_rank_says_of_itself_is_the_cause():
    """Others saw only that its process was gone."""
    seen = Failure(
        kind=FailureKind.KILLED,
        what="gone",
        rank=0,
        reported_by=1,
    )
    own = Failure(
        kind=FailureKind.OTHER,
        what="an error",
        rank=0,
        reported_by=0,
    )
    assert cause([seen, own]) == own

    # An error of another rank does not explain why this process is gone.
    of_other = replace(own, rank=2, reported_by=2)
    assert cause([seen, of_other]) == seen


# ---- the watchdog -------------------------------------------------------------------------------

RANKS_PER_NODE = 8


class Ranks:
    """Watchdogs of one process, which take turns instead of running threads."""

    def __init__(self, num_ranks):
        store = dist.HashStore()
        self.dogs = []
        for rank in range(num_ranks):
            # The name of each rank's node, as joining writes it.
            store.set(f"{HERE}/{rank}", f"n{rank // RANKS_PER_NODE}")
            world = world_of(rank, num_ranks, per_node=RANKS_PER_NODE, store=store)
            dog = Watchdog(world, timeout_min=10)
            self.dogs.append(dog)
            dog._send(ended=False)

    def turns(self, number, among) -> Failure | None:
        """Periods of some ranks, until all of them know the same failure."""
        dogs = [self.dogs[rank] for rank in among]
        for _ in range(number):
            for dog in dogs:
                dog._send(ended=False)
                dog._find()
            found = dogs[0]._read()
            if found:
                assert all(dog._read() == found for dog in dogs)
                return found
        return None


def test_a_silent_node_is_named():
    ranks = Ranks(24)
    ranks.dogs[0].step = 5
    rest = [rank for rank in range(24) if rank // RANKS_PER_NODE != 1]
    assert ranks.turns(3, range(24)) is None

    # The second node says nothing for 15 periods of 3 s; the next one is too many.
    assert ranks.turns(15, rest) is None
    found = ranks.turns(1, rest)
    assert found.kind is FailureKind.KILLED
    text = "rank 8 on n1 (and 7 more) has sent no heartbeat for 45 s"
    assert found.what.startswith(text)
    assert found.rank == 8
    assert found.node == "n1"
    assert found.step == 5
    assert found.reported_by == 0


@every(gone="1, 2")
def test_a_lost_peer_is_named_within_periods(gone):
    ranks = Ranks(4)
    rest = [rank for rank in range(4) if rank != gone]
    assert ranks.turns(2, range(4)) is None

    # A broken connection alone names nobody: all are there.
    ranks.dogs[3]._has_lost = True
    assert ranks.turns(1, range(4)) is None

    # With it, two missed periods are enough.
    found = ranks.turns(3, rest)
    text = f"rank {gone} on n0 has sent no heartbeat for 6 s"
    assert found.what.startswith(text)


def test_a_rank_that_has_ended_is_not_missed():
    ranks = Ranks(4)
    ranks.dogs[2]._send(ended=True)
    assert ranks.turns(100, [0, 1, 3]) is None


def test_a_rank_that_failed_is_missed_although_it_ended():
    # The rank has an error, for which the others should not wait 45 s.
    ranks = Ranks(4)
    failed = ranks.dogs[2]
    failed._is_failing = True
    failed._end.set()
    failed._run()
    found = ranks.turns(20, [0, 1, 3])
    assert found.rank == 2


def test_the_rank_that_is_behind_is_named():
    ranks = Ranks(4)
    everyone = range(4)
    for dog in ranks.dogs:
        dog.mark("waiting for data")

    # All are at the same place: collectives have timeouts.
    assert ranks.turns(300, everyone) is None

    # Three go on. The fourth is named after 140 periods of 3 s.
    for rank in (0, 1, 3):
        ranks.dogs[rank].mark("training")
    assert ranks.turns(140, everyone) is None
    found = ranks.turns(2, everyone)
    assert found.kind is FailureKind.HANG
    text = "rank 2 on n0 has kept the others waiting for 420 s (waiting for data)"
    assert found.what == text


def test_every_node_records_that_the_store_of_rank_0_is_silent(
    tmp_path, monkeypatch, capsys
):
    codes = []
    monkeypatch.setattr(watchdog, "end_now", codes.append)

    # One rank of each node writes; rank 0 itself may be gone.
    for rank, recorded in {1: [1], 2: [1], 8: [1, 8]}.items():
        dog = Ranks(16).dogs[rank]

        # The store does not answer for sixteen periods; then the test ends the watch.
        periods = iter([False] * 16 + [True])
        dog._end.wait = lambda _, periods=periods: next(periods)  # type: ignore[method-assign]
        dog.folder = tmp_path
        dog._watch_store()
        text = f"error: rank {rank}: rank 0 on n0 has sent no heartbeat for 45 s"
        assert text in capsys.readouterr().err
        reporters = [failure.reported_by for failure in read_failures(tmp_path)]
        assert reporters == recorded
    assert codes == [1, 1, 1]


def test_storage_that_hangs_is_the_cause(tmp_path, monkeypatch):
    answered = threading.Event()
    written = []

    # Both a look at the folder and a record in it wait for the storage.
    def late_record(*_):
        written.append(answered.wait(5))

    def late_exists(path):
        if path == tmp_path:
            return answered.wait()
        return True

    monkeypatch.setattr(watchdog, "SEND_S", 0.05)
    monkeypatch.setattr(watchdog, "record_failure", late_record)
    monkeypatch.setattr(os.path, "exists", late_exists)
    ranks = Ranks(2)
    for dog in ranks.dogs:
        dog.folder = tmp_path
    ranks.dogs[0].mark("saving")
    found = ranks.turns(200, range(2))

    # The cause was found without the storage.
    assert not written
    answered.set()
    assert found.kind is FailureKind.STORAGE
    assert found.what.endswith(f"; the storage of {tmp_path} does not answer")


@every(failing="[0, 1, 2], [0], [2], [0, 1]")
def test_bad_input_is_what_all_ranks_raise(monkeypatch, failing):
    """The others may be anywhere, also in a collective."""
    ranks = Ranks(3)
    monkeypatch.setattr(watchdog, "AGREE_S", 0.3)

    error = UserError("no such file", where="objective.teacher")

    def judged(rank):
        return ranks.dogs[rank]._judged(error)

    with ThreadPoolExecutor(len(failing)) as pool:
        errors = list(pool.map(judged, failing))
    if len(failing) == 3:
        assert {type(error) for error in errors} == {UserError}
        return

    # What one rank alone does not find is a fault of its node.
    assert {type(error) for error in errors} == {NodeError}
    for rank, error in zip(failing, errors, strict=True):
        text = f"rank {rank} on {node_name()}: objective.teacher: no such file"
        assert str(error) == text


@every(error=[StorageError("full"), WorkerError("died"), KeyError("lost")])
def test_other_kinds_stay_what_they_are(error):
    ranks = Ranks(2)
    assert ranks.dogs[1]._judged(error) is error


def test_one_rank_alone_is_all_ranks():
    error = UserError("no such file")
    assert Watchdog(world_of(), timeout_min=10)._judged(error) is error


# Known to all by now; found by all; and found by one rank that waited for the others.
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
    tmp_path, monkeypatch, rank, error, recorded
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    record_start_failure(tmp_path, START_ERRORS[error])
    failures = read_failures(tmp_path)
    found = [[failure.kind, failure.rank, failure.node] for failure in failures]
    assert found == recorded


def test_kinds_of_errors():
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
        found, _ = kind_and_text(error)
        assert found is kind

    # The text says where.
    _, text = kind_and_text(UserError("no such file", where="data.path"))
    assert text == "data.path: no such file"


def test_what_the_loop_begins_is_progress_and_what_a_save_begins_is_not(
    world, monkeypatch
):
    """Threads that save go on while the loop of their rank hangs."""
    sizes = iter((2, 1) * 2)  # a group of one is made for several
    monkeypatch.setattr(dist, "get_world_size", lambda: next(sizes))
    saves = control_group(SAVES)
    stops = control_group("stop")

    # The loop's own, a save's, one that the loop asks whether to stop, and another save's.
    first = collectives_begun()
    begun = []
    for group in (None, saves, stops, saves):
        dist.all_reduce(torch.zeros(1), group=group)
        begun.append(collectives_begun() - first)
    assert begun == [1, 1, 2, 2]


def test_events_of_a_node_are_in_the_order_of_their_lines(tmp_path):
    """Its clock was an hour ahead for one start, and n2's was right."""
    folder = tmp_path / "events"
    folder.mkdir()
    for node, seconds in (("n1", (10, 20, 3620, 40)), ("n2", (15, 50))):
        lines = [f'{{"event": "any", "time": {second}}}' for second in seconds]
        (folder / f"{node}.jsonl").write_text("\n".join(lines))
    times = [row["time"] for row in read_events(tmp_path)]
    assert times == [10, 15, 20, 3620, 40, 50]
