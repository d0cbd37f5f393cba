"""What ranks share when a session opens."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.ranks.thread_ranks import run_ranks
from vitscale.data.settings import DataSettings
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


@pytest.mark.parametrize("reader", ["index", "webdataset"])
def test_each_reader_opens_what_is_evaluated(tmp_path: Path, reader: str) -> None:
    shards = write_shard_folder(tmp_path / "a", num_per_class=10, num_shards=2)
    whole = {"path": str(shards), "global_batch": 8, "reader": reader, "val_split": "train"}
    classes = ("cat", "dog")
    if reader == "webdataset":
        classes = ("0", "1")
        whole["webdataset"] = {"num_samples": 20, "num_classes": 2}

    def num_evaluated(**data: Any) -> int | None:
        run: Any = SimpleNamespace(data=DataSettings.model_validate(whole | data), seed=0)
        training_set, evaluated = session._read_index(run, check_files=True)
        assert training_set.num_samples == (18 if "dev_percent" in data else 20)
        assert training_set.classes == classes
        return None if evaluated is None else evaluated.num_samples

    assert num_evaluated() == 20
    assert num_evaluated(val_split=None) is None
    if reader == "index":
        assert num_evaluated(dev_percent=10.0) == 2
