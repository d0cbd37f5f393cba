"""A rank reads the ranges it needs from the files of any layout, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vitscale.checkpoint.catalogue import Catalogue, read_table, slice_name
from vitscale.checkpoint.folders import verify_share
from vitscale.checkpoint.tensors import MAX_OPEN_FILES, SavedTensors
from vitscale.distributed.atomic_files import blake3_of_file

WHOLE = torch.arange(60.0).view(3, 20)


def write(folder: Path, cuts: list[int]) -> list[Path]:
    """Slices of WHOLE, one file each; the last file also has a whole tensor."""
    edges = sorted({0, *cuts, WHOLE.numel()})
    paths = []
    for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        paths.append(folder / f"rank-{number:05d}.safetensors")
        name = slice_name("model.w", start=start, shape=WHOLE.shape)
        tensors = {name: WHOLE.flatten()[start:stop].clone()}
        save_file(tensors | ({"ema.b": torch.ones(2, 2)} if stop == 60 else {}), paths[-1])
    return paths


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 59), max_size=8),
    start=st.integers(0, 59),
    count=st.integers(1, 60),
)
def test_any_range_is_read_from_any_layout(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], start: int, count: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    count = min(count, 60 - start)
    catalogue = Catalogue(map(read_table, reversed(write(folder, cuts))))
    counts, preadv = list[int](), os.preadv
    with SavedTensors(folder, catalogue) as saved, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda *values: counts.append(preadv(*values)) or counts[-1])
        part = saved.part("model.w", start, count)
        assert torch.equal(part, WHOLE.flatten()[start : start + count])
        assert sum(counts) == 4 * count, "no byte more than needed"
        assert torch.equal(saved.whole("ema.b"), torch.ones(2, 2))
        assert torch.equal(saved.whole("model.w"), WHOLE)


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitscale.checkpoint.tensors.MAX_OPEN_FILES", 3)
    catalogue = Catalogue(map(read_table, write(tmp_path, list(range(1, 60)))))
    before = len(os.listdir("/proc/self/fd"))
    with SavedTensors(tmp_path, catalogue) as saved:
        assert torch.equal(saved.whole("model.w"), WHOLE)
        assert len(os.listdir("/proc/self/fd")) == before + 3 < before + MAX_OPEN_FILES
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_ranks_share_the_verification(tmp_path: Path, world_size: int) -> None:
    """Each file is hashed once; every rank reports its first damaged file."""
    paths = write(tmp_path, [10, 20, 30, 40])
    entries = {p.name: {"bytes": p.stat().st_size, "blake3": blake3_of_file(p)} for p in paths}
    hashed: list[int] = []
    for rank in range(world_size):
        count = lambda: hashed.append(1)  # noqa: E731  # once per file of this size
        damage = verify_share(
            tmp_path, entries, rank=rank, world_size=world_size, on_progress=count
        )
        assert damage is None
    assert len(hashed) == len(paths)
    for path in paths[1], paths[3]:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    shares = [
        verify_share(tmp_path, entries, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    number, error = min((each for each in shares if each is not None), key=lambda each: each[0])
    assert number == 1 and str(paths[1]) in str(error)
