"""Unreadable samples, and loader workers that die or hang."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.loader_runs import rank_batches_of, worker_pids
from tests.support.ranks.warm_ranks import ROOT
from tests.support.tables import every, refused, rows
from tests.support.waiting import wait_until
from vitscale.config.errors import RankError, StorageError, UserError, WorkerError
from vitscale.data import loader as loader_module
from vitscale.data.index import read_split, sample_keys
from vitscale.data.loader import Batch, open_batches
from vitscale.data.samples import Samples, Unreadable
from vitscale.data.settings import DataSettings
from vitscale.distributed.processes import is_alive

# Two classes of 30 photos in three tars; five steps of 12 are an epoch.
NUM = 60


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shard_folder(tmp_path / "shards", num_per_class=NUM // 2, num_shards=3)


# 60 bytes hold the markers that every decoder needs; more would reach the next image.
def damage(shards: Path, samples: list[int]) -> list[str]:
    """Overwrite the start of some stored images; returns their keys."""
    index = read_split(shards, split="train")
    for sample in samples:
        place = index.locate(sample)
        with open(place.tar, "r+b") as file:
            file.seek(place.offset)
            file.write(b"\xff" * 60)
    return sample_keys(index, samples)


def batches(
    shards: Path, *, workers: int, ranks: int = 1, steps: int = 10
) -> Iterator[Batch]:
    """All ranks' batches, one rank after the other."""
    data = DataSettings(
        path=str(shards),
        global_batch=12,
        num_workers=workers,
    )
    for rank in range(ranks):
        yield from rank_batches_of(
            data,
            stop=12 * steps,
            rank=rank,
            ranks=ranks,
        )


def test_the_substitute_is_the_same_on_every_layout(shards):
    undamaged = list(batches(shards, workers=0))
    damage(shards, [5, 17])
    found = list(batches(shards, workers=0))

    # Ten steps are two epochs, hence each damaged sample twice.
    lost = [sample for batch in found for sample in batch.unreadable]
    numbers = sorted((sample.part, sample.sample) for sample in lost)
    assert numbers == [(0, 5), (0, 5), (0, 17), (0, 17)]
    assert {Path(sample.shard).name for sample in lost} == {"train-000000.tar"}

    # The same run by other processes, and by three ranks.
    with_workers = list(batches(shards, workers=2))
    ranks = list(batches(shards, workers=1, ranks=3))
    for step, (before, after) in enumerate(zip(undamaged, found, strict=True)):
        # Only the rows of the damaged samples differ, and they show a picture.
        rows = [
            row for row in range(12) if not before.images[row].equal(after.images[row])
        ]
        assert len(rows) == len(after.unreadable), step
        if rows:
            assert after.images[rows].float().std() > 1

        assert with_workers[step].images.equal(after.images)
        assert with_workers[step].unreadable == after.unreadable

        # Rank after rank: ten steps of the first, then ten of the second.
        thirds = ranks[step::10]
        images = torch.cat([third.images for third in thirds])
        labels = torch.cat([third.labels for third in thirds])
        assert images.equal(after.images)
        assert labels.equal(after.labels)


@every(workers="0, 2")
def test_the_run_ends_if_no_substitute_can_be_read(shards, workers):
    # A tar without one readable sample is no bit rot: the run must not train on the rest.
    damage(shards, list(range(NUM)))
    with refused(r"(?s)sample 'train-.*' cannot be read.*nor can 8 sub"):
        list(batches(shards, workers=workers))


@pytest.mark.parametrize(
    "number, message",
    [
        (
            signal.SIGKILL,
            "a loader worker died: .*pid {pid}.*, exit code -9",
        ),
        # A stopped process is alive, so only the missing batch tells.
        (
            signal.SIGSTOP,
            "pid {pid}, stopped.* gave no batch .* for 3 s",
        ),
    ],
)
def test_a_dead_or_hung_worker_is_named(shards, monkeypatch, number, message):
    running = batches(shards, workers=2, steps=10_000)
    next(running)

    # Set after the first batch, which takes longer: workers start.
    monkeypatch.setattr(loader_module, "TIMEOUT_S", 3.0)
    workers = worker_pids()
    os.kill(workers[0], number)
    with pytest.raises(WorkerError) as caught:
        for _ in running:
            pass
    assert caught.match("(?s)" + message.format(pid=workers[0]))

    # The next run has workers of its own.
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
    assert len(list(batches(shards, workers=2))) == 10


class StuckSamples(Samples):
    """At positions above 0 the worker sleeps or computes for ever. A label is its process id."""

    shape = (3, 2, 2)

    def __init__(self, how: str):
        self.how = how

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        # Positions are 0 until the one that is meant to block.
        while position:
            if self.how == "sleeps":
                signal.pause()
        return os.getpid(), []


# The first or the second worker is stuck, in its first image or in the third of a batch.
@every(positions="[[0], [0], [1]], [[0], [0], [0], [0, 0, 1]]", how="sleeps, computes")
def test_a_worker_that_gives_no_batch_is_named_whatever_it_does(
    monkeypatch, how, positions
):
    """Also in the middle of a batch, and while another worker has nothing to do."""
    # The path is not opened: the samples are made here.
    data = DataSettings(path="x", global_batch=3, num_workers=2)
    samples = StuckSamples(how)
    with open_batches(
        samples,
        positions,
        batch=3,
        settings=data,
        pin_memory=False,
    ) as running:
        # Both workers have given a batch; the last position is of one of them.
        pids = [next(running).labels.item() for _ in range(2)]
        stuck = pids[(len(positions) - 1) % 2]

        # Short, but only now: the start of workers takes longer.
        monkeypatch.setattr(loader_module, "TIMEOUT_S", 0.4)
        state = {"sleeps": "sleeping", "computes": "running"}[how]
        message = rf"pid {stuck}, {state}.* gave no batch.* for 0.4 s"
        with pytest.raises(WorkerError, match=message):
            list(running)


def test_a_worker_that_makes_progress_is_not_hung():
    """A batch may take longer than the limit, if its images do not."""
    progress = np.zeros(2, np.int64)

    # A connection that has its reply after ten times the limit of waits.
    class Slow:
        num_waits = 0

        def poll(self, seconds):
            self.num_waits += 1
            # An image every 15 waits: fewer than after which it would be hung.
            progress[1] += self.num_waits % 15 == 0
            return self.num_waits > 10 * loader_module.NUM_WAITS

        def recv(self):
            return [7], []

    # A worker is only asked for its process id and its connection.
    worker = SimpleNamespace(process=SimpleNamespace(pid=1), connection=Slow())
    assert loader_module._reply(worker, progress) == ([7], [])


class NumberedSamples(Samples):
    """All pixels of an image are its position."""

    shape = (3, 2, 2)

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        out.fill_(position)
        return position, []


# One worker has no other to wait for; three fill their buffers at the same time.
@every(workers="1, 3")
def test_workers_that_are_ahead_leave_alone_what_is_read(workers):
    """Pixels stay until the next batch is taken, however long that is."""
    num = 12
    positions = [[number] for number in range(num)]
    samples = NumberedSamples()
    with loader_module._filled_by_workers(samples, positions, 1, workers) as filled:
        for number, (pixels, labels, _) in enumerate(filled):
            # Time in which a worker that reuses the buffer too early overwrites it.
            time.sleep(0.05)
            assert labels == [number]
            assert pixels.unique().tolist() == [number]


class AwaySamples(Samples):
    """Storage that fails for longer than a retry helps, as a worker finds it."""

    shape = (3, 2, 2)

    def __init__(self, error: UserError):
        self.error = error

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        raise self.error


# Storage (74 is EX_IOERR of sysexits.h, which a job is started again after), and bad input.
@every(workers="0, 1")
@pytest.mark.parametrize(
    ("kind", "what", "code"),
    [
        (StorageError, "cannot be read (Stale file handle)", 74),
        (UserError, "9 samples in a row cannot be read", 1),
    ],
)
def test_an_error_of_one_rank_keeps_its_kind(workers, kind, what, code):
    """The other ranks do not know of it, so this one prints it; a job of the first is requeued."""
    data = DataSettings(path="x", global_batch=1, num_workers=workers)
    error = kind(what, where="a.tar", next_step="look")
    samples = AwaySamples(error)
    with (
        open_batches(
            samples,
            [[0]],
            batch=1,
            settings=data,
            pin_memory=False,
        ) as found,
        pytest.raises(RankError) as caught,
    ):
        list(found)

    # A worker sends the error as a pickle: nothing of its text may be lost.
    assert caught.value.kind.exit_code == code
    assert caught.value.text() == error.text()


# Arguments: shards, how it ends. Prints its processes, and the number of further batches.
CHILD = """
import os, signal, sys
from pathlib import Path
from tests.behaviour.data.test_loader_faults import batches
from tests.support.loader_runs import server_pid, worker_pids
from vitscale.data import loader
loader.TIMEOUT_S = 4.0
found = batches(Path(sys.argv[1]), workers=2, steps=200)
next(found)
print(server_pid(), *worker_pids(), flush=True)
if sys.argv[2] == "continue":
    sys.exit(sum(1 for _ in found))
os.kill(worker_pids()[0], signal.SIGSTOP)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def child(shards: Path, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start CHILD; its server and two workers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(shards), end],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A process group of its own, which a test may stop as a whole.
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    return process, pids


# "kill": without a chance to clean up; "finish": by Python's usual end.
@rows("""
- [end, code]
- [kill, -9]
- [finish, 0]
""")
def test_server_and_workers_end_with_their_rank(shards, end, code):
    """Also a worker that is stopped, in the middle of a stream."""
    process, pids = child(shards, end)
    assert process.wait() == code
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.slow
def test_a_job_that_was_suspended_continues(shards):
    """A pause of trainer and workers together is no hang of a worker."""
    process, (_, *workers) = child(shards, "continue")
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    time.sleep(1)  # for it to wait for a batch by then

    # Longer than the limit of 4 s: if the pause counted, the workers would look hung.
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(6)
    os.killpg(process.pid, signal.SIGCONT)

    # The first of 200 batches was taken before the pause.
    assert process.wait() == 199
