"""Find duplicate images in a corpus of any size, in bounded memory.

Owns: grouping by content and by descriptor through files on disk (memory formula:
docs/duplicates.md), and the list of dropped images.
Leaves out: when two images match (`descriptors`), how the survey is made.

Three passes, each over parts small enough for memory: by content hash (equal bytes), by descriptor
(equal pictures, so that a picture saved a million times is compared once), and by key (likely
copies), where candidate pairs are compared. Each part is deleted after use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from data_prep.duplicates.descriptors import (
    DESCRIPTOR,
    HASHES,
    NUM_KEYS,
    equal_keys,
    has_contrast,
    hashes_near,
    keys_of,
    pictures_correlate,
)
from data_prep.duplicates.partitions import Parts, parts_needed, sorted_rows
from vitscale.distributed.atomic_files import atomic_file

# Bytes of a part, and rows or pairs per batch: together they bound the memory.
PART_BYTES = 8 << 20
BATCH_ROWS = 1 << 14
MAX_PAIRS = 1 << 17
KINDS = ("exact", "similar")
EXACT, SIMILAR = range(2)

HASHED = np.dtype([("hash", "<u8", (4,)), ("rank", "<u8")])
DESCRIBED = np.dtype([*HASHED.descr, ("descriptor", DESCRIPTOR)])
# `picture`: position in the file of distinct pictures.
KEYED = np.dtype([("key", "<u4"), ("picture", "<u4"), ("rank", "<u8"), ("hash", "<u8")])
PAIR = np.dtype([("rank", "<u8"), ("kept_rank", "<u8"), ("picture", "<u4"), ("kept", "<u4")])
DROPPED = np.dtype([("rank", "<u8"), ("kept_rank", "<u8"), ("kind", "u1")])
# Keys of common pictures are close together; an odd multiplier spreads them over the parts.
SPREAD = np.uint64(0x9E3779B97F4A7C15)


def find_duplicates(
    survey: Sequence[Path],
    *,
    similar: bool,
    scratch: Path,
    output: Path,
    max_kept: int = 1,
) -> int:
    """Write the dropped rows, sorted by rank, to an Arrow IPC file; returns their number.

    survey: Arrow IPC files with rank uint64, content_hash binary(32) and, if `similar`, descriptor
    binary; rows with a null are ignored. Equal bytes have equal descriptors. A row is dropped if it
    matches one of lower rank.
    `kept_rank` is the lowest rank with the same bytes, else among the similar ones; of these, up to
    `max_kept` have a row each, lowest first. More than `max_kept` equal descriptors are compared
    with each other only.
    """
    folder = scratch / "duplicates"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        dropped = Parts(folder / "dropped", DROPPED, num=1)
        dtype = DESCRIBED if similar else HASHED
        # The files may be compressed, although hashes and descriptors hardly compress.
        num_bytes = 2 * sum(path.stat().st_size for path in survey)
        num_parts = parts_needed(num_bytes, part_bytes=PART_BYTES)
        rows = Parts(folder / "by_content", dtype, num=num_parts)
        for batch in _read_survey(survey, dtype):
            rows.add(batch, _part_of_hash(batch, num_parts))
        kept_rows = _drop_equal(rows, dropped, EXACT)
        if similar:
            rows = Parts(folder / "by_descriptor", DESCRIBED, num=num_parts)
            for batch in _by_descriptor(kept_rows):
                rows.add(batch, _part_of_hash(batch, num_parts))
            pictures = _Pictures(folder, max_rows=rows.num_rows)
            for batch in _drop_equal(rows, dropped, SIMILAR, num_kept=max_kept):
                pictures.add(batch)
            for pairs in pictures.matches(max_kept):
                dropped.add(_dropped_rows(pairs["rank"], pairs["kept_rank"], SIMILAR))
        else:
            for _ in kept_rows:
                pass
        return _write(dropped, folder, output, max_kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_survey(paths: Sequence[Path], dtype: np.dtype) -> Iterator[np.ndarray]:
    import pyarrow as pa

    columns = ["rank", "content_hash", *(["descriptor"] if dtype == DESCRIBED else [])]
    for path in paths:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number).select(columns)
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield _rows_of(batch.slice(start, BATCH_ROWS), dtype)


def _rows_of(batch: Any, dtype: np.dtype) -> np.ndarray:
    for column in batch.schema.names:
        batch = batch.filter(batch.column(column).is_valid())
    rows = np.zeros(batch.num_rows, dtype=dtype)
    rows["rank"] = batch.column("rank").to_numpy()
    rows["hash"] = _cells(batch.column("content_hash"), 32).view("<u8")
    if dtype == DESCRIBED:
        cells = _cells(batch.column("descriptor"), DESCRIPTOR.itemsize)
        rows["descriptor"] = cells.view(DESCRIPTOR)[:, 0]
    return rows


def _cells(column: Any, width: int) -> np.ndarray:
    """A fixed-size binary column without nulls as bytes, [rows, width]."""
    assert column.type.byte_width == width, f"{column.type}, not {width} bytes"
    data = column.buffers()[1]
    raw = np.frombuffer(data if data is not None else b"", dtype=np.uint8)
    start = column.offset * width
    return raw[start : start + len(column) * width].reshape(len(column), width)


def _part_of_hash(rows: np.ndarray, num_parts: int) -> np.ndarray:
    return (rows["hash"][:, 0] % np.uint64(num_parts)).astype(np.int64)


def _by_descriptor(batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Rows with contrast, with the hash of the descriptor as hash."""
    for batch in batches:
        for start in range(0, len(batch), BATCH_ROWS):
            rows = batch[start : start + BATCH_ROWS]
            rows = rows[has_contrast(rows["descriptor"])]
            # A cryptographic hash: a cheaper one would allow crafted collisions.
            raw, size = rows["descriptor"].tobytes(), DESCRIPTOR.itemsize
            hashes = [blake3(raw[i : i + size]).digest() for i in range(0, len(raw), size)]
            rows["hash"] = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 4)
            yield rows


def _drop_equal(
    rows: Parts, dropped: Parts, kind: int, *, num_kept: int = 1
) -> Iterator[np.ndarray]:
    """Yield the `num_kept` rows of lowest rank of each hash; add the others to `dropped`."""
    for number in range(rows.num):
        kept = np.zeros(0, dtype=HASHED)
        for chunk in rows.chunks(number, max_bytes=PART_BYTES):
            kept = np.concatenate([kept, chunk[["hash", "rank"]].astype(HASHED)])
            kept = kept[_places(kept) < num_kept]
        places = _places(kept)
        for chunk in rows.chunks(number, max_bytes=PART_BYTES):
            is_kept = np.isin(chunk["rank"], kept["rank"])
            others = chunk[~is_kept][["hash", "rank"]].astype(HASHED)
            for place in range(num_kept if len(others) else 0):
                same_place = kept[places == place]
                first = _first_ranks(np.concatenate([same_place, others]))[len(same_place) :]
                dropped.add(_dropped_rows(others["rank"], first, kind))
            yield chunk[is_kept]
        rows.remove(number)


def _places(rows: np.ndarray) -> np.ndarray:
    """Per row, how many of the same hash have a lower rank."""
    order, new = _groups(rows)
    starts = np.flatnonzero(new)
    places = np.empty(len(rows), dtype=np.int64)
    places[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    return places


def _first_ranks(rows: np.ndarray) -> np.ndarray:
    """Per row, the lowest rank with the same hash."""
    order, new = _groups(rows)
    first = np.empty(len(rows), dtype=np.uint64)
    first[order] = rows["rank"][order][new][np.cumsum(new) - 1]
    return first


def _groups(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(order by hash and rank, where in this order a new hash starts)."""
    order = np.lexsort([rows["rank"], *rows["hash"].T])
    ordered = rows["hash"][order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return order, new


def _dropped_rows(rank: np.ndarray, kept_rank: np.ndarray, kind: int) -> np.ndarray:
    rows = np.empty(len(rank), dtype=DROPPED)
    rows["rank"], rows["kept_rank"], rows["kind"] = rank, kept_rank, kind
    return rows


class _Pictures:
    """Distinct pictures: their descriptors in one file, their keys in parts."""

    def __init__(self, folder: Path, *, max_rows: int) -> None:
        # Positions are 32 bits wide.
        assert max_rows < 1 << 32
        num_bytes = max_rows * NUM_KEYS * KEYED.itemsize
        self._num_parts = parts_needed(num_bytes, part_bytes=PART_BYTES)
        self._descriptors = Parts(folder / "pictures", DESCRIPTOR, num=1)
        self._keys = [Parts(folder / f"keys_{name}", KEYED, num=self._num_parts) for name in HASHES]

    def add(self, rows: np.ndarray) -> None:
        for start in range(0, len(rows), BATCH_ROWS):
            batch = rows[start : start + BATCH_ROWS]
            first = self._descriptors.num_rows
            descriptors = np.ascontiguousarray(batch["descriptor"])
            self._descriptors.add(descriptors)
            for keys, parts, name in zip(keys_of(descriptors), self._keys, HASHES, strict=True):
                keyed = np.empty(keys.size, dtype=KEYED)
                keyed["key"] = keys.ravel()
                keyed["picture"] = np.repeat(np.arange(first, first + len(batch)), NUM_KEYS)
                keyed["rank"] = np.repeat(batch["rank"], NUM_KEYS)
                keyed["hash"] = np.repeat(descriptors[name], NUM_KEYS)
                spread = (keyed["key"] * SPREAD) >> np.uint64(32)
                parts.add(keyed, (spread % np.uint64(self._num_parts)).astype(np.int64))

    def matches(self, max_kept: int) -> Iterator[np.ndarray]:
        """Pairs of the same picture, among them the `max_kept` lowest kept_ranks of each rank."""
        if self._descriptors.num_rows == 0:
            return
        direct, mirrored = self._keys
        with open(self._descriptors.path(0), "rb") as file:
            for number in range(self._num_parts):
                for table in direct.chunks(number, max_bytes=PART_BYTES):
                    table = table[np.argsort(table["key"], kind="stable")]
                    for parts in self._keys:
                        for probes in parts.chunks(number, max_bytes=PART_BYTES):
                            for pairs in _candidate_pairs(table, probes):
                                yield from _matching_pairs(
                                    pairs, file.fileno(), parts is mirrored, max_kept
                                )
                direct.remove(number)
                mirrored.remove(number)


def _candidate_pairs(table: np.ndarray, probes: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs with an equal key and near hashes, each once per batch."""
    for probe, entry in equal_keys(table["key"], probes["key"], max_pairs=MAX_PAIRS):
        a, b = table[entry], probes[probe]
        linked = hashes_near(a["hash"], b["hash"]) & (a["rank"] != b["rank"])
        a, b = a[linked], b[linked]
        later, earlier = (np.where(a["rank"] > b["rank"], *pair) for pair in ((a, b), (b, a)))
        pairs = np.empty(len(a), dtype=PAIR)
        pairs["rank"], pairs["kept_rank"] = later["rank"], earlier["rank"]
        pairs["picture"], pairs["kept"] = later["picture"], earlier["picture"]
        pairs = pairs[np.lexsort([pairs["kept_rank"], pairs["rank"]])]
        new = np.ones(len(pairs), dtype=bool)
        new[1:] = (pairs["rank"][1:] != pairs["rank"][:-1]) | (
            pairs["kept_rank"][1:] != pairs["kept_rank"][:-1]
        )
        yield pairs[new]


def _matching_pairs(
    pairs: np.ndarray, file: int, mirrored: bool, max_kept: int
) -> Iterator[np.ndarray]:
    """The pairs (sorted) that correlate; at least the `max_kept` lowest kept_ranks of each rank.

    The lowest candidates are compared first, the others only if these do not match: in a large
    family of copies, the first comparison settles nearly every image.
    """
    width = max_kept
    while len(pairs):
        starts = np.flatnonzero(np.r_[True, pairs["rank"][1:] != pairs["rank"][:-1]])
        position = np.arange(len(pairs)) - np.repeat(starts, np.diff(np.r_[starts, len(pairs)]))
        tried = pairs[position < width]
        same = np.concatenate(
            [
                pictures_correlate(
                    _read(file, some["picture"]),
                    _read(file, some["kept"]),
                    mirrored=np.full(len(some), mirrored),
                )
                for some in np.split(tried, range(BATCH_ROWS, len(tried), BATCH_ROWS))
            ]
        )
        yield tried[same]
        ranks, matched = np.unique(tried["rank"][same], return_counts=True)
        settled = np.isin(pairs["rank"], ranks[matched >= max_kept])
        pairs = pairs[~settled & (position >= width)]
        width *= 4


def _read(file: int, pictures: np.ndarray) -> np.ndarray:
    """Descriptors by position. Read one by one, since a mapped file counts as memory."""
    size = DESCRIPTOR.itemsize
    return np.frombuffer(
        b"".join(os.pread(file, size, p * size) for p in pictures.tolist()), DESCRIPTOR
    )


def _write(dropped: Parts, folder: Path, output: Path, max_kept: int) -> int:
    import pyarrow as pa

    schema = pa.schema([("rank", pa.uint64()), ("kept_rank", pa.uint64()), ("kind", pa.string())])
    num_rows = 0
    with atomic_file(output) as file, pa.ipc.new_file(file, schema) as writer:
        pending = np.zeros(0, dtype=DROPPED)
        ordered = sorted_rows(
            dropped, folder / "ordered", by=("rank", "kept_rank"), part_bytes=PART_BYTES
        )
        for piece in ordered:
            piece = _lowest_kept(piece, max_kept)
            pending = np.concatenate([pending, piece])
            num_rows += len(piece)
            # Batches of equal size: the file's bytes do not depend on the parts of the sort.
            full = len(pending) - len(pending) % BATCH_ROWS
            _write_batches(writer, pending[:full], schema)
            pending = pending[full:]
        _write_batches(writer, pending, schema)
    return num_rows


def _lowest_kept(rows: np.ndarray, max_kept: int) -> np.ndarray:
    """The first `max_kept` different kept_ranks of each rank; rows are sorted by both."""
    is_new = np.r_[True, rows["rank"][1:] != rows["rank"][:-1]]
    different = is_new | np.r_[True, rows["kept_rank"][1:] != rows["kept_rank"][:-1]]
    rows, is_new = rows[different], is_new[different]
    starts = np.flatnonzero(is_new)
    place = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    return rows[place < max_kept]


def _write_batches(writer: Any, rows: np.ndarray, schema: Any) -> None:
    import pyarrow as pa

    for start in range(0, len(rows), BATCH_ROWS):
        some = rows[start : start + BATCH_ROWS]
        kinds = pa.array(KINDS).take(pa.array(some["kind"]))
        columns = [np.ascontiguousarray(some[name]) for name in ("rank", "kept_rank")]
        writer.write_batch(pa.record_batch([*columns, kinds], schema=schema))
