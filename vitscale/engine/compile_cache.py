"""Keep compiled code on the disk of each node, and start new nodes from a seed archive.

Owns: the folder that torch.compile caches in, and the archive: written once by rank 0 after the
first compilation, unpacked once per node by whichever rank comes first, whole or not at all.
Leaves out: what is compiled (`configuration.resolve_compile`), and torch's own cache keys.

Compiled code is executed. Hence the folder is private, and a seed is read only if it belongs to the
user and nobody else can write it. torch finds its own way through the folder: the same code,
versions and shapes give the same keys, so a seed can be useless but not wrong.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import blake3
import torch

from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import atomic_file
from vitscale.engine.settings import EngineSettings

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SEED_NAME = "compiled.tar"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20


class SeedError(ValueError):
    """A seed that is not used, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCache:
    """The folder of this node's compiled code, and the seed of all nodes."""

    folder: Path
    seed: Path
    versions: dict[str, str]
    message: str
    """What was found, for the log."""

    def write_seed(self) -> str | None:
        """Archive the folder unless there is a usable seed. Returns a line for the log, if any.

        Call it on one rank, after all have compiled.
        """
        try:
            if _seed_versions(self.seed) == self.versions:
                return None
        except SeedError:
            pass
        try:
            num_files = write_archive(self.seed, self.folder, versions=self.versions)
        except OSError as error:
            return f"compiled code is not kept: {error}"
        return f"compiled code of {num_files} files kept in {self.seed}"


def open_compile_cache(
    settings: EngineSettings, *, run_folder: Path, device: torch.device
) -> CompileCache | None:
    """Set the folder of compiled code of this process; fill it from the seed if it is new.

    Returns None where no seed is needed: TORCHINDUCTOR_CACHE_DIR is set, or the folder is that in
    the home folder. Raises UserError if the folder is not private.
    """
    if VARIABLE in os.environ:
        return None
    base = cache_base(settings)
    if base is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        os.environ[VARIABLE] = os.path.join(home, "vitscale/compiled")
        return None
    _make_private(base)
    seed = Path(settings.compile_seed) if settings.compile_seed else run_folder / SEED_NAME
    seed, versions = seed.absolute(), versions_of(device)
    # A folder for each seed, so that it can appear by one rename.
    text = json.dumps([str(seed), versions], sort_keys=True)
    folder = base / hashlib.sha256(text.encode()).hexdigest()[:16]
    with _locked(base / f"{folder.name}.lock"):
        message = _fill(folder, seed, versions)
    os.environ[VARIABLE] = str(folder)
    return CompileCache(folder=folder, seed=seed, versions=versions, message=message)


def cache_base(settings: EngineSettings) -> Path | None:
    """Folder on the node's disk; None: compiled code stays in the home folder."""
    if settings.compile_cache is not None:
        return Path(settings.compile_cache).absolute()
    if "SLURM_JOB_ID" in os.environ:
        return Path(tempfile.gettempdir()) / f"vitscale-{os.getuid()}"
    return None


def versions_of(device: torch.device) -> dict[str, str]:
    """What compiled code depends on beyond the code itself."""
    is_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def _fill(folder: Path, seed: Path, versions: dict[str, str]) -> str:
    if folder.is_dir():
        return f"compiled code: {folder}"
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(mode=0o700)
    try:
        num_files = read_archive(seed, temporary, versions=versions)
        message = f"compiled code: {folder}, {num_files} files from {seed}"
    except SeedError as error:
        # Files that were unpacked before the error are not used.
        shutil.rmtree(temporary)
        temporary.mkdir(mode=0o700)
        message = f"compiled code: {folder}, empty: {error}"
    os.rename(temporary, folder)
    return message


def write_archive(path: Path, folder: Path, *, versions: dict[str, str]) -> int:
    """Write the files of a folder as one tar, whole or not at all. Returns their number.

    Its first member lists versions, names, sizes and BLAKE3 hashes.
    """
    content = {}
    for each in sorted(folder.rglob("*")):
        if each.suffix in (".lock", ".tmp") or each.is_symlink():
            continue
        with suppress(FileNotFoundError, IsADirectoryError):  # another rank tidies up
            content[each.relative_to(folder).as_posix()] = each.read_bytes()
    files = {name: [len(data), blake3.blake3(data).hexdigest()] for name, data in content.items()}
    manifest = json.dumps({"versions": versions, "files": files}).encode()
    with atomic_file(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
        os.fchmod(file.fileno(), 0o600)
        for name, data in ((MANIFEST, manifest), *content.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return len(content)


def read_archive(path: Path, folder: Path, *, versions: dict[str, str]) -> int:
    """Write the files of an archive into an empty folder. Returns their number.

    Raises SeedError for an archive that is missing, damaged, incomplete, not the user's own, or of
    other versions.
    """
    with _open_seed(path) as (tar, manifest):
        found = manifest["versions"]
        if found != versions:
            names = sorted(name for name in versions if found.get(name) != versions[name])
            theirs = ", ".join(f"{name} {found.get(name)}" for name in names)
            raise SeedError(f"{path} is of {theirs}")
        missing = dict(manifest["files"])
        # Iterating would begin with the manifest again.
        while (member := tar.next()) is not None:
            data = tar.extractfile(member) if member.isreg() else None
            expected = missing.pop(member.name, None)
            if data is None or expected is None:
                raise SeedError(f"{path} has an unlisted member {member.name!r}")
            content = data.read()
            if [len(content), blake3.blake3(content).hexdigest()] != expected:
                raise SeedError(f"{path}: {member.name} is damaged")
            file = folder / _safe_name(member.name, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(0o700)  # shared libraries among them
    if missing:
        raise SeedError(f"{path} lacks {len(missing)} files")
    return len(manifest["files"])


def _seed_versions(path: Path) -> Any:
    with _open_seed(path) as (_, manifest):
        return manifest["versions"]


@contextmanager
def _open_seed(path: Path) -> Iterator[tuple[tarfile.TarFile, dict[str, Any]]]:
    """The archive after its first member, and what that says."""
    try:
        with (
            open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise SeedError(f"{path} belongs to others, or others can write it")
            first = tar.next()
            if first is None or first.name != MANIFEST or first.size > MAX_MANIFEST_BYTES:
                raise SeedError(f"{path} has no {MANIFEST}")
            data = tar.extractfile(first)
            manifest = json.loads(data.read()) if data is not None else None
            if not isinstance(manifest, dict) or not (
                isinstance(manifest.get("versions"), dict)
                and isinstance(manifest.get("files"), dict)
            ):
                raise SeedError(f"{path}: {MANIFEST} is damaged")
            yield tar, manifest
    except FileNotFoundError:
        raise SeedError(f"no {path} yet") from None
    except (OSError, EOFError, tarfile.TarError, json.JSONDecodeError, UnicodeError) as error:
        raise SeedError(f"{path} cannot be read: {error}") from None


def _safe_name(name: str, path: Path) -> PurePosixPath:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise SeedError(f"{path} has a member {name!r} outside of the folder")
    return pure


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this node at a time; the kernel unlocks for a process that dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            f"{folder} is not a folder that only you can use; compiled code in it is executed",
            where="engine.compile_cache",
            next_step=f"chmod 700 {folder}, or name another folder",
        )
