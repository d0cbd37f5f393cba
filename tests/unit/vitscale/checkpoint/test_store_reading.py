"""What the store reads back, keeps and refuses: valid checkpoints only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.vitscale.checkpoint.saved_steps import flip, refuse, save
from vitscale.checkpoint import commit
from vitscale.checkpoint.folders import (
    newest_checkpoint,
    read_checkpoint,
    resolve_weights,
    step_folders,
)
from vitscale.checkpoint.store import CheckpointStore, run_folder_lock
from vitscale.config.errors import FailureKind, UserError
from vitscale.distributed.failures.events import Failure, record_failure
from vitscale.distributed.world import World


def test_saved_state_is_read_back(tmp_path: Path, world: World) -> None:
    checkpoint = read_checkpoint(save(tmp_path, world, step=7))
    assert (checkpoint.step, checkpoint.progress) == (7, {"n": 7})
    assert checkpoint.description == {"grid": [1, 2]}
    assert torch.equal(checkpoint.tensors(prefix="model.")["a"], torch.full((3,), 7.0))
    assert set(checkpoint.tensors()) == {"model.a", "exp_avg.a"}


def test_newest_is_by_step_and_old_ones_are_removed(tmp_path: Path, world: World) -> None:
    for step in (9, 10, 11, 100_000_000):
        save(tmp_path, world, step=step, keep=2)
    names = [path.name for path in step_folders(tmp_path / "checkpoints")]
    assert names == ["step-100000000", "step-00000011"]
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 100_000_000 and complaints == []
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_store_refuses_a_folder_without_a_readable_checkpoint(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=3, world=world)
    assert store.newest() == (None, [])
    tensors = save(tmp_path, world, step=1) / "rank-00000.safetensors"
    away = tensors.rename(tmp_path / "away")
    with pytest.raises(UserError, match="none that can be read(.|\n)*No such file"):
        store.newest()
    away.rename(tensors)
    assert store.newest()[0] == read_checkpoint(tensors.parent)
    monkeypatch.setattr("vitscale.checkpoint.store.step_folders", refuse)
    with pytest.raises(UserError, match="disk: cannot be read"):
        store.newest()


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


def test_retention_counts_only_valid_steps(tmp_path: Path, world: World) -> None:
    for step in (1, 2, 3):
        save(tmp_path, world, step=step)
    (tmp_path / "checkpoints/step-00000003/rank-00000.safetensors").unlink()
    save(tmp_path, world, step=4, keep=2)
    names = [path.name for path in step_folders(tmp_path / "checkpoints")]
    assert names == ["step-00000004", "step-00000002"]


def test_clocks_have_no_effect(tmp_path: Path, world: World) -> None:
    """The newest step has the oldest times."""
    for step in (1, 2):
        folder = save(tmp_path, world, step=step)
        for path in (folder, *folder.iterdir()):
            os.utime(path, (1e9 / step, 1e9 / step))
    checkpoint, _ = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 2
    save(tmp_path, world, step=3, keep=2)
    assert [path.name[-1] for path in step_folders(tmp_path / "checkpoints")] == ["3", "2"]


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
        with pytest.raises(UserError, match="another job is training"):
            with run_folder_lock(tmp_path / "run", world=world):
                raise AssertionError
    with run_folder_lock(tmp_path / "run", world=world):
        pass


def test_a_failure_recorded_meanwhile_keeps_no_unused_folder(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = os.rmdir

    def record_then_remove(*arguments: Any, **options: Any) -> None:
        record_failure(tmp_path / "run", Failure(kind=FailureKind.OTHER, what="an error"))
        remove(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", record_then_remove)
    with pytest.raises(UserError, match="init"), run_folder_lock(tmp_path / "run", world=world):
        raise UserError("init=nowhere")
    assert not list(tmp_path.iterdir())


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


def test_leftovers_that_cannot_be_removed_at_first_are_a_warning(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, while another node has a file open."""
    leftover = tmp_path / "checkpoints/.step-00000001.old"
    leftover.mkdir(parents=True)
    remove, calls = shutil.rmtree, []

    def fail_once(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            refuse()
        remove(folder)

    monkeypatch.setattr(commit.shutil, "rmtree", fail_once)
    store = CheckpointStore(tmp_path, keep=3, world=world)
    store.save({"model.a": torch.zeros(3)}, step=2, progress={}, description={})
    committed = store.wait()
    assert committed is not None and not leftover.exists()
    assert committed.warnings == (f"{leftover}: could not be removed (Input/output error)",)
