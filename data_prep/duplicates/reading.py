"""List and describe the images of shard folders, and of folders with image files.

Owns: where each image is, its hash, its descriptor, and the path that it had in the source.
Leaves out: which images are copies (`search`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from data_prep.duplicates.descriptors import (
    FORMATS,
    SIDE_PX,
    grey_picture,
    picture_descriptors,
)
from data_prep.formats.index_files import folder_of_tars
from data_prep.formats.ledger import LEDGER_NAME
from data_prep.sources.errors import printable
from data_prep.sources.files import is_image_name
from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, read_manifest
from vitscale.distributed.atomic_files import blake3_of_file

TRAIN = "train"
BATCH_IMAGES = 256


@dataclass(frozen=True, kw_only=True)
class ImageList:
    """Images of one folder, in an order in which the first of two copies is the one to keep."""

    names: pa.ChunkedArray
    """Keys of shards, paths of files."""
    hashes: np.ndarray
    """uint64 [N, 4]: BLAKE3."""
    files: tuple[str, ...]
    file_of: np.ndarray
    """int: position in `files`."""
    offset: np.ndarray
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def places(self, start: int, stop: int) -> list[Place]:
        files = [self.files[i] for i in self.file_of[start:stop]]
        columns = self.offset[start:stop].tolist(), self.num_bytes[start:stop].tolist()
        return [Place(*row) for row in zip(files, *columns, strict=True)]


class Place(NamedTuple):
    """The bytes of one image."""

    file: str
    offset: int
    num_bytes: int

    def read(self) -> bytes:
        """Raise UserError if they cannot be read."""
        try:
            with open(self.file, "rb") as file:
                file.seek(self.offset)
                content = file.read(self.num_bytes)
            if len(content) == self.num_bytes:
                return content
            problem = "ends before the image that the index names"
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
        raise UserError(problem, where=printable(self.file)) from None


def list_images(folder: Path) -> ImageList:
    """List a shard folder, or else all visible image files below a folder.

    Raises UserError for a folder without images, and for tars at a URL.
    """
    if (folder / INDEX_NAME).is_file():
        samples = list_samples(folder)
        names = pc.binary_join_element_wise(printable(str(folder)), samples.names, "/")
        return replace(samples, names=names)
    if not folder.is_dir():
        raise UserError("no such folder", where=str(folder))
    files = list(_image_files(folder))
    if not files:
        raise UserError("has no images", where=str(folder), allowed="image files, or shards")
    try:
        hashes = b"".join(bytes.fromhex(blake3_of_file(Path(file))) for file in files)
        sizes = [os.path.getsize(file) for file in files]
    except OSError as error:
        where = printable(str(error.filename or folder))
        raise UserError(f"cannot be read ({error.strerror})", where=where) from None
    return ImageList(
        names=pa.chunked_array([[printable(file) for file in files]], pa.string()),
        hashes=np.frombuffer(hashes, "<u8").reshape(-1, 4),
        files=tuple(files),
        file_of=np.arange(len(files)),
        offset=np.zeros(len(files), np.int64),
        num_bytes=np.array(sizes, np.int64),
    )


def _image_files(folder: Path) -> Iterator[str]:
    """Yield visible files with image names, sorted in each folder; links are followed once."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and is_image_name(name):
                yield os.path.join(parent, name)


def list_samples(folder: Path) -> ImageList:
    """List all samples of a shard folder: splits other than `train` first, to keep them."""
    root = folder_of_tars(folder, read_manifest(folder))
    columns = ["split", "key", "shard", "offset", "length", "blake3"]
    table = pq.read_table(folder / INDEX_NAME, columns=columns)
    in_train = pc.equal(table.column("split").cast(pa.string()), TRAIN).to_numpy()
    table = table.take(np.argsort(in_train, kind="stable")).combine_chunks()
    shards = table.column("shard").cast(pa.string()).combine_chunks().dictionary_encode()
    hashes = table.column("blake3").cast(pa.binary()).combine_chunks()
    return ImageList(
        names=table.column("key"),
        hashes=np.frombuffer(b"".join(hashes.to_pylist()), "<u8").reshape(-1, 4),
        files=tuple(str(root / name) for name in shards.dictionary.to_pylist()),
        file_of=shards.indices.to_numpy(),
        offset=table.column("offset").to_numpy(),
        num_bytes=table.column("length").to_numpy(),
    )


def source_paths(folder: Path, keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the path in the source of each sample, from the ledger."""
    ledger = pq.read_table(folder / LEDGER_NAME, columns=["key", "path"])
    ledger = ledger.filter(pc.is_valid(ledger.column("key"))).combine_chunks()
    position = pc.index_in(keys, value_set=ledger.column("key").combine_chunks())
    return ledger.column("path").take(position)


def batches(images: ImageList) -> Iterator[list[Place]]:
    for start in range(0, len(images), BATCH_IMAGES):
        yield images.places(start, start + BATCH_IMAGES)


def describe(places: Sequence[Place]) -> tuple[np.ndarray, int]:
    """Return the descriptors of some images, and how many could not be decoded."""
    pictures = [grey_picture(place.read()) for place in places]
    blank = np.zeros((SIDE_PX, SIDE_PX), np.uint8)
    found = np.stack([blank if picture is None else picture for picture in pictures])
    return picture_descriptors(found), sum(picture is None for picture in pictures)


def thumbnail(place: Place, side: int) -> Image.Image:
    """Return a small picture of an image that can be decoded."""
    with Image.open(io.BytesIO(place.read()), formats=FORMATS) as image:
        image.draft("RGB", (2 * side, 2 * side))
        small = image.convert("RGB")
    small.thumbnail((side, side))
    return small
