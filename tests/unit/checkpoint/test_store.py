"""The commit protocol on one rank: only whole and unchanged checkpoints are ever read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vitscale.checkpoint.store import (
    CheckpointStore,
    newest_checkpoint,
    read_checkpoint,
    resolve_weights,
    run_folder_lock,
    step_folders,
)
from vitscale.distributed import Ranks, process_group
from vitscale.errors import UserError


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with process_group(device="cpu", timeout_min=1, num_threads=1) as joined:
        yield joined
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)


def save(folder: Path, ranks: Ranks, *, step: int, keep: int = 3) -> Path:
    store = CheckpointStore(folder, keep=keep, ranks=ranks)
    tensors = {"model.a": torch.full((3,), float(step)), "exp_avg.a": torch.arange(3.0)}
    return store.save(tensors, step=step, progress={"n": step}, description={"grid": [1, 2]})


def test_what_is_saved_is_read_back(tmp_path: Path, ranks: Ranks) -> None:
    checkpoint = read_checkpoint(save(tmp_path, ranks, step=7))
    assert (checkpoint.step, checkpoint.progress) == (7, {"n": 7})
    assert checkpoint.description == {"grid": [1, 2]}
    assert torch.equal(checkpoint.tensors(prefix="model.")["a"], torch.full((3,), 7.0))
    assert set(checkpoint.tensors()) == {"model.a", "exp_avg.a"}


def test_newest_is_by_step_and_old_ones_go(tmp_path: Path, ranks: Ranks) -> None:
    for step in (9, 10, 100_000_000, 11):
        save(tmp_path, ranks, step=step, keep=2)
    names = [path.name for path in step_folders(tmp_path / "checkpoints")]
    assert names == ["step-100000000", "step-00000011"]
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 100_000_000 and complaints == []
    assert not list((tmp_path / "checkpoints").glob(".*"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "bit flipped": lambda folder: flip(folder / "rank-00000.safetensors", -1),
    "truncated": lambda folder: os.truncate(folder / "rank-00000.safetensors", 20),
    "rank file missing": lambda folder: (folder / "rank-00000.safetensors").unlink(),
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest torn": lambda folder: os.truncate(folder / "manifest.json", 30),
    "manifest of lists": lambda folder: (folder / "manifest.json").write_text("[]"),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_newest_falls_back_to_the_one_before(
    tmp_path: Path, ranks: Ranks, damage: str
) -> None:
    save(tmp_path, ranks, step=1)
    DAMAGE[damage](save(tmp_path, ranks, step=2))
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 1
    assert len(complaints) == 1 and "skipping damaged checkpoint" in complaints[0]
    # The run goes on from step 1 and commits step 2 again, over the damaged folder.
    save(tmp_path, ranks, step=2)
    assert read_checkpoint(tmp_path / "checkpoints/step-00000002").step == 2


def test_manifest_cannot_point_outside_its_folder(tmp_path: Path, ranks: Ranks) -> None:
    folder = save(tmp_path, ranks, step=1)
    (tmp_path / "outside.safetensors").write_bytes(b"x")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {"../../outside.safetensors": manifest["files"]["rank-00000.safetensors"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="outside.safetensors"):
        read_checkpoint(folder)


def test_unfinished_save_is_invisible_and_collected(tmp_path: Path, ranks: Ranks) -> None:
    save(tmp_path, ranks, step=1)
    unfinished = tmp_path / "checkpoints/.step-00000002.tmp"
    unfinished.mkdir()
    (unfinished / "rank-00000.safetensors").write_bytes(b"half")
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 1 and complaints == []
    save(tmp_path, ranks, step=3)
    assert not unfinished.exists()


def test_full_disk_is_one_clear_error_and_loses_nothing(small_disk: Path, ranks: Ranks) -> None:
    save(small_disk, ranks, step=1)
    store = CheckpointStore(small_disk, keep=3, ranks=ranks)
    big = {"model.a": torch.zeros(400_000)}
    with pytest.raises(UserError, match="cannot be written .*No space left"):
        store.save(big, step=2, progress={}, description={})
    checkpoint, complaints = newest_checkpoint(small_disk / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 1 and complaints == []


KILLED_SAVE = """
import os, sys, torch
from pathlib import Path
from vitscale.checkpoint import store
from vitscale.distributed import process_group
folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
def counted(function):
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), 9)
        return function(*args, **kwargs)
    return wrapper
for name in ("fsync", "rename", "replace", "open"):
    setattr(os, name, counted(getattr(os, name)))
with process_group(device="cpu", timeout_min=1, num_threads=1) as ranks:
    calls = 0
    checkpoints = store.CheckpointStore(folder, keep=1, ranks=ranks)
    tensors = {"model.a": torch.full((3,), 2.0)}
    checkpoints.save(tensors, step=2, progress={}, description={})
print("calls", calls)
"""


def test_kill_along_the_protocol_leaves_a_whole_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    """Before every third fsync, rename, replace or open: the old or the new, never nothing."""
    found, kill_at = [], 0
    while not found or found[-1][0] != 0:
        kill_at += 1
        folder = tmp_path / str(kill_at)
        save(folder, ranks, step=1)
        # Every third call: each kill costs a process start, and neighbours rarely differ.
        finished = subprocess.run(
            [sys.executable, "-c", KILLED_SAVE, folder, str(kill_at * 3 - 2)],
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_PORT")},
            capture_output=True,
            text=True,
        )
        checkpoint, complaints = newest_checkpoint(folder / "checkpoints")
        assert checkpoint is not None and complaints == []
        found.append((finished.returncode, checkpoint.step))
        assert finished.returncode in (0, -9), finished.stderr
        assert kill_at < 20
    assert {step for code, step in found if code == -9} == {1, 2}
    assert found[-1] == (0, 2)


def test_second_holder_of_a_run_folder_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    with run_folder_lock(tmp_path / "run", ranks=ranks):
        with pytest.raises(UserError, match="another job is training"):
            with run_folder_lock(tmp_path / "run", ranks=ranks):
                raise AssertionError
    with run_folder_lock(tmp_path / "run", ranks=ranks):
        pass


def test_init_takes_a_run_or_a_checkpoint_folder(tmp_path: Path, ranks: Ranks) -> None:
    folder = save(tmp_path, ranks, step=4)
    assert resolve_weights(str(tmp_path)).step == resolve_weights(str(folder)).step == 4
    with pytest.raises(UserError, match="no such run"):
        resolve_weights(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no valid checkpoint"):
        resolve_weights(str(folder.parent))
