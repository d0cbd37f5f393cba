"""Store rows about inputs on disk: Arrow files that are written whole and read by slices.

Owns: their columns, the seeded order of rows, and the external sort of a corpus of any size into
this order, with a fixed amount of memory.
Leaves out: the use of rows for shards (`planning`).

A *run* holds up to RUN_ROWS rows of the scan, sorted. A *bucket* holds one of `num_buckets` equal
ranges of the order hash, gathered from all runs; about BUCKET_ROWS rows, since a hash spreads
evenly. Buckets are the units that processes share, and determine their memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.sources.protocol import NO_CLASS, Input
from vitscale.distributed.atomic_files import fsync_folder
from vitscale.runs.data_prep import MAX_SPLIT_LENGTH

RUN_ROWS = 1 << 15
BUCKET_ROWS = 1 << 13
# Encoding of file names, as of os.fsencode, which takes ten times as long.
FILE_NAMES = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
# A tar header has 100 bytes for a name: split (up to 24), a dash, class and name, suffix (5).
MAX_KEY_LENGTH = 100 - MAX_SPLIT_LENGTH - 1 - len(".webp")
KEY_HASH_LENGTH = 16
_HASHED = re.compile(rf"-[0-9a-f]{{{KEY_HASH_LENGTH}}}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")

ROW_COLUMNS = [
    ("order_high", pa.uint64()),
    ("order_low", pa.uint64()),
    ("holdout", pa.uint64()),
    ("path", pa.binary()),
    ("split", pa.string()),
    ("class", pa.string()),
    ("key", pa.string()),
    ("num_bytes", pa.int64()),
    ("reason", pa.string()),
    ("file", pa.binary()),
    ("offset", pa.int64()),
    ("modified_ns", pa.int64()),
    ("spooled", pa.bool_()),
]
ROW_SCHEMA = pa.schema(ROW_COLUMNS)


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


def rows_table(inputs: Sequence[Input], *, seed: int, holds_out: bool) -> pa.Table:
    """One sorted run, from inputs with their final class names.

    holds_out: whether the second hash of each path is needed.
    """
    order = [
        # Lower case: names that differ only in case share a bucket, where keys are made unique
        seeded_hash(f"{i.split}-{i.class_name}-{i.name}".lower(), seed=seed, purpose="order")
        for i in inputs
    ]
    paths = [i.path.encode(*FILE_NAMES) for i in inputs]
    sort = sorted(range(len(inputs)), key=lambda i: (order[i][:16], paths[i]))
    inputs, order = [inputs[i] for i in sort], [order[i] for i in sort]
    paths = [paths[i] for i in sort]
    halves = np.frombuffer(b"".join(h[:16] for h in order), ">u8").reshape(-1, 2)
    holdout = np.zeros(len(inputs), np.uint64)
    if holds_out:
        hashes = (seeded_hash(i.path, seed=seed, purpose="holdout") for i in inputs)
        holdout = np.frombuffer(b"".join(h[:8] for h in hashes), ">u8").astype(np.uint64)
    columns = {
        "order_high": halves[:, 0].astype(np.uint64),
        "order_low": halves[:, 1].astype(np.uint64),
        "holdout": holdout,
        "path": paths,
        "split": [i.split for i in inputs],
        "class": [i.class_name for i in inputs],
        "key": [make_key(i.class_name, i.name, path=i.path) for i in inputs],
        "num_bytes": [i.num_bytes for i in inputs],
        "reason": [i.reason for i in inputs],
        "file": [i.file.encode(*FILE_NAMES) for i in inputs],
        "offset": [i.offset for i in inputs],
        "modified_ns": [i.modified_ns for i in inputs],
        "spooled": [i.spooled for i in inputs],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in ROW_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=ROW_SCHEMA)


def sorted_rows(table: pa.Table) -> pa.Table:
    """Sorted by order hash; rows of equal hash by path."""
    high, low = table.column("order_high").to_numpy(), table.column("order_low").to_numpy()
    order = np.lexsort((low, high))
    tied = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
    if tied.any():
        paths = table.column("path").to_pylist()
        order = np.array(sorted(order, key=lambda i: (high[i], low[i], paths[i])))
    return table.take(order)


def write_table(table: pa.Table, path: Path, *, temporary: Path) -> None:
    """Write an Arrow file, and rename it when it is on disk."""
    with open(temporary, "wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def read_table(path: Path) -> pa.Table:
    """The memory-mapped table: only the parts read take memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def num_buckets(num_rows: int) -> int:
    return max(1, -(-num_rows // BUCKET_ROWS))


def bucket(runs: Iterable[Path], *, number: int, of: int) -> pa.Table:
    """The rows of one range of the order hash, from all runs, sorted, with unique keys."""
    low, high = (number << 64) // of, ((number + 1) << 64) // of
    parts = [ROW_SCHEMA.empty_table()]
    for path in runs:
        run = read_table(path)
        column = run.column("order_high").to_numpy()
        first = int(np.searchsorted(column, np.uint64(low)))
        last = len(run) if high == 1 << 64 else int(np.searchsorted(column, np.uint64(high)))
        if first < last:
            # A copy, so that the file can be closed.
            parts.append(run.take(np.arange(first, last)))
    table = _without_repeats(sorted_rows(pa.concat_tables(parts).combine_chunks()))
    return _with_column(table, "key", unique_keys(table))


def _with_column(table: pa.Table, name: str, values: list[str | None] | list[str]) -> pa.Table:
    position = table.schema.get_field_index(name)
    return table.set_column(position, name, pa.array(values, pa.string()))


def _without_repeats(table: pa.Table) -> pa.Table:
    """Reject inputs listed twice: the same path in the same class and split."""
    paths, reasons = table.column("path").to_pylist(), table.column("reason").to_pylist()
    high = table.column("order_high").to_pylist()
    again = [i for i in range(1, len(paths)) if paths[i] == paths[i - 1] and high[i] == high[i - 1]]
    for i in again:
        reasons[i] = reasons[i] or "duplicate_path"
    return _with_column(table, "reason", reasons) if again else table


def unique_keys(table: pa.Table) -> list[str]:
    """Keys of one bucket; those that collide (also in lower case) get a hash of their path.

    Keys equal in lower case come from equal order hashes, or end in a hash already.
    """
    keys = table.column("key").to_pylist()
    names = [
        f"{split}-{key.lower()}"
        for split, key in zip(table.column("split").to_pylist(), keys, strict=True)
    ]
    counts = Counter(names)
    if len(counts) == len(names):
        return keys
    paths = table.column("path").to_pylist()
    return [
        hashed_key(key, path) if counts[name] > 1 else key
        for key, name, path in zip(keys, names, paths, strict=True)
    ]


def smallest(parts: Sequence[Path], wanted: np.ndarray) -> np.ndarray:
    """uint64 per class: the `wanted`-th smallest hash among its rows in the .npy files."""
    prefix = np.zeros(len(wanted), np.uint64)
    remaining = wanted.copy()
    for shift in range(56, -8, -8):
        counts = np.zeros((len(wanted), 256), np.int64)
        for path in parts:
            part = np.load(path, mmap_mode="r")
            classes, hashes = part["class"], part["hash"]
            if shift < 56:
                above = np.uint64(shift + 8)
                equal = (hashes >> above) == (prefix[classes] >> above)
                classes, hashes = classes[equal], hashes[equal]
            byte = ((hashes >> np.uint64(shift)) & np.uint64(255)).astype(np.int64)
            counts += np.bincount(classes * 256 + byte, minlength=counts.size).reshape(counts.shape)
        reached = np.cumsum(counts, axis=1)
        byte = (reached < remaining[:, None]).sum(axis=1).clip(max=255)
        before = np.where(byte > 0, reached[np.arange(len(byte)), byte - 1], 0)
        remaining = remaining - before
        prefix |= byte.astype(np.uint64) << np.uint64(shift)
    return prefix
