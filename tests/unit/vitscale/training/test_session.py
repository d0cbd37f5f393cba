"""What ranks share when a session opens."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.thread_ranks import run_ranks
from vitscale.distributed import node_share
from vitscale.training import session

PER_NODE = 4
LOCAL = threading.local()


def test_a_node_reads_the_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks on two nodes."""
    checked: list[bool] = []

    def read(run: object, *, check_files: bool) -> tuple[Any, None]:
        checked.append(check_files)
        return np.arange(5), None

    monkeypatch.setattr(session, "_read_index", read)
    monkeypatch.setattr(session, "gather_objects", lambda value: LOCAL.gather(value))
    monkeypatch.setattr(node_share, "node_identity", lambda: f"node {LOCAL.rank // PER_NODE}")
    monkeypatch.setattr(node_share, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(node_share, "SPARE_BYTES", 0)
    run: Any = SimpleNamespace(data=SimpleNamespace(path="shards", num_workers=0))

    def one(rank: int, gather: Any) -> Any:
        LOCAL.rank, LOCAL.gather = rank, gather
        world: Any = SimpleNamespace(rank=rank, is_first=rank == 0)
        return session._read_data(run, world)

    for data, val_index, lines in run_ranks(8, one):
        assert data.tolist() == [0, 1, 2, 3, 4] and val_index is None and lines == []
    assert sorted(checked) == [False, True]
