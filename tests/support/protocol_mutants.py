"""The commit protocol with one step removed; a power-loss test must detect each.

Each row of MUTANTS replaces one name in vitscale.checkpoint.commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vitscale.checkpoint import commit
from vitscale.distributed.atomic_files import fsync_folder


def rmtree(folder: Path) -> None:
    """shutil.rmtree in calls with whole paths."""
    if not folder.exists():
        raise FileNotFoundError(folder)
    for child in sorted(folder.iterdir()):
        os.unlink(child)
    os.rmdir(folder)


def nothing(*_: Any, **__: Any) -> None:
    pass


def rename_only(temporary: Path, final: Path, *, flush: tuple[str, ...] = ()) -> None:
    if "content" in flush:
        fsync_folder(temporary)
    os.rename(temporary, final)
    if "parent" in flush:
        fsync_folder(final.parent)


def written_unflushed(path: Path, pieces: Any) -> tuple[int, str]:
    flush = os.fsync
    os.fsync = nothing
    try:
        return WRITE_NEW_FILE(path, pieces)
    finally:
        os.fsync = flush


def tensors_unflushed(path: Path, pieces: Any) -> tuple[int, str]:
    return (WRITE_NEW_FILE if path.name == "manifest.json" else written_unflushed)(path, pieces)


def manifest_unflushed(path: Path, pieces: Any) -> tuple[int, str]:
    return (written_unflushed if path.name == "manifest.json" else WRITE_NEW_FILE)(path, pieces)


def pruned_first(temporary: Path, final: Path) -> None:
    for path in final.parent.glob("step-*"):
        rmtree(path)
    COMMIT_FOLDER(temporary, final)


def folders_unflushed(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


WRITE_NEW_FILE, COMMIT_FOLDER = commit.write_new_file, commit.commit_folder
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no fsync of the tensors": ("write_new_file", tensors_unflushed),
    "no fsync of the manifest": ("write_new_file", manifest_unflushed),
    "no fsync of the folder": ("commit_folder", partial(rename_only, flush=("parent",))),
    "no fsync of the parent": ("commit_folder", partial(rename_only, flush=("content",))),
    "no fsync of new parents": ("make_folders", folders_unflushed),
    "no rename": ("commit_folder", nothing),
    "old steps removed first": ("commit_folder", pruned_first),
}
