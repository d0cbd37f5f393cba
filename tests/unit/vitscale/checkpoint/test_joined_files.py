"""Ranks of a node join their tensors in one file; it is read as if each had written its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.ranks.thread_ranks import GatheredExchange, run_ranks
from vitscale.checkpoint import joined_files, store
from vitscale.checkpoint.catalogue import slice_name
from vitscale.checkpoint.commit import Commit, Save, commit_save
from vitscale.checkpoint.folders import read_checkpoint
from vitscale.checkpoint.joined_files import JOINED_BYTES, writing_ranks
from vitscale.checkpoint.store import CheckpointStore
from vitscale.checkpoint.tensors import HostCopy
from vitscale.config.errors import UserError
from vitscale.distributed import node_share
from vitscale.distributed.world import World

NUM_RANKS, PER_NODE = 10, 4
NODES = [f"node {rank // PER_NODE}" for rank in range(NUM_RANKS)]
# 3 elements of a bf16 tensor per rank: the next tensor would start at an odd place.
WEIGHTS = torch.arange(5.0 * NUM_RANKS).view(NUM_RANKS, 5)
MOMENTS = torch.arange(3 * NUM_RANKS, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(node_share, "SHARED_MEMORY", str(tmp_path / "shm"))
    monkeypatch.setattr(node_share.tempfile, "gettempdir", lambda: str(tmp_path / "shm"))
    monkeypatch.setattr(node_share, "SPARE_BYTES", 0)
    monkeypatch.setattr(joined_files, "MAX_RANK_FILES", 4)
    return tmp_path


def share_of(rank: int) -> dict[str, torch.Tensor]:
    return {
        slice_name("model.w", start=5 * rank, shape=WEIGHTS.shape): WEIGHTS[rank],
        slice_name("exp_avg.w", start=3 * rank, shape=MOMENTS.shape): MOMENTS[3 * rank :][:3],
        f"model.of {rank}": torch.tensor(rank, dtype=torch.uint8),
    }


def save(folder: Path, *, fail: int | None = None) -> list[Commit | str]:
    def one(rank: int, gather: Any) -> Commit | str:
        def pieces() -> Any:
            if rank == fail:
                raise UserError("not finite")
            copy = HostCopy(torch.device("cpu"))
            copy.prepare(share_of(rank))
            yield from copy.take(share_of(rank))

        step = Save(
            checkpoints=folder / "checkpoints",
            step=1,
            attempt="a",
            rank=rank,
            keep=1,
            progress={},
            description={},
        )
        writers = writing_ranks(NODES, [1] * NUM_RANKS)
        assert writers is not None
        exchange = GatheredExchange(rank, gather)
        try:
            return commit_save(step, pieces(), exchange=exchange, writer=writers[rank])
        except UserError as error:
            return str(error)

    return run_ranks(NUM_RANKS, one)


def test_a_node_writes_one_file_with_all_tensors(folder: Path) -> None:
    (committed, *others) = save(folder)
    assert isinstance(committed, Commit) and others == [committed] * (NUM_RANKS - 1)
    checkpoint = read_checkpoint(committed.folder)
    assert checkpoint.files == tuple(f"rank-{rank:05d}.safetensors" for rank in (0, 4, 8))
    found = checkpoint.tensors()
    assert torch.equal(found["model.w"], WEIGHTS) and torch.equal(found["exp_avg.w"], MOMENTS)
    assert [found[f"model.of {rank}"].item() for rank in range(NUM_RANKS)] == list(range(NUM_RANKS))
    assert len(load_file(committed.folder / checkpoint.files[0])) == 3 * PER_NODE
    assert not list((folder / "shm").iterdir())


def test_ranks_agree_through_the_key_value_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node, so rank 0 writes for all, in both saves."""
    monkeypatch.setattr(store, "MAX_RANK_FILES", 4)
    monkeypatch.setattr(store, "broadcast_object", lambda _: "name")
    messages = dist.HashStore()

    def one(rank: int, _: Any) -> Commit | None:
        world = World(
            rank=rank,
            world_size=NUM_RANKS,
            local_rank=rank,
            local_world_size=NUM_RANKS,
            device=torch.device("cpu"),
            store=messages,
        )
        with CheckpointStore(folder, keep=2, world=world) as each:
            for step in (1, 2):
                each.save(share_of(rank), step=step, progress={}, description={})
            return each.wait()

    committed = run_ranks(NUM_RANKS, one)[0]
    assert committed is not None and committed.step == 2
    for name in ("step-00000001", "step-00000002"):
        checkpoint = read_checkpoint(folder / "checkpoints" / name)
        assert checkpoint.files == ("rank-00000.safetensors",)
        assert torch.equal(checkpoint.tensors()["model.w"], WEIGHTS)
    assert not list((folder / "shm").iterdir()) and messages.num_keys() <= 2


def test_rank_without_room_writes_its_own_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_share, "SPARE_BYTES", 1 << 60)
    committed = save(folder)[0]
    assert isinstance(committed, Commit)
    assert len(read_checkpoint(committed.folder).files) == NUM_RANKS
    assert torch.equal(read_checkpoint(committed.folder).tensors()["model.w"], WEIGHTS)


@pytest.mark.parametrize("fail", [0, 6])
def test_error_of_a_joining_rank_reaches_all(folder: Path, fail: int) -> None:
    assert save(folder, fail=fail) == [f"rank {fail}: not finite"] * NUM_RANKS
    assert not list((folder / "checkpoints").glob("*")) and not list((folder / "shm").iterdir())


def test_files_stay_few_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    nodes = [f"node {rank // 8}" for rank in range(512)]
    assert writing_ranks(nodes[:64], [1] * 64) is None
    writers = writing_ranks(nodes, [15 << 20] * 512)
    assert writers is not None and len(set(writers)) == 64
    assert all(nodes[writer] == nodes[rank] for rank, writer in enumerate(writers))
    # Files that are large already stay apart, so that several processes write them.
    writers = writing_ranks(nodes, [JOINED_BYTES] * 512)
    assert writers == list(range(512))
