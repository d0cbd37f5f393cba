"""A value is made once per node and mapped by the other ranks; nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.thread_ranks import run_ranks
from vitscale.config.errors import UserError
from vitscale.distributed import node_share
from vitscale.distributed.node_share import (
    SharedFile,
    once_per_node,
    read_shared,
    receive,
    share,
)

PER_NODE = 4
Gather = Callable[[Any], list[Any]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the machine's shared memory and temporary folder."""
    monkeypatch.setattr(node_share, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(node_share.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(node_share, "SPARE_BYTES", 0)
    names = threading.local()
    monkeypatch.setattr(node_share, "node_identity", lambda: names.node)
    monkeypatch.setattr(node_share, "_test_names", names, raising=False)
    return tmp_path


def shared(num_ranks: int, make: Callable[[int], Any]) -> list[tuple[Any, list[str]]]:
    def one(rank: int, gather: Gather) -> tuple[Any, list[str]]:
        node_share._test_names.node = f"node {rank // PER_NODE}"  # type: ignore[attr-defined]  # above
        return once_per_node(lambda: make(rank), rank=rank, gather=gather)

    return run_ranks(num_ranks, one)


def test_first_rank_of_a_node_makes_it_for_all(folder: Path) -> None:
    made: Counter[int] = Counter()

    def make(rank: int) -> dict[str, Any]:
        made[rank] += 1
        return {"rows": np.arange(1000), "empty": np.empty(0), "names": ("a", "b")}

    found = shared(10, make)
    assert made == {0: 1, 4: 1, 8: 1}
    for rank, (value, lines) in enumerate(found):
        assert np.array_equal(value["rows"], np.arange(1000)) and value["names"] == ("a", "b")
        assert not value["rows"].flags.writeable and not lines, rank
    assert not list(folder.iterdir()), "the memory has no name once all have mapped it"


def test_workers_map_what_their_rank_has_mapped(folder: Path) -> None:
    """Arrays of the shared file are not copied, others once for all workers."""
    node_share._test_names.node = "node"  # type: ignore[attr-defined]  # above

    def once(for_workers: bool) -> tuple[Any, int]:
        made = {"rows": np.arange(100_000), "names": ("a",)}
        value, lines = once_per_node(
            lambda: made, rank=0, gather=lambda own: [own], for_workers=for_workers
        )
        assert not lines and (value is made) != for_workers
        value["own"], value["part"] = np.arange(5), value["rows"][7:90]
        with share(value) as shared:
            copies = [os.dup(descriptor) for descriptor in shared.descriptors]
            size = os.fstat(shared.descriptors[0]).st_size
        found = receive(shared.pieces, copies)
        assert found.keys() == value.keys() and found["names"] == ("a",)
        assert all(np.array_equal(found[key], value[key]) for key in ("rows", "own", "part"))
        assert not found["rows"].flags.writeable
        return value, size

    gc.collect()
    open_before = len(os.listdir("/proc/self/fd"))
    value, size = once(for_workers=True)
    assert size < 1000 and not list(folder.iterdir())
    value, size = once(for_workers=False)
    assert size > 800_000
    del value
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_error_of_any_node_is_raised_on_all_ranks(folder: Path) -> None:
    def make(rank: int) -> int:
        if rank == 4:
            raise UserError("no index", where="shards")
        return rank

    def one(rank: int, gather: Gather) -> str:
        node_share._test_names.node = f"node {rank // PER_NODE}"  # type: ignore[attr-defined]  # above
        with pytest.raises(UserError) as caught:
            once_per_node(lambda: make(rank), rank=rank, gather=gather)
        return str(caught.value)

    texts = run_ranks(8, one)
    assert texts[4] == "shards: no index" and set(texts) == {texts[4], "rank 4: shards: no index"}
    assert not list(folder.iterdir())


@pytest.mark.parametrize("fault", ["no room", "cannot be mapped"])
def test_without_shared_memory_each_rank_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def refuse(path: Path) -> Any:
        raise OSError(f"{path.parent} cannot be mapped")

    if fault == "no room":
        monkeypatch.setattr(node_share, "SPARE_BYTES", 1 << 60)
    else:
        monkeypatch.setattr(node_share, "read_shared", refuse)
    found = shared(5, lambda rank: np.full(3, rank))
    assert [value.tolist() for value, _ in found] == [[rank] * 3 for rank in range(5)]
    assert all(f"every rank reads it alone: {folder}" in lines[0] for _, lines in found)
    assert fault.split()[-1] in found[0][1][0] and not list(folder.iterdir())


def test_leftovers_are_removed_and_files_in_use_stay(folder: Path) -> None:
    """As of a killed job, and of another job on the same node."""
    killed = SharedFile.write(np.arange(3))
    os.close(killed._descriptor)
    running = SharedFile.write(np.arange(4))
    assert list(folder.iterdir()) == [running.path]
    assert read_shared(running.path).tolist() == [0, 1, 2, 3]
    with ThreadPoolExecutor(8) as starts:  # eight starts at once
        files = list(starts.map(lambda number: SharedFile.write(np.arange(number)), range(8)))
    assert [len(read_shared(file.path)) for file in files] == list(range(8))
    for file in [running, *files]:
        file.remove()
    assert not list(folder.iterdir())


def test_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SharedFile.write(np.arange(3))
    monkeypatch.setattr(os, "getuid", lambda: 1234567)
    with pytest.raises(OSError, match="belongs to another user"):
        read_shared(file.path)
    file.remove()
