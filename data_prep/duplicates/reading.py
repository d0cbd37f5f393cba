"""List the images of shard folders and of folders with image files, as tables, and read them.

Owns: where each image is, its hash, and the path that it had in the source.
Leaves out: which images are copies (`similar`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from data_prep.duplicates.equal import note_equal
from data_prep.duplicates.second_look import likeness
from data_prep.duplicates.similar import describe_images
from data_prep.formats.index_files import tar_files
from data_prep.formats.ledger import LEDGER_NAME, regrouped
from data_prep.sources.protocol import printable
from vitscale.config.errors import UserError
from vitscale.data.folders import files_below, is_image_name
from vitscale.data.index import INDEX_NAME, read_manifest, read_shard
from vitscale.distributed.atomic_files import blake3_of_file

TRAIN = "train"
# Rows of a stored list that are read at a time.
NUM_ROWS = 1 << 16
HASH = pa.binary(32)
# An image is `length` bytes of `file` from `offset` on; its name is a key of shards, or a path.
# `original` is the hash of its bytes in the source, which may have been converted; `named` that of
# its name.
IMAGES = pa.schema(
    {
        "name": "string",
        "named": HASH,
        "path": "string",
        "class": "string",
        "blake3": HASH,
        "original": HASH,
        "file": pa.binary(),
        "offset": "int64",
        "length": "int64",
    }
)


def list_images(folder: Path) -> Iterator[pa.Table]:
    """List a shard folder, or else all visible image files below a folder.

    Raises UserError for a folder without images, and for tars at a URL.
    """
    # The name of a sample says which of several folders it is from.
    if (folder / INDEX_NAME).is_file():
        for samples in list_samples(folder):
            names = pc.binary_join_element_wise(printable(folder), samples["name"], "/")
            yield samples.set_column(0, "name", names)
        return

    if not folder.is_dir():
        raise UserError("no such folder", where=folder)
    # Sorted, since the order of a listing differs between file systems, and the first copy is kept.
    below = files_below(folder, follow_links=True)
    files = sorted(path for path in below if is_image_name(os.path.basename(path)))

    rows = []
    try:
        for file in files:
            # An image file was converted by nobody, so both hashes are the same.
            digest = bytes.fromhex(blake3_of_file(file))
            row = {
                "name": printable(file),
                "blake3": digest,
                "original": digest,
                "file": os.fsencode(file),
                "offset": 0,
                "length": os.path.getsize(file),
            }
            rows.append(row)
    except OSError as error:
        # Names of files need not be UTF-8, and may have characters that a terminal obeys.
        where = printable(error.filename or folder)
        raise UserError(f"cannot be read ({error.strerror})", where=where) from None

    if not files:
        raise UserError("has no images", where=folder, allowed="image files, or shards")
    yield pa.Table.from_pylist(rows, schema=IMAGES)


def list_samples(folder: Path) -> Iterator[pa.Table]:
    """List the samples of a shard folder: splits other than `train` first, to keep them.

    Path, class and hash in the source are those of the ledger. Raises UserError.
    """
    # First, since it says what is wrong with a folder that has no shards.
    manifest = read_manifest(folder)
    names = set[str]()
    for rows in _row_groups(folder / INDEX_NAME, ["shard"]):
        names.update(rows["shard"].unique().to_pylist())
    tars = map(os.fsencode, tar_files(folder, manifest, names))
    file_of = dict(zip(names, tars, strict=True))

    for split in sorted(manifest.splits, key=TRAIN.__eq__):
        columns = ["split", "key", "path", "class", "blake3"]
        ledger = _of_split(folder / LEDGER_NAME, columns, split)
        columns = ["split", "key", "blake3", "shard", "offset", "length"]
        index = _of_split(folder / INDEX_NAME, columns, split)
        # Both files have the samples of a split in one order.
        for rows, entries in zip_longest(
            regrouped(index, NUM_ROWS), regrouped(ledger, NUM_ROWS)
        ):
            if not (rows and entries and entries["key"].equals(rows["key"])):
                raise UserError(
                    f"does not have the samples of {INDEX_NAME} in their order",
                    where=folder / LEDGER_NAME,
                    next_step="make the shards or the index again",
                )
            made = {
                "name": rows["key"],
                "named": _named(rows["key"]),
                "path": entries["path"],
                "class": entries["class"].cast(pa.string()),
                "original": entries["blake3"],
                "file": pa.array(map(file_of.get, rows["shard"].to_pylist())),
            }
            # Columns of the ledger replace those of the index where both have one.
            columns = [made[n] if n in made else rows[n] for n in IMAGES.names]
            yield pa.table(columns, schema=IMAGES)


def _named(names: pa.ChunkedArray) -> pa.Array:
    """Hashes of names, so that equal ones are found as equal images are."""
    return pa.array(
        [blake3(name.encode()).digest() for name in names.to_pylist()], HASH
    )


def _row_groups(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=columns)


def _of_split(path: Path, columns: Sequence[str], split: str) -> Iterator[pa.Table]:
    """Yield the samples of a split. Rejected inputs have no key."""
    for rows in _row_groups(path, columns):
        in_split = pc.equal(rows["split"].cast(pa.string()), split)
        yield rows.filter(pc.and_(in_split, pc.is_valid(rows["key"])))


def store(images: Iterable[pa.Table], file: Path) -> int:
    """Write a list of images to a file of its own; returns how many there are."""
    num = 0
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, IMAGES) as writer:
        for some in images:
            writer.write_table(some.combine_chunks())
            num += len(some)
    return num


def stored(files: Iterable[Path], *columns: str) -> Iterator[pa.Table]:
    """Yield these columns of stored lists, some rows at a time."""
    options = pa.ipc.IpcReadOptions(
        included_fields=[IMAGES.names.index(name) for name in columns]
    )
    for path in files:
        # Read, not mapped: what is mapped would fill the memory of the process.
        with pa.OSFile(str(path)) as file:
            reader = pa.ipc.open_file(file, options=options)
            for number in range(reader.num_record_batches):
                yield pa.table(reader.get_batch(number))


def stored_hashes(files: Iterable[Path], column: str) -> Iterator[np.ndarray]:
    """Yield one column of hashes of stored lists, uint64 [rows, 4]."""
    for some in stored(files, column):
        (hashes,) = some[column].chunks
        yield np.frombuffer(hashes.buffers()[1], "<u8")[: 4 * len(hashes)].reshape(
            -1, 4
        )


def mapped(files: Iterable[Path]) -> pa.Table:
    """Return stored lists as one table, of which only the rows used take memory."""
    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in files]
    return pa.concat_tables(tables)


def check_keys(folder: Path, files: Sequence[Path], *, num: int) -> None:
    """Raise UserError if samples share a key, since what is written goes by key."""
    first = np.arange(num)
    note_equal(partial(stored_hashes, files, "named"), first)
    if (first != np.arange(num)).any():
        raise UserError(
            "samples of several splits have the same keys, by which copies are left out",
            where=folder,
            next_step="index the tars of each split alone by source.splits, and name the index "
            "of the others by --against",
        )


def describe(images: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, int]:
    """Return the descriptors of some images, and how many could not be decoded."""
    return describe_images([image_of(row) for row in images])


def compare(pair: Sequence[Mapping[str, Any]]) -> float:
    """Return how much two images are alike; 0 if they are no copies."""
    return likeness(*map(image_of, pair))


def image_of(row: Mapping[str, Any]) -> bytes:
    """Return the bytes of one image: `length` of `file` from `offset` on. Raises UserError."""
    file = Path(os.fsdecode(row["file"]))
    try:
        return read_shard(file, offset=row["offset"], num_bytes=row["length"])
    except OSError as error:
        where = printable(file)
        raise UserError(
            f"cannot be read ({error.strerror or error})", where=where
        ) from None
