"""Verification: a committed folder is read unchanged or refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.light_checkpoints import LENGTH, light_save, tensor_file
from vitscale.checkpoint import folders
from vitscale.checkpoint.folders import (
    LaterVersion,
    checkpoint_to_resume,
    newest_checkpoint,
    read_checkpoint,
)
from vitscale.config.errors import UserError

RANK_FILE, MANIFEST = "rank-00000.safetensors", "manifest.json"


def save(tmp_path: Path, step: int) -> Path:
    return light_save(tmp_path / "checkpoints", step=step, keep=9).folder


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


def replace_value(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit flipped": lambda folder: flip(folder / RANK_FILE, -1),
    "truncated": lambda folder: os.truncate(folder / RANK_FILE, 20),
    "longer": lambda folder: (folder / RANK_FILE).open("ab").write(b"x"),
    "empty file": lambda folder: os.truncate(folder / RANK_FILE, 0),
    "rank file missing": lambda folder: (folder / RANK_FILE).unlink(),
    "rank file a folder": lambda folder: (
        (folder / RANK_FILE).unlink(),
        (folder / RANK_FILE).mkdir(),
    ),
    "rank file of another step": lambda folder: (folder / RANK_FILE).write_bytes(tensor_file(9)),
    "manifest missing": lambda folder: (folder / MANIFEST).unlink(),
    "manifest torn": lambda folder: os.truncate(folder / MANIFEST, 30),
    "manifest zeroed": lambda folder: (folder / MANIFEST).write_bytes(bytes(300)),
    "manifest of lists": lambda folder: (folder / MANIFEST).write_text("[]"),
    "manifest not UTF-8": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe{}"),
    "manifest of another step": lambda folder: shutil.copy(
        folder.with_name("step-00000001") / MANIFEST, folder
    ),
    "all of another step": lambda folder: shutil.copytree(
        folder.with_name("step-00000001"), folder, dirs_exist_ok=True
    ),
    "version unknown": lambda folder: replace_value(folder / MANIFEST, format_version=3),
    "version 1 pretended": lambda folder: replace_value(folder / MANIFEST, format_version=1),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "a file": lambda folder: (shutil.rmtree(folder), folder.touch()),
}


def as_later_version(folder: Path, *, signed: bool = True) -> None:
    """A valid checkpoint of a later release, with the same or another kind of manifest hash."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text()) | {"format_version": 3}
    del manifest["manifest_blake3"]
    if signed:
        manifest["manifest_blake3"] = folders._hash_of(manifest)
    path.write_text(json.dumps(manifest))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_run_without_a_readable_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    """Starting over would cut the journal and overwrite checkpoints that may become readable."""
    checkpoints = tmp_path / "checkpoints"
    assert checkpoint_to_resume(checkpoints) == (None, [])
    (checkpoints / ".step-00000001.killed.tmp").mkdir(parents=True)
    assert checkpoint_to_resume(checkpoints) == (None, [])
    for step in (1, 2):
        save(tmp_path, step)
    DAMAGE[damage](checkpoints / "step-00000002")
    assert checkpoint_to_resume(checkpoints)[0] is not None
    shutil.rmtree(checkpoints / "step-00000001")
    before = content(checkpoints)
    with pytest.raises(UserError, match="holds checkpoints, but none that can be read") as caught:
        checkpoint_to_resume(checkpoints)
    assert "step-00000002" in caught.value.what and "start over" in str(caught.value.next_step)
    assert content(checkpoints) == before


@pytest.mark.parametrize("signed", [True, False])
def test_checkpoint_of_a_later_release_is_kept_and_refused(tmp_path: Path, signed: bool) -> None:
    save(tmp_path, 1)
    later = save(tmp_path, 2)
    as_later_version(later, signed=signed)
    before = content(later)
    for read in (newest_checkpoint, checkpoint_to_resume):
        with pytest.raises(LaterVersion, match="format version 3, of a later vitscale"):
            read(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="of a later vitscale"):
        save(tmp_path, 2)
    for step in (3, 4):
        light_save(tmp_path / "checkpoints", step=step, keep=1)
    assert content(later) == before
    names = [path.name[-1] for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["2", "4"]


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    DAMAGE[damage](save(tmp_path, 2))
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 1
    assert len(complaints) == 1 and "skipping damaged checkpoint" in complaints[0]
    assert "next:" not in complaints[0]  # the older one is taken without being asked
    # The run resumes from step 1 and commits step 2 again, over the damaged folder.
    save(tmp_path, 2)
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 2 and complaints == []


def test_any_flipped_bit_is_detected(tmp_path: Path) -> None:
    """Each byte in turn with one bit flipped: refused, or (white space) read unchanged."""
    folder = save(tmp_path, 1)
    undamaged = read_checkpoint(folder)
    for name in (RANK_FILE, MANIFEST):
        path = folder / name
        data, survived = path.read_bytes(), 0
        for position in range(len(data)):
            flip(path, position, bit=position % 8)
            try:
                assert read_checkpoint(folder) == undamaged
                survived += 1
            except UserError:
                pass
            path.write_bytes(data)
        assert survived < (1 if name == RANK_FILE else data.count(b" ") + 5)


def write_version_1(folder: Path, *, name: str = RANK_FILE) -> None:
    """As the first release wrote it: SHA-256, no hash of the manifest."""
    folder.mkdir(parents=True)
    data = tensor_file(5)
    (folder / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format_version": 1, "step": 5, "files": {name: entry}}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"progress": {"n": 5}, "description": {}}))


def test_version_1_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-00000005"
    write_version_1(folder)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.progress == {"n": 5}
    assert checkpoint.tensors(prefix="model.")["0"].tolist() == [5] * LENGTH
    save(tmp_path, 6)
    assert folder.exists(), "retention knows it as whole"
    flip(folder / RANK_FILE, -1)
    with pytest.raises(UserError, match="does not match its hash"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", ".."])
def test_manifest_cannot_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoints/step-00000005"
    write_version_1(folder)
    (folder.parent / "outside.safetensors").write_bytes(tensor_file(5))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: manifest["files"][RANK_FILE]}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not a plain file name"):
        read_checkpoint(folder)


def test_retention_does_not_count_truncated_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    DAMAGE["truncated"](tmp_path / "checkpoints/step-00000002")
    light_save(tmp_path / "checkpoints", step=3, keep=2)
    names = [path.name[-1] for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["1", "3"]


def test_files_are_verified_from_disk_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache would return what was written, not what the disk holds."""
    dropped: list[str] = []

    def advise(fd: int, start: int, length: int, advice: int) -> None:
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        assert path.parent.name.startswith(".step-00000001."), "not committed yet"
        dropped.append(path.name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    save(tmp_path, 1)
    assert dropped == ["rank-00000.safetensors"]
