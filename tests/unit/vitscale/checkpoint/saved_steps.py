"""Save steps with a store, and damage them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from vitscale.checkpoint.store import CheckpointStore
from vitscale.distributed.world import World


def save(folder: Path, world: World, *, step: int, keep: int = 3) -> Path:
    store = CheckpointStore(folder, keep=keep, world=world)
    tensors = {"model.a": torch.full((3,), float(step)), "exp_avg.a": torch.arange(3.0)}
    store.save(tensors, step=step, progress={"n": step}, description={"grid": [1, 2]})
    committed = store.wait()
    assert committed is not None
    return committed.folder


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")
