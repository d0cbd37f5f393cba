"""Make rows of inputs: their columns, their seeded order, their keys. Pure functions over Arrow.

All rows of a corpus are in memory at once, about 200 bytes each.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.sources.protocol import NO_CLASS, Input
from vitscale.distributed.atomic_files import fsync_folder
from vitscale.runs.data_prep import MAX_SPLIT_LENGTH

# Encoding of file names, as of os.fsencode, which takes ten times as long.
FILE_NAMES = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
# A tar header has 100 bytes for a name: split (up to 24), a dash, class and name, suffix (5).
MAX_KEY_LENGTH = 100 - MAX_SPLIT_LENGTH - 1 - len(".webp")
KEY_HASH_LENGTH = 16
_HASHED = re.compile(rf"-[0-9a-f]{{{KEY_HASH_LENGTH}}}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")

ROW_SCHEMA = pa.schema(
    [
        ("order_high", pa.uint64()),
        ("order_low", pa.uint64()),
        ("holdout", pa.uint64()),
        # The offsets of binary columns overflow at 2 GiB.
        ("path", pa.large_binary()),
        ("split", pa.string()),
        ("class", pa.string()),
        ("key", pa.large_string()),
        ("num_bytes", pa.int64()),
        ("reason", pa.string()),
        ("file", pa.binary()),
        ("offset", pa.int64()),
        ("modified_ns", pa.int64()),
        ("spooled", pa.bool_()),
    ]
)


def seeded_hash(text: str, *, seed: int, purpose: str) -> bytes:
    """32 bytes that look random, the same on every machine and in every version."""
    return hashlib.sha256(f"{purpose}\0{seed}\0{text}".encode(*FILE_NAMES)).digest()


def make_key(class_name: str | None, name: str, *, path: str) -> str:
    """CLASS-NAME in A-Z a-z 0-9 _ -; names that this would change get a hash of their path.

    Without classes: NAME.
    """
    raw = name if class_name == NO_CLASS else f"{class_name or ''}-{name}"
    key = _UNSAFE.sub("_", raw)
    if key != raw or len(key) > MAX_KEY_LENGTH or _HASHED.search(key):
        return hashed_key(key, path)
    return key


def hashed_key(key: str, path: str | bytes) -> str:
    suffix = hashlib.sha256(os.fsencode(path)).hexdigest()[:KEY_HASH_LENGTH]
    return f"{key[: MAX_KEY_LENGTH - KEY_HASH_LENGTH - 1]}-{suffix}"


def rows_table(inputs: Sequence[Input], *, seed: int) -> pa.Table:
    """Make rows of inputs with their final class names."""
    order = b"".join(
        # Lower case: names that differ only in case are neighbours, where keys are made unique.
        seeded_hash(f"{i.split}-{i.class_name}-{i.name}".lower(), seed=seed, purpose="order")[:16]
        for i in inputs
    )
    halves = np.frombuffer(order, ">u8").reshape(-1, 2).astype(np.uint64)
    hashes = (seeded_hash(i.path, seed=seed, purpose="holdout")[:8] for i in inputs)
    holdout = np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64)
    plain = ("split", "num_bytes", "reason", "offset", "modified_ns", "spooled")
    columns: dict[str, object] = {name: [getattr(i, name) for i in inputs] for name in plain}
    columns |= {"order_high": halves[:, 0], "order_low": halves[:, 1], "holdout": holdout}
    columns["path"] = [i.path.encode(*FILE_NAMES) for i in inputs]
    columns["file"] = [i.file.encode(*FILE_NAMES) for i in inputs]
    columns["class"] = [i.class_name for i in inputs]
    columns["key"] = [make_key(i.class_name, i.name, path=i.path) for i in inputs]
    arrays = [pa.array(columns[field.name], field.type) for field in ROW_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=ROW_SCHEMA)


def commit_table(temporary: Path, final: Path, table: pa.Table) -> None:
    """Write one Arrow file; return when it is on disk under its name."""
    with open(temporary, "wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    commit_file(temporary, final)


def commit_file(temporary: Path, final: Path) -> None:
    """Flush a file and give it its name."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    fsync_folder(final.parent)


def read_table(path: Path) -> pa.Table:
    """The memory-mapped table: only the parts read take memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
