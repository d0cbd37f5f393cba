"""The ranks verify a checkpoint together and all choose the same one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.thread_ranks import run_ranks
from vitscale.checkpoint import folders, store
from vitscale.checkpoint.commit import Save, commit_save
from vitscale.checkpoint.folders import Checkpoint
from vitscale.checkpoint.store import CheckpointStore
from vitscale.checkpoint.tensors import HostCopy
from vitscale.config.errors import UserError
from vitscale.distributed import world
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.world import World

NUM_RANKS = 5
LOCAL = threading.local()


def save(folder: Path, step: int) -> Path:
    def one(rank: int, gather: Any) -> Path:
        copy, tensors = HostCopy(torch.device("cpu")), {f"model.{rank}": torch.full((9,), rank)}
        copy.prepare(tensors)
        facts: dict[str, Any] = {"progress": {}, "description": {}, "keep": 2, "attempt": "a"}
        each = Save(checkpoints=folder / "checkpoints", step=step, rank=rank, **facts)
        return commit_save(each, copy.take(tensors), gather=gather).folder

    return run_ranks(NUM_RANKS, one)[0]


def on_all_ranks(folder: Path, work: Callable[[CheckpointStore], Any]) -> list[Any]:
    def one(rank: int, gather: Any) -> Any:
        LOCAL.gather = gather
        own = World(
            rank=rank,
            world_size=NUM_RANKS,
            local_rank=rank,
            local_world_size=NUM_RANKS,
            device=torch.device("cpu"),
        )
        return work(CheckpointStore(folder, keep=2, world=own))

    return run_ranks(NUM_RANKS, one)


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Ranks as threads. How often each file was hashed."""
    counts: Counter[str] = Counter()

    def counted(path: Path, **options: Any) -> str:
        counts[f"{path.parent.name}/{path.name}"] += 1
        return blake3_of_file(path, **options)

    monkeypatch.setattr(folders, "blake3_of_file", counted)
    for module in (store, world):
        monkeypatch.setattr(module, "gather_objects", lambda value: LOCAL.gather(value))
    monkeypatch.setattr(store, "control_group", lambda *_, **__: None)
    monkeypatch.setattr(store, "broadcast_object", lambda value: LOCAL.gather(value)[0])
    return counts


def test_all_ranks_choose_the_older_whole_checkpoint(tmp_path: Path, hashed: Counter[str]) -> None:
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    for rank in (3, 4):
        with open(newest / f"rank-0000{rank}.safetensors", "r+b") as file:
            file.write(b"x")
    hashed.clear()
    found = on_all_ranks(tmp_path, CheckpointStore.newest)
    assert all(each == found[0] for each in found)
    checkpoint, complaints = found[0]
    assert isinstance(checkpoint, Checkpoint) and checkpoint.folder == older
    assert len(complaints) == 1 and "step-00000002/rank-00003.safetensors" in complaints[0]
    assert set(hashed.values()) == {1} and len(hashed) == 2 * NUM_RANKS


def test_all_ranks_refuse_a_run_without_a_whole_checkpoint(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "rank-00001.safetensors").unlink()

    def refused(each: CheckpointStore) -> str:
        with pytest.raises(UserError) as caught:
            each.newest()
        return str(caught.value)

    texts = on_all_ranks(tmp_path, refused)
    assert set(texts) == {texts[0]} and "none that can be read" in texts[0]
