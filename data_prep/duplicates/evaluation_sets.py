"""Index evaluation sets, whose images must not be in the training data.

Owns: listing and hashing the images of evaluation sets, the file of their descriptors, and matching
images against it.
Leaves out: when two images match (`descriptors`), and what happens to matches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NoReturn
from zipfile import BadZipFile

import numpy as np
from blake3 import blake3

from data_prep.duplicates.descriptors import (
    DESCRIPTOR,
    FORMATS,
    HASHES,
    NUM_KEYS,
    SIDE_PX,
    equal_keys,
    grey_picture,
    has_contrast,
    hashes_near,
    keys_of,
    picture_descriptors,
    pictures_correlate,
)
from data_prep.duplicates.second_look import Look, look_at
from data_prep.shards.index import folder_of_tars
from data_prep.sources.outages import Interrupted, printable, raise_if_outage, source_read_error
from data_prep.sources.paths import hash_named_file, is_image_name
from data_prep.sources.protocol import read_exactly
from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, MANIFEST_NAME, read_manifest
from vitscale.distributed.atomic_files import atomic_file
from vitscale.distributed.processes import num_cores

FORMAT_VERSION = 2
EVALUATION_FOLDERS = "folders with image files, or shards with index.parquet"
MAX_FILE_BYTES = 1 << 29
MAX_PIXELS = 100_000_000
BATCH_IMAGES = 64
# Descriptors and pairs per batch: bounds on memory.
QUERY_ROWS = 1 << 14
MAX_PAIRS = 1 << 16
NO_MATCH = -1


@dataclass(frozen=True, slots=True)
class EvaluationImage:
    """Where one evaluation image is."""

    name: str
    file: Path
    offset: int = 0
    num_bytes: int = -1


def build_evaluation_index(paths: Sequence[str], *, output: Path) -> None:
    """Write the descriptors of all images in image folders (any structure) and shard folders.

    Raises UserError for a path without images, and for one with mostly undecodable images.
    """
    sets = [_images_of(Path(path).expanduser()) for path in paths]
    images = [image for each in sets for image in each]
    pictures = np.zeros((len(images), SIDE_PX, SIDE_PX), dtype=np.uint8)
    readable = np.zeros(len(images), dtype=bool)

    def describe_batch(start: int) -> None:
        for i in range(start, min(start + BATCH_IMAGES, len(images))):
            picture = grey_picture(_image_bytes(images[i]), max_pixels=MAX_PIXELS)
            if picture is not None:
                pictures[i], readable[i] = picture, True

    # Threads, because decoders release the interpreter lock.
    with ThreadPoolExecutor(num_cores()) as pool:
        list(pool.map(describe_batch, range(0, len(images), BATCH_IMAGES)))
    _check_readable(paths, sets, readable)
    descriptors = np.concatenate(
        [np.zeros(0, DESCRIPTOR)]
        + [
            picture_descriptors(pictures[start : start + QUERY_ROWS])
            for start in range(0, len(images), QUERY_ROWS)
        ]
    )
    names = [image.name.encode() for image in images]
    with atomic_file(output) as file:
        # Plain numeric arrays, so no code is loaded from the file. The zip contains no times.
        np.savez(
            file,
            version=np.array(FORMAT_VERSION),
            descriptors=descriptors.view(np.uint8).reshape(len(images), DESCRIPTOR.itemsize),
            readable=readable,
            **_stored_texts("names", names),
            **_stored_texts("files", [os.fsencode(image.file) for image in images]),
            offsets=np.array([image.offset for image in images], dtype=np.int64),
            lengths=np.array([image.num_bytes for image in images], dtype=np.int64),
        )


def _stored_texts(name: str, texts: Sequence[bytes]) -> dict[str, Any]:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return {name: np.frombuffer(b"".join(texts), dtype=np.uint8), f"{name}_ends": ends}


def _loaded_texts(stored: Mapping[str, np.ndarray], name: str) -> list[bytes]:
    text, ends = stored[name].tobytes(), stored[f"{name}_ends"].tolist()
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _images_of(path: Path) -> list[EvaluationImage]:
    if os.path.isfile(path / INDEX_NAME):
        images = list(_shard_images(path))
        if not images:
            where = f"selection.evaluation_sets: {path}"
            raise UserError("contains no images", where=where, allowed=EVALUATION_FOLDERS)
        return images
    return [EvaluationImage(printable(str(file)), file) for file in image_files(path)]


def _shard_images(path: Path) -> Iterator[EvaluationImage]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = str(path / INDEX_NAME)
    has_manifest = (path / MANIFEST_NAME).is_file()
    root = folder_of_tars(path, read_manifest(path)) if has_manifest else path
    try:
        with pq.ParquetFile(path / INDEX_NAME) as index:
            columns = ["key", "shard", "offset", "length"]
            for batch in index.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    shard = PurePath(row["shard"])
                    if not shard.name or shard.is_absolute() or ".." in shard.parts:
                        raise UserError(f"names {row['shard']!r} as a shard", where=where)
                    yield EvaluationImage(
                        f"{printable(str(path))}/{row['shard']}/{row['key']}",
                        root / shard,
                        row["offset"],
                        row["length"],
                    )
    except (OSError, KeyError, pa.ArrowException) as error:
        if isinstance(error, OSError):
            raise_if_outage(error, where)
        raise UserError(f"cannot be read ({error})", where=where) from None


def _image_bytes(image: EvaluationImage) -> bytes:
    """The bytes of an image; empty if they are lost. Raises Interrupted for an outage."""
    try:
        with open(image.file, "rb") as file:
            num_bytes = image.num_bytes
            if num_bytes < 0:
                num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > MAX_FILE_BYTES or image.offset < 0:
                return b""
            return read_exactly(file.fileno(), offset=image.offset, num_bytes=num_bytes)
    except EOFError:
        return b""
    except OSError as error:
        raise_if_outage(error, str(image.file))
        return b""


def _check_readable(
    paths: Sequence[str], sets: Sequence[Sequence[EvaluationImage]], readable: np.ndarray
) -> None:
    """Raise UserError for a set with mostly undecodable images."""
    ends = np.cumsum([len(images) for images in sets])
    for path, images, good in zip(paths, sets, np.split(readable, ends[:-1]), strict=True):
        broken = [image.name for image, is_good in zip(images, good, strict=True) if not is_good]
        if 2 * len(broken) > len(images):
            raise UserError(
                f"{len(broken)} of {len(images)} images cannot be decoded, such as {broken[0]!r}",
                where=f"selection.evaluation_sets: {path}",
                allowed=", ".join(FORMATS),
                next_step="check or convert these files: images that cannot be decoded are never "
                "found in the corpus",
            )


def evaluation_listing(path: str) -> str:
    """Hash of the names and sizes of a folder's images, or of the index of a shard folder.

    Raises Interrupted for a missing or empty folder.
    """
    folder, where = Path(path).expanduser(), f"selection.evaluation_sets: {path}"
    if os.path.isfile(folder / INDEX_NAME):
        return hash_named_file(folder / INDEX_NAME, where=where)
    digest = blake3()
    for file in image_files(folder):
        try:
            num_bytes = os.path.getsize(file)
        except OSError as error:
            raise_if_outage(error, str(file))
            num_bytes = -1
        digest.update(os.fsencode(f"{os.path.relpath(file, folder)}\0{num_bytes}\0"))
    return digest.hexdigest()


def image_files(folder: Path) -> Iterator[Path]:
    """Visible files with image names, sorted within each folder; links are followed once.

    Raises Interrupted if there are none, or if a folder cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise source_read_error(error, error.filename or str(folder)) from None

    where = f"selection.evaluation_sets: {folder}"
    if not os.path.isdir(folder):
        raise Interrupted("no such folder", where=where, allowed=EVALUATION_FOLDERS)
    seen, found = set(), False
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and is_image_name(name):
                found = True
                yield Path(parent, name)
    if not found:
        raise Interrupted("contains no images", where=where, allowed=EVALUATION_FOLDERS)


@dataclass(frozen=True)
class EvaluationIndex:
    """Descriptors and names of all evaluation images."""

    descriptors: np.ndarray
    names: tuple[str, ...]
    """The file of each image, or SHARD_FOLDER/SHARD/KEY."""
    unreadable: tuple[str, ...] = ()
    """Images that cannot be decoded and match nothing."""
    images: tuple[EvaluationImage, ...] = ()
    """Where the bytes of each image are."""

    @classmethod
    def load(cls, path: Path) -> EvaluationIndex:
        try:
            with np.load(path, allow_pickle=False) as stored:
                if int(stored["version"]) != FORMAT_VERSION:
                    raise ValueError(f"version {stored['version']}")
                raw, readable = stored["descriptors"], stored["readable"]
                names = tuple(name.decode() for name in _loaded_texts(stored, "names"))
                files = [Path(os.fsdecode(file)) for file in _loaded_texts(stored, "files")]
                places = stored["offsets"].tolist(), stored["lengths"].tolist()
            if raw.dtype != np.uint8 or raw.shape != (len(names), DESCRIPTOR.itemsize):
                raise ValueError(f"descriptors of shape {raw.shape}")
            images = tuple(map(EvaluationImage, names, files, *places))
            unreadable = tuple(n for n, good in zip(names, readable, strict=True) if not good)
        except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
            raise UserError(
                f"is not an index of evaluation sets ({type(error).__name__}: {error})",
                where=str(path),
                next_step="remove it and run the command again",
            ) from None
        return cls(raw.reshape(-1).view(DESCRIPTOR), names, unreadable, images)

    @cached_property
    def _tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For direct and mirrored keys: (sorted keys, descriptor of each)."""
        rows = np.flatnonzero(has_contrast(self.descriptors))
        tables = []
        for keys in keys_of(self.descriptors[rows]):
            order = np.argsort(keys, axis=None, kind="stable")
            tables.append((keys.ravel()[order], rows[order // NUM_KEYS]))
        return tables

    def match(self, descriptors: np.ndarray) -> np.ndarray:
        """int64 per descriptor: the first matching evaluation image, or NO_MATCH."""
        found = np.full(len(descriptors), len(self.names), dtype=np.int64)
        for start in range(0, len(descriptors), QUERY_ROWS):
            for query, owner in self._pairs(descriptors[start : start + QUERY_ROWS]):
                np.minimum.at(found[start:], query, owner)
        return np.where(found < len(self.names), found, NO_MATCH)

    def candidates(self, descriptor: np.void, *, num: int) -> list[int]:
        """The first `num` evaluation images that match one descriptor."""
        owners = {int(o) for _, owner in self._pairs(descriptor.reshape(1)) for o in owner}
        return sorted(owners)[:num]

    def look(self, position: int) -> Look | None:
        """The picture of an evaluation image; None if it is lost."""
        return look_at(_image_bytes(self.images[position]), max_pixels=MAX_PIXELS)

    def _pairs(self, descriptors: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every (position in descriptors, position of an evaluation image) that matches."""
        rows = np.flatnonzero(has_contrast(descriptors))
        queries = keys_of(descriptors[rows])
        for ours, theirs in ((0, 0), (1, 0), (0, 1)):
            table, owners = self._tables[theirs]
            for probe, entry in equal_keys(table, queries[ours].ravel(), max_pairs=MAX_PAIRS):
                query, owner = rows[probe // NUM_KEYS], owners[entry]
                # A pair that shares one key usually shares several.
                pairs = np.unique(query * len(self.names) + owner)
                query, owner = np.divmod(pairs, len(self.names))
                hashes = descriptors[HASHES[ours]][query], self.descriptors[HASHES[theirs]][owner]
                linked = hashes_near(*hashes)
                query, owner = query[linked], owner[linked]
                same = pictures_correlate(
                    descriptors[query],
                    self.descriptors[owner],
                    mirrored=np.full(len(query), ours != theirs),
                )
                yield query[same], owner[same]
