"""One job at a time writes to a run folder, on any file system."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from vitscale.checkpoint import store
from vitscale.checkpoint.store import FolderTakenError, run_folder_lock
from vitscale.config.errors import UserError
from vitscale.distributed.world import World


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "errors_on_all_ranks", lambda *_: nullcontext())
    for name, seconds in {"BEAT_S": 0.02, "SILENT_S": 0.4, "WAIT_S": 1.0}.items():
        monkeypatch.setattr(store, name, seconds)
    return tmp_path / "run"


def lock(folder: Path) -> AbstractContextManager[None]:
    one = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    return run_folder_lock(folder, world=World(device=torch.device("cpu"), **one))


def test_a_second_job_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SLURM it waits first, and may start again."""
    with lock(folder):
        with pytest.raises(UserError, match=f"another job .*process {os.getpid()} on"):
            lock(folder).__enter__()
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        with pytest.raises(FolderTakenError, match="another job"):
            lock(folder).__enter__()
    with lock(folder):
        assert (folder / ".lock").read_text().startswith("job 17 on ")


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_job_on_another_node_holds_the_folder_while_it_touches_its_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_flock: bool
) -> None:
    """Where flock is missing, or does not see other nodes."""

    def flock(*_: int) -> None:
        if not has_flock:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with lock(folder):
        (folder / ".lock").write_text("job 3 on n7")
        with pytest.raises(UserError, match="another job .*: job 3 on n7"):
            lock(folder).__enter__()
    (folder / ".lock").write_text("job 3 on n7")
    with lock(folder):
        assert (folder / ".lock").read_text().startswith("process ")
