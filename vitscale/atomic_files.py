"""Files that are either whole or absent.

Owns: write -> fsync -> rename -> fsync of the parent, for files and folders, and content hashes.
Leaves out: what is written, and which folder names mean what.

A rename without the fsync before it can leave a file of zero bytes after power loss (seen on ext4),
hence the order. https://lwn.net/Articles/457667/
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import blake3

HASH_CHUNK_BYTES = 1 << 20


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that renames inside it survive power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_file(path: Path | str) -> Iterator[BinaryIO]:
    """Open a temporary neighbour of `path` for bytes; commit it when the block ends well."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_bytes(path: Path | str, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path | str, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON with sorted keys, so that equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def commit_folder(temporary: Path, final: Path) -> None:
    """Give a fully written (and per-file fsynced) folder its final name. `final` must not exist."""
    fsync_folder(temporary)
    os.rename(temporary, final)
    fsync_folder(final.parent)


def sha256_of_file(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def blake3_of_file(path: Path | str) -> str:
    """Hexadecimal BLAKE3 of a file's bytes, as `b3sum` prints it."""
    digest = blake3.blake3()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
