"""A value is made once per node and mapped by the other ranks; nothing is left behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.thread_ranks import run_ranks
from vitscale.config.errors import StorageError
from vitscale.distributed import node_files
from vitscale.distributed.node_files import Column, once_per_node, private_folder

PER_NODE = 4


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the machine's shared memory and temporary folder."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(node_files, "SHARED_MEMORY", str(tmp_path / "shm"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "shm"


def kept(memory: Path) -> list[Path]:
    return list(memory.glob("vitscale-*/*"))


def leave(memory: Path) -> None:
    for folder in kept(memory):
        node_files._leave(folder)


def test_first_rank_of_a_node_makes_it_and_the_last_removes_it(memory: Path) -> None:
    made = []

    def make(rank: int) -> dict[str, Any]:
        made.append(rank)
        rows = np.arange(1000)
        return {"rows": rows, "same": rows, "empty": np.empty(0), "names": ("a", "b")}

    values = run_ranks(
        3, lambda rank, gather: once_per_node(lambda: make(rank), is_maker=rank == 0, gather=gather)
    )
    assert made == [0]
    for value in values:
        assert np.array_equal(value["rows"], np.arange(1000)) and value["names"] == ("a", "b")
        assert not value["rows"].flags.writeable and value["empty"].size == 0
        assert value["rows"].path == value["same"].path
    [folder] = kept(memory)
    script = "import sys, fcntl, os; fcntl.flock(os.open(sys.argv[1], 0), 1); print(); input()"
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        node_files._leave(folder)
        assert kept(memory) == [folder], "another rank uses it"
        other.communicate(b"\n")
    node_files._leave(folder)
    assert not kept(memory)


def test_columns_pickle_as_their_path_and_parts_as_arrays(memory: Path) -> None:
    column: Column = once_per_node(
        lambda: np.arange(100_000), is_maker=True, gather=lambda own: [own]
    )
    assert len(pickle.dumps(column)) < 1000
    for array in (column, column[7:90], column + 1):
        assert np.array_equal(pickle.loads(pickle.dumps(array)), array)
    leave(memory)


def test_error_of_any_rank_is_raised_on_all(memory: Path) -> None:
    def make(rank: int) -> int:
        if rank == PER_NODE:
            raise StorageError("no index", where="shards")
        return rank

    def one(rank: int, gather: Any) -> str:
        with pytest.raises(StorageError) as caught:
            once_per_node(lambda: make(rank), is_maker=rank % PER_NODE == 0, gather=gather)
        return str(caught.value)

    assert set(run_ranks(2 * PER_NODE, one)) == {"shards: no index"}
    leave(memory)


def test_temporary_folder_where_the_memory_is_small(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "_free", lambda folder: 0 if folder == str(memory) else 1 << 40)
    found = once_per_node(lambda: np.arange(5), is_maker=True, gather=lambda own: [own])
    assert found.tolist() == [0, 1, 2, 3, 4] and not kept(memory)
    leave(memory.parent)
    monkeypatch.setattr(node_files, "_free", lambda _: 0)
    with pytest.raises(StorageError, match="has room"):
        once_per_node(lambda: np.arange(5), is_maker=True, gather=lambda own: [own])


def test_leftovers_of_killed_jobs_are_removed(memory: Path) -> None:
    left = private_folder(str(memory)) / "1.shared"
    left.mkdir()
    os.utime(left, (0, 0))
    once_per_node(lambda: 1, is_maker=True, gather=lambda own: [own])
    assert not left.exists() and len(kept(memory)) == 1
    leave(memory)
