"""List the images of shard folders and of folders with image files, as tables, and read them.

Owns: where each image is, its hash, and the path that it had in the source.
Leaves out: which images are copies (`similar`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.duplicates.second_look import likeness
from data_prep.duplicates.similar import describe_images
from data_prep.formats.index_files import tar_files
from data_prep.formats.ledger import LEDGER_NAME
from data_prep.sources.protocol import printable
from vitscale.config.errors import UserError
from vitscale.data.folders import files_below, is_image_name
from vitscale.data.index import INDEX_NAME, read_manifest, read_shard
from vitscale.distributed.atomic_files import blake3_of_file

TRAIN = "train"
# An image is `length` bytes of `file` from `offset` on; its name is a key of shards, or a path.
# `original` is the hash of its bytes in the source, which may have been converted.
IMAGES = pa.schema(
    {
        "name": "string",
        "path": "string",
        "class": "string",
        "blake3": pa.binary(32),
        "original": pa.binary(32),
        "file": pa.dictionary(pa.int32(), pa.binary()),
        "offset": "int64",
        "length": "int64",
    }
)


def list_images(folder: Path) -> pa.Table:
    """List a shard folder, or else all visible image files below a folder.

    Raises UserError for a folder without images, and for tars at a URL.
    """
    # The name of a sample says which of several folders it is from.
    if (folder / INDEX_NAME).is_file():
        samples = list_samples(folder)
        names = pc.binary_join_element_wise(printable(folder), samples["name"], "/")
        return samples.set_column(0, "name", names)

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
    return pa.Table.from_pylist(rows, schema=IMAGES)


def list_samples(folder: Path) -> pa.Table:
    """List all samples of a shard folder: splits other than `train` first, to keep them.

    Path, class and hash in the source are those of the ledger. Raises UserError.
    """
    # First, since it says what is wrong with a folder that has no shards.
    manifest = read_manifest(folder)
    table = pq.read_table(
        folder / INDEX_NAME,
        columns=["split", "key", "blake3", "shard", "offset", "length"],
    )
    # A stable sort keeps the stored order within each part.
    in_train = pc.equal(table["split"].cast(pa.string()), TRAIN).to_numpy()
    table = table.take(np.argsort(in_train, kind="stable")).combine_chunks()
    # The paths of tars repeat, so each is stored once.
    shards = table["shard"].cast(pa.string()).combine_chunks().dictionary_encode()
    tars = tar_files(folder, manifest, shards.dictionary.to_pylist())
    files = pa.DictionaryArray.from_arrays(
        shards.indices, pa.array(map(os.fsencode, tars))
    )

    # Each sample gets its row of the ledger.
    ledger = pq.read_table(
        folder / LEDGER_NAME, columns=["split", "key", "path", "class", "blake3"]
    )
    # Rejected inputs have no key.
    ledger = ledger.filter(pc.is_valid(ledger["key"])).combine_chunks()
    ledger = ledger.take(
        pc.index_in(_sample_names(table), value_set=_sample_names(ledger))
    )
    made = {
        "name": table["key"],
        "path": ledger["path"],
        "class": ledger["class"].cast(pa.string()),
        "original": ledger["blake3"],
        "file": files,
    }
    # Columns of the ledger replace those of the index where both have one.
    columns = [made[n] if n in made else table[n] for n in IMAGES.names]
    return pa.table(columns, schema=IMAGES)


def _sample_names(table: pa.Table) -> pa.Array:
    """SPLIT/KEY of samples: tars of others may have a key in several splits."""
    split = table["split"].cast(pa.string())
    names = pc.binary_join_element_wise(split, table["key"], "/")
    return names.combine_chunks()


def check_keys(folder: Path, samples: pa.Table) -> None:
    """Raise UserError if samples share a key, since what is written goes by key."""
    if len(samples["name"].unique()) < len(samples):
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
