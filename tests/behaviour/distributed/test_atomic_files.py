"""Files are whole or absent, also on a full disk; what is made once per node leaves nothing."""

import gc
import os
import pickle
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from launch.jobs.attempts import begin_attempt, read_attempts
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.tables import every, rows
from tests.support.waiting import ROOT, wait_until
from vitscale.config.errors import (
    EXIT_CODES,
    FailureKind,
    StorageError,
    UserError,
    UserErrors,
)
from vitscale.distributed import atomic_files
from vitscale.distributed.atomic_files import atomic_file, write_bytes
from vitscale.distributed.events import Failure, read_failures, record_failure
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.processes import is_alive, node_name
from vitscale.tracking.journal import Journal, read_rows


def test_content_is_flushed_before_the_rename_the_name_after(tmp_path, monkeypatch):
    """In any other order power loss can leave an empty file, or the old one after a commit."""
    calls = []
    replace = os.replace

    def record_flush(fd):
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            calls.append(("flush folder", None))
        else:
            calls.append(("flush", status.st_size))

    def record_rename(old, new):
        calls.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "replace", record_rename)

    write_bytes(tmp_path / "file", bytes(1000))
    assert calls == [("flush", 1000), ("rename", "file"), ("flush folder", None)]


def test_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_bytes() == b"old"

    # The unfinished one is gone.
    assert list(tmp_path.iterdir()) == [path]


# More output than a pipe or a buffer takes; then, if it shall, more than the disk takes.
SCRIPT = """
import sys
from vitscale.distributed.processes import run_rank_script

def main():
    for number in range(2000):
        print("line", number, "x" * 100)
        print("line", number, file=sys.stderr)
    open("done", "w").close()
    if sys.argv[1] == "write":
        with open("disk/big", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

run_rank_script(main)
"""


def fill(folder):
    """Take all space of a disk, to the last block; the file that holds it."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(512))
            except OSError:
                return path


@every(do="print, write")
def test_a_rank_prints_on_a_full_disk(small_disk, tmp_path, do):
    # What is printed may be lost; what a script writes itself may not.
    code = 0
    if do == "write":
        code = EXIT_CODES[FailureKind.STORAGE]
    fill(small_disk)
    with open(small_disk / "log", "ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, do],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == code

    # It went on after the first line that was refused.
    assert (tmp_path / "done").exists()


def test_what_a_full_disk_refuses_of_a_journal_is_written_later(small_disk):
    journal = Journal(small_disk / "journal.jsonl", resume_step=0)
    journal.append({"train/loss": 1.0}, step=1)
    filler = fill(small_disk)
    for step in range(2, 200):
        journal.append({"train/loss": 1 / step}, step=step)
    assert journal.refused is not None
    assert len(list(read_rows(journal.path))) < 199

    # Space is there again: the next line takes all others with it, in their order.
    filler.unlink()
    journal.append({"train/loss": 0.0}, step=200)
    assert journal.refused is None
    assert [row.step for row, _ in read_rows(journal.path)] == list(range(1, 201))


def test_records_of_a_full_disk_are_lost_with_a_warning(
    small_disk, monkeypatch, capsys
):
    monkeypatch.setattr(atomic_files, "PAUSES_S", ())
    filler = fill(small_disk)
    attempt = begin_attempt(small_disk, cluster="slurm", job_id="7")
    record_failure(small_disk, Failure(kind=FailureKind.OTHER, what="x" * 600))

    # The run has begun all the same, and the warning came once.
    assert attempt.number == 1
    assert not read_attempts(small_disk)
    assert capsys.readouterr().err.count("No space left on device") == 1

    filler.unlink()
    begin_attempt(small_disk, cluster="slurm", job_id="7", restart=1)
    record_failure(small_disk, Failure(kind=FailureKind.OTHER, what="y"))
    (attempt,) = read_attempts(small_disk)
    assert attempt.restart == 1
    (failure,) = read_failures(small_disk)
    assert failure.what == "y"


# ---- a value is made once per node --------------------------------------------------------------


# Ranks of each node of the errors below: 0, 4 and 8 are those that make the value.
PER_NODE = 4


def test_one_rank_of_a_node_makes_it():
    made = []

    def make(rank):
        made.append(rank)
        rows = np.arange(1000)
        return {
            "rows": rows,
            "same": rows,
            "empty": np.empty(0),
            "names": ("a", "b"),
        }

    def once(rank, gather):
        return once_per_node(lambda: make(rank), is_maker=rank == 0, gather=gather)

    values = run_ranks(3, once)
    assert made == [0]
    for value in values:
        rows = value["rows"]
        assert np.array_equal(rows, np.arange(1000))
        assert value["names"] == ("a", "b")
        assert value["empty"].size == 0

        # All ranks of the node see this memory: nobody may write, and it is there once.
        assert not rows.flags.writeable
        assert rows.path == value["same"].path


def test_columns_pickle_as_their_path_and_parts_as_arrays():
    column = once_per_node(
        lambda: np.arange(100_000),
        is_maker=True,
        gather=lambda own: [own],
    )

    # A worker that is sent the column opens it itself.
    assert len(pickle.dumps(column)) < 1000
    for array in (column, column[7:90], column + 1):
        copy = pickle.loads(pickle.dumps(array))
        assert np.array_equal(copy, array)


def open_columns():
    """Numbers of this process's descriptors of shared arrays."""
    # What other tests have left to be collected is collected now.
    gc.collect()
    columns = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "memfd:column" in os.readlink(f"/proc/self/fd/{number}"):
                columns.add(number)
    return columns


def test_memory_and_descriptors_last_as_long_as_the_arrays():
    before = open_columns()

    def make():
        return {"one": np.arange(1000), "two": np.ones(10)}

    def open_ones(rank, gather):
        return once_per_node(make, is_maker=rank == 0, gather=gather)

    values = run_ranks(3, open_ones)
    assert open_columns() > before

    # A part of one array, and another one as it was sent to a process.
    part = values[2]["one"][-2:]
    copy = pickle.loads(pickle.dumps(values[1]["two"]))
    del values

    # A part needs its memory, but no process is given the path of a part.
    assert part.tolist() == [998, 999]
    assert copy.sum() == 10
    del part, copy
    assert open_columns() == before


# A mistake, several of them, and storage that fails.
ERRORS = {
    "one": UserError("no index"),
    "two": UserErrors([UserError("a"), UserError("b")]),
    "storage": StorageError("no index"),
}


# What all nodes find is bad input; what some find is their own fault.
@rows(r"""
- [error, failing, kind, text]
- [one, [0, 4, 8], UserError, no index]
- [two, [0, 4, 8], UserErrors, "a\nb"]
- [one, [4], NodeError, "rank 4 on {node}: no index"]
- [two, [0], NodeError, "rank 0 on {node}: a\nb"]
- [one, [4, 8], NodeError, "rank 4 on {node}: no index"]
- [storage, [8], StorageError, "rank 8 on {node}: no index"]
- [storage, [0, 4, 8], StorageError, no index]
""")
def test_an_error_of_any_node_is_raised_on_all_ranks(error, failing, kind, text):
    def make(rank):
        if rank in failing:
            raise ERRORS[error]
        return rank

    def one(rank, gather):
        is_maker = rank % PER_NODE == 0
        with pytest.raises(UserError) as caught:
            once_per_node(lambda: make(rank), is_maker=is_maker, gather=gather)
        return caught.value

    raised = run_ranks(3 * PER_NODE, one)
    assert {type(error).__name__ for error in raised} == {kind}
    assert {str(error) for error in raised} == {text.format(node=node_name())}

    # The first of the ranks that failed, also in the errors of the others.
    if kind == "NodeError":
        culprits = {(error.rank, error.node) for error in raised}
        assert culprits == {(failing[0], node_name())}


MAKER = """
import pickle, sys
import numpy as np
from vitscale.distributed.node_files import once_per_node
column = once_per_node(lambda: np.arange(5), is_maker=True, gather=lambda own: [own])
sys.stdout.buffer.write(pickle.dumps(column))
sys.stdout.flush()
sys.stdin.read()
"""


def test_what_another_process_made_outlives_it():
    command = [sys.executable, "-c", MAKER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as maker:
        column = pickle.load(maker.stdout)
        maker.kill()
    wait_until(lambda: not is_alive(maker.pid))

    # Read here, and sent on to a third process.
    for array in (column, pickle.loads(pickle.dumps(column))):
        assert array.tolist() == [0, 1, 2, 3, 4]

    # As in a container, where the maker does not exist, or is another process.
    other = (node_name(), True, None, (column.path, (1, 1)))
    made = once_per_node(
        lambda: "own",
        is_maker=False,
        gather=lambda own: [own, other],
    )
    assert made == "own"


def test_a_node_maps_the_arrays_of_its_own_maker():
    """Another node's come first in the reports: with them each rank would make its own."""
    made = []

    def make():
        made.append(np.arange(5))
        return made[-1]

    other = ("other node", True, None, ("/proc/1/fd/0", (1, 1)))
    column = once_per_node(make, is_maker=True, gather=lambda own: [other, own])
    assert column.tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 1
