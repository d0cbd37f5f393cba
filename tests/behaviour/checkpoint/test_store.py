"""The store on one rank: one job at a time, saves whole or not at all, and reads valid ones."""

import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.light_checkpoints import flip
from tests.support.ranks.thread_ranks import run_ranks, world_of
from tests.support.tables import every, refused, rows
from tests.support.waiting import PATIENCE_S
from vitscale.checkpoint import folders, store
from vitscale.checkpoint.folders import (
    newest_checkpoint,
    read_checkpoint,
    resolve_weights,
    step_folders,
)
from vitscale.checkpoint.store import (
    CheckpointStore,
    FolderBusyError,
    read_tensors,
    run_folder_lock,
)
from vitscale.config.errors import DivergedError, FailureKind, StorageError
from vitscale.distributed import atomic_files
from vitscale.distributed.processes import node_name


def begin_save(store, step, tensors=None, **more):
    """Save in the background: without tensors three zeros, and without progress none."""
    tensors = tensors or {"model.a": torch.zeros(3)}
    facts = {"progress": {}, "description": {}, **more}
    store.save(tensors, step=step, **facts)


def save(folder, world, *, step, keep=3):
    store = CheckpointStore(folder, keep=keep, world=world)
    begin_save(store, step)
    return store.wait().folder


def refuse(*_):
    """Fail like a disk, in place of any function that writes."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")


def test_update_waits_for_the_host_copy_and_not_for_the_disk(
    tmp_path, world, monkeypatch
):
    """Copy and disk hang: the save has returned; what changes after the copy is not saved."""
    store = CheckpointStore(tmp_path, keep=2, world=world)
    copying = threading.Event()
    writing = threading.Event()
    take = store._host_copy.take
    write = folders.write_new_file

    def late_take(*arguments):
        copying.wait(60)
        return take(*arguments)

    def late_write(*arguments):
        writing.wait(60)
        return write(*arguments)

    monkeypatch.setattr(store._host_copy, "take", late_take)
    monkeypatch.setattr(folders, "write_new_file", late_write)

    weights = torch.zeros(1000)
    progress = {"n": 1}
    begin_save(store, 1, {"model.a": weights}, progress=progress)

    # What changes while the copy is made belongs to the next save.
    progress["n"] = 7

    # The thread stands for the loop, which may not change the weights while they are copied.
    update = threading.Thread(target=store.wait_for_host_copy)
    update.start()
    update.join(0.2)
    assert update.is_alive(), "did not wait for the copy"
    copying.set()
    update.join(60)
    assert not update.is_alive(), "waits for the disk"

    # The update may write now, while nothing is on the disk.
    weights.fill_(7.0)
    assert store.take_committed() is None
    assert newest_checkpoint(store.folder)[0] is None

    writing.set()
    committed = store.wait()
    assert committed.step == 1
    assert committed.warnings == ()
    assert store.wait() is None, "taken twice"
    assert store.take_committed() is None, "taken twice"

    # The values at the time of the save.
    checkpoint = read_checkpoint(committed.folder)
    tensors = read_tensors(checkpoint.files)
    assert torch.equal(tensors["model.a"], torch.zeros(1000))
    assert checkpoint.progress == {"n": 1}


def test_next_save_waits_and_raises_the_previous_error(tmp_path, world, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2, world=world)

    # The save of 2 begins when 1 is whole.
    for step in (1, 2):
        begin_save(store, step)
    assert read_checkpoint(store.folder / "step-00000001").step == 1
    store.wait()

    message = r"cannot be written \(Input/output error\)"
    with monkeypatch.context() as patch:
        patch.setattr(folders, "commit_folder", refuse)
        begin_save(store, 3)
        with pytest.raises(StorageError, match=message):
            begin_save(store, 4)
    names = [path.name for path in step_folders(store.folder)]
    assert names == ["step-00000002", "step-00000001"]
    assert not list(store.folder.glob(".step-*")), "the failed save still takes space"
    begin_save(store, 4)
    assert store.wait().step == 4
    # A copy that fails must not leave the update waiting for it.
    monkeypatch.setattr(store._host_copy, "take", refuse)
    begin_save(store, 5)
    with pytest.raises(OSError):
        store.wait()
    assert store._copied.wait(60), "the next update waits for ever"


def test_storage_may_refuse_saves_for_an_hour_after_the_last_checkpoint(
    tmp_path, world, monkeypatch
):
    now = 0.0
    lines = []
    clock = SimpleNamespace(
        monotonic=lambda: now,
        sleep=time.sleep,
        time=time.time,
    )
    for module in (store, folders):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(atomic_files, "PAUSES_S", ())
    ours = CheckpointStore(tmp_path, keep=1, world=world)

    def save_at(seconds):
        nonlocal now
        now = seconds
        begin_save(ours, int(now))
        ours.wait(say=lines.append)

    # The last whole one; then 3,500 s of failures.
    save_at(3000.0)
    monkeypatch.setattr(folders, "write_new_file", refuse)
    save_at(6500.0)
    assert len(lines) == 1
    assert "training goes on" in lines[0]

    # 3,700 s after the last checkpoint.
    with pytest.raises(folders.OverdueError):
        save_at(6700.0)


@every(first_is_over="false, true", own_is_over="false, true")
def test_the_hour_without_a_checkpoint_is_over_by_the_clock_of_rank_0(
    tmp_path, monkeypatch, first_is_over, own_is_over
):
    """Ranks whose clocks are on both sides of it would part."""
    monkeypatch.setattr(folders, "write_new_file", refuse)
    monkeypatch.setattr(atomic_files, "PAUSES_S", ())
    now = time.monotonic()

    def save_on(rank, gather):
        is_over = own_is_over if rank else first_is_over

        # The hour ended five seconds ago, or ends in an hour.
        left_s = -5.0 if is_over else 3600.0
        ours = folders.Save(
            checkpoints=tmp_path,
            step=1,
            attempt="a",
            rank=rank,
            keep=1,
            progress={},
            description={},
            overdue_at=now + left_s,
        )
        with pytest.raises(StorageError, match="cannot be written") as caught:
            folders.commit_save(ours, [b"x"], gather=gather)
        return type(caught.value)

    kind = folders.OverdueError if first_is_over else StorageError
    assert run_ranks(2, save_on) == [kind, kind]


@every(error=[None, OSError(errno.EIO, "I/O error", "journal.jsonl")])
def test_the_log_is_flushed_before_the_step_that_follows_it_is_committed(
    tmp_path, world, error
):
    """And a step is committed even if that fails: nothing but its log lines is at risk."""
    committed = []

    def flush():
        # What was committed when the log was flushed.
        checkpoints = tmp_path / "checkpoints"
        committed.append([path.name for path in checkpoints.glob("step-*")])
        if error is not None:
            raise error

    warnings = ()
    if error is not None:
        warnings = ("warning: journal.jsonl: not flushed before a commit (I/O error)",)
    ours = CheckpointStore(tmp_path, keep=2, world=world)
    for step in (1, 2):
        begin_save(ours, step, before_commit=flush)
        save = ours.wait()
        assert save.step == step
        assert save.warnings == warnings
    assert committed == [[], ["step-00000001"]]


@every(stop=[None, SystemExit(75), KeyError("other")])
def test_store_waits_for_its_last_save(tmp_path, world, monkeypatch, stop):
    """Exit code 75 would claim a checkpoint; another error stays and notes a failed save."""

    def save_and_stop():
        with CheckpointStore(tmp_path, keep=2, world=world) as store:
            begin_save(store, 1)
            if stop is not None:
                raise stop

    # Slow enough for the block to end while the save is running.
    write = folders.write_new_file

    def slow_write(*arguments):
        time.sleep(0.2)
        return write(*arguments)

    monkeypatch.setattr(folders, "write_new_file", slow_write)
    with contextlib.suppress(SystemExit, KeyError):
        save_and_stop()
    assert read_checkpoint(tmp_path / "checkpoints/step-00000001").step == 1

    # A save that fails replaces an exit code, and is a note of another error.
    is_other = isinstance(stop, KeyError)
    monkeypatch.setattr(folders, "commit_folder", refuse)
    with pytest.raises(KeyError if is_other else StorageError) as caught:
        save_and_stop()
    if is_other:
        assert any("not committed" in note for note in caught.value.__notes__)


# A kind of bad value in each type that weights and moments have.
@rows("[[name, value], [float32, .nan], [bfloat16, .inf], [float16, -.inf]]")
def test_state_that_is_not_finite_is_not_committed(tmp_path, world, name, value):
    """One value of many; no run recovers from it, and retention would remove the last good step."""
    dtype = getattr(torch, name)
    before = save(tmp_path, world, step=1)
    store = CheckpointStore(tmp_path, keep=1, world=world)
    momentum = torch.arange(1000.0).to(dtype)
    momentum[531] = value
    tensors = {
        "exp_avg.a": momentum,
        "model.a": torch.ones(9),
        # Integers and empty tensors are always finite.
        "n": torch.arange(3),
        "empty": torch.empty(0),
    }
    begin_save(store, 2, tensors)
    message = "not saved: exp_avg.a not finite by step 2"
    with pytest.raises(DivergedError, match=message):
        store.wait()
    assert [path.name for path in store.folder.iterdir()] == [before.name]

    # The largest number is finite, though sums of it are not.
    momentum[531] = torch.finfo(dtype).max
    begin_save(store, 2, tensors)
    assert store.wait() is not None


def test_save_that_reads_back_differently_is_refused(tmp_path, world, monkeypatch):
    save(tmp_path, world, step=1)
    write = folders.write_new_file

    def lying_disk(path, pieces):
        written = write(path, pieces)
        if path.suffix == ".safetensors":
            flip(path, -1)
        return written

    monkeypatch.setattr(folders, "write_new_file", lying_disk)
    with refused("does not match its hash"):
        save(tmp_path, world, step=2, keep=1)

    # The last good one is still there, though only one is to be kept.
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.step == 1
    assert complaints == []


def test_init_takes_a_run_or_a_checkpoint_folder(tmp_path, world, monkeypatch):
    folder = save(tmp_path, world, step=4)
    assert resolve_weights(str(tmp_path)) == resolve_weights(str(folder))
    assert resolve_weights(str(folder)) == (read_checkpoint(folder), [])

    # The newest one is damaged: the one before is taken, and it is said.
    newest = save(tmp_path, world, step=5)
    flip(newest / "rank-00000.safetensors", -1)
    checkpoint, complaints = resolve_weights(str(tmp_path))
    assert checkpoint.step == 4
    assert "step-00000005" in complaints[0]

    # A name that is no folder: what may have been meant.
    with refused("no such run(?s:.*)hf://OWNER/NAME"):
        resolve_weights(str(tmp_path / "nowhere"))
    with refused(f"did you mean {tmp_path}[?]"):
        resolve_weights(f"{tmp_path}x")

    # Runs of the folder `runs` are found by their name.
    monkeypatch.chdir(tmp_path.parent)
    Path("runs").symlink_to(tmp_path.parent)
    with refused(f"did you mean runs/{tmp_path.name}[?]"):
        resolve_weights(f"names/{tmp_path.name}")

    # A step of a run.
    assert resolve_weights(f"{tmp_path}@4") == (read_checkpoint(folder), [])
    with refused("no checkpoint of step 7(?s:.*)the steps that are kept: 4, 5"):
        resolve_weights(f"{tmp_path}@7")

    # A folder inside a run is none itself.
    with refused("holds no checkpoint"):
        resolve_weights(str(folder.parent))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # One process without a group; a lock that is given up within a second.
    changes = {
        "errors_on_all_ranks": lambda *_, **__: contextlib.nullcontext(),
        "BEAT_S": 0.02,
        "SILENT_S": 0.4,
        "WAIT_S": 1.0,
        "SETTLE_S": 0.2,
    }

    # Several beats are missed before a holder counts as gone, which a wait outlasts.
    assert 3 * store.BEAT_S < store.SILENT_S < store.WAIT_S
    for name, value in changes.items():
        monkeypatch.setattr(f"vitscale.checkpoint.store.{name}", value)
    return tmp_path / "run"


def lock(folder):
    return run_folder_lock(folder, world=world_of())


def test_a_run_folder_that_is_gone_ends_the_process_and_stays_away(
    folder, monkeypatch, capsys
):
    # Another process would end here, and may be deep in a computation when it does.
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()

    monkeypatch.setattr("vitscale.checkpoint.store.end_now", end)
    with lock(folder):
        folder.rename(folder.with_name("moved"))
        assert ended.wait(PATIENCE_S)
    assert codes[0] == FailureKind.STORAGE.exit_code

    # Nothing made the folder again at its old place.
    assert not folder.exists()
    message = f"{folder}: was moved or removed during the training"
    assert message in capsys.readouterr().err


def test_a_second_job_is_refused_at_once(folder, monkeypatch):
    """Under SLURM it waits first, and may start again."""
    flushed = set()
    path = folder / ".lock"
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    with lock(folder):
        # Power loss takes neither the name of the run nor that of its holder.
        for kept in (folder.parent, path):
            assert kept.stat().st_ino in flushed
        with refused(f"another job .*process {os.getpid()} on"):
            lock(folder).__enter__()

        # A requeued job may meet the last moments of the one before.
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        with pytest.raises(FolderBusyError, match="another job") as busy:
            lock(folder).__enter__()
        assert busy.value.kind is FailureKind.OTHER

    # Free again, for a job that leaves its own name.
    with lock(folder):
        assert path.read_text().startswith("job 17 on ")


@every(has_flock="true, false")
def test_a_job_on_another_node_holds_the_folder_while_it_touches_its_lock(
    folder, monkeypatch, has_flock
):
    """Where flock is missing, or does not see other nodes."""

    def flock(*_):
        if not has_flock:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with lock(folder):
        # The name of this node is the end of that one's.
        (folder / ".lock").write_text(f"job 3 on x{node_name()}")
        with refused("another job .*: job 3 on x"):
            lock(folder).__enter__()

    # That job is gone, and has left its name.
    (folder / ".lock").write_text("job 3 on n7")
    with lock(folder):
        assert (folder / ".lock").read_text().startswith("process ")


# Without flock or with one that sees one node, in a new folder or one that a job has left.
@rows("""
- [num_starts, flock, left_behind]
- [2, missing, '']
- [5, missing, job 3 on a-long-name-a-long-name-a-long-name-a-long-name-a-long-name-a-long-name]
- [2, of one node, job 3 on n7]
- [5, of one node, '']
""")
def test_of_starts_at_the_same_moment_one_gets_the_folder(
    folder, monkeypatch, flock, num_starts, left_behind
):
    """On as many nodes, which all find it free before any of them has written its name."""

    def of_node(*_):
        if flock == "missing":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def write(descriptor, holder):
        has_seen_it_free.wait(10)
        write_holder(descriptor, holder)

    # Threads stand for nodes; each keeps its answer until all have one.
    def start(number):
        node.number = number
        with contextlib.suppress(FolderBusyError), lock(folder):
            all_know.wait(10)
            return True
        all_know.wait(10)
        return False

    node = threading.local()
    write_holder = store._write_holder
    has_seen_it_free = threading.Barrier(num_starts)
    all_know = threading.Barrier(num_starts)
    monkeypatch.setattr("fcntl.flock", of_node)
    monkeypatch.setattr(store, "_write_holder", write)
    monkeypatch.setattr(store, "node_name", lambda: f"n{node.number}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder.mkdir()
    (folder / ".lock").write_text(left_behind)
    with ThreadPoolExecutor(num_starts) as pool:
        holds = list(pool.map(start, range(num_starts)))
    assert sum(holds) == 1
