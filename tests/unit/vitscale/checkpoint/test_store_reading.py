"""What the store reads back, keeps and refuses: valid checkpoints only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.vitscale.checkpoint.saved_steps import flip, save
from vitscale.checkpoint import commit
from vitscale.checkpoint.folders import (
    newest_checkpoint,
    read_checkpoint,
    resolve_weights,
    step_folders,
)
from vitscale.checkpoint.store import run_folder_lock
from vitscale.config.errors import UserError
from vitscale.distributed.world import World


def test_saved_state_is_read_back(tmp_path: Path, world: World) -> None:
    checkpoint = read_checkpoint(save(tmp_path, world, step=7))
    assert (checkpoint.step, checkpoint.progress) == (7, {"n": 7})
    assert checkpoint.description == {"grid": [1, 2]}
    assert torch.equal(checkpoint.tensors(prefix="model.")["a"], torch.full((3,), 7.0))
    assert set(checkpoint.tensors()) == {"model.a", "exp_avg.a"}


def test_resumed_run_keeps_commits_despite_damaged_later_steps(
    tmp_path: Path, world: World
) -> None:
    """All newer steps are damaged: resuming from 10, retention must count none of them."""
    for step in (10, 20, 30):
        save(tmp_path, world, step=step)
    folders = step_folders(tmp_path / "checkpoints")
    for folder in folders[:2]:
        flip(folder / "rank-00000.safetensors", -1)
    for step in (11, 12, 13):
        save(tmp_path, world, step=step, keep=1)
        checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
        assert checkpoint is not None and checkpoint.step == step and len(complaints) == 2
    names = [path.name for path in step_folders(tmp_path / "checkpoints")]
    assert names == ["step-00000030", "step-00000020", "step-00000013"]


def test_valid_step_is_not_written_twice(tmp_path: Path, world: World) -> None:
    folder = save(tmp_path, world, step=1)
    before = (folder / "manifest.json").stat().st_ino
    assert save(tmp_path, world, step=1) == folder
    assert (folder / "manifest.json").stat().st_ino == before
    assert not list(folder.parent.glob(".*"))


def test_save_that_reads_back_differently_is_refused(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, world, step=1)
    write = commit.write_new_file

    def lying_disk(path: Path, pieces: object) -> tuple[int, str]:
        written = write(path, pieces)
        if path.suffix == ".safetensors":
            flip(path, -1)
        return written

    monkeypatch.setattr(commit, "write_new_file", lying_disk)
    with pytest.raises(UserError, match="does not match its hash"):
        save(tmp_path, world, step=2, keep=1)
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 1 and complaints == []
    # Without reading back, retention would have dropped the last valid step.
    monkeypatch.setattr(commit, "verify_files", lambda *_, **__: None)
    save(tmp_path, world, step=2, keep=1)
    assert newest_checkpoint(tmp_path / "checkpoints")[0] is None


def test_second_holder_of_a_run_folder_is_refused(tmp_path: Path, world: World) -> None:
    with run_folder_lock(tmp_path / "run", world=world):
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        with pytest.raises(UserError, match="another job is training"):
            with run_folder_lock(tmp_path / "run", world=world):
                raise AssertionError
    with run_folder_lock(tmp_path / "run", world=world):
        pass


def test_init_takes_a_run_or_a_checkpoint_folder(tmp_path: Path, world: World) -> None:
    folder = save(tmp_path, world, step=4)
    assert resolve_weights(str(tmp_path)) == resolve_weights(str(folder))
    checkpoint, complaints = resolve_weights(str(tmp_path))
    assert checkpoint.step == 4 and complaints == []
    flip(save(tmp_path, world, step=5) / "rank-00000.safetensors", -1)
    checkpoint, complaints = resolve_weights(str(tmp_path))
    assert checkpoint.step == 4 and "step-00000005" in complaints[0]
    with pytest.raises(UserError, match="no such run"):
        resolve_weights(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=f"did you mean {tmp_path}[?]"):
        resolve_weights(f"{tmp_path}x")
    with pytest.raises(UserError, match="holds no valid checkpoint"):
        resolve_weights(str(folder.parent))
