"""A value is made once per node and mapped by the other ranks; nothing is left behind."""

from __future__ import annotations

import atexit
import os
import pickle
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


def test_one_rank_of_a_node_makes_it_and_removes_it(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, at_exit = [], list[Any]()
    monkeypatch.setattr(
        atexit, "register", lambda *call, **options: at_exit.append((call, options))
    )

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
    os.utime(folder, (0, 0))
    node_files._remove_leftover(folder)
    assert kept(memory) == [folder], "a rank uses it"
    [((remove, *arguments), options)] = at_exit
    remove(*arguments, **options)
    assert not kept(memory)


def test_columns_pickle_as_their_path_and_parts_as_arrays(memory: Path) -> None:
    column: Column = once_per_node(
        lambda: np.arange(100_000), is_maker=True, gather=lambda own: [own]
    )
    assert len(pickle.dumps(column)) < 1000
    for array in (column, column[7:90], column + 1):
        assert np.array_equal(pickle.loads(pickle.dumps(array)), array)


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


def test_temporary_folder_where_the_memory_is_small(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "_free", lambda folder: 0 if folder == str(memory) else 1 << 40)
    found = once_per_node(lambda: np.arange(5), is_maker=True, gather=lambda own: [own])
    assert found.tolist() == [0, 1, 2, 3, 4] and not kept(memory)
    monkeypatch.setattr(node_files, "_free", lambda _: 0)
    with pytest.raises(StorageError, match="has room"):
        once_per_node(lambda: np.arange(5), is_maker=True, gather=lambda own: [own])


def test_leftovers_of_killed_jobs_are_removed(memory: Path) -> None:
    left = private_folder(str(memory)) / "1.shared"
    left.mkdir()
    os.utime(left, (0, 0))
    once_per_node(lambda: 1, is_maker=True, gather=lambda own: [own])
    assert not left.exists() and len(kept(memory)) == 1
