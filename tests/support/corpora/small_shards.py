"""Write a shard folder of a few tiny images with data_prep's own writers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from blake3 import blake3
from PIL import Image

from data_prep.formats.index_files import (
    folder_fingerprint,
    label_map_sha256,
    sample_bytes,
    split_fingerprint,
    write_index,
    write_info,
    write_manifest,
)
from data_prep.formats.ledger import write_ledger
from data_prep.formats.tar_writer import TarShard
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    NO_LABEL,
    Manifest,
    ShardEntry,
    SplitEntry,
    index_schema,
)
from vitscale.distributed.atomic_files import blake3_of_file

SIDES = {"png": (5, 4), "jpg": (9, 7), "webp": (6, 8)}
FORMATS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


def image_bytes(extension: str, *, seed: int, side: tuple[int, int] | None = None) -> bytes:
    width, height = side or SIDES[extension]
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=FORMATS[extension])
    return file.getvalue()


def make_shard_folder(
    folder: Path,
    *,
    lengths: dict[str, tuple[int, ...]] | None = None,
    classes: Sequence[str] = ("cat", "dog", "eel"),
    rejected: Sequence[tuple[str, str, str]] = (("cat/broken.jpg", "cat", "bad_pixels"),),
) -> Manifest:
    """Write a whole folder; `rejected`: path, class, reason of inputs that are in the ledger only.

    Image i of a split is of class i modulo the number of classes, png, jpg and webp in turn.
    Without classes the samples have no labels.
    """
    folder.mkdir(parents=True)
    tables, entries = [], {}
    for split, of_tar in sorted((lengths or {"test": (2,), "train": (3, 2)}).items()):
        rows = []
        shards = []
        for number, length in enumerate(of_tar):
            name = f"{split}-{number:06d}.tar"
            with TarShard(folder / name) as tar:
                for _ in range(length):
                    i = len(rows)
                    extension = list(SIDES)[i % 3]
                    label = i % len(classes) if classes else NO_LABEL
                    image = image_bytes(extension, seed=i)
                    key = f"{split}-c{label}-{i}"
                    stored = label if classes else None
                    offset = tar.add(key, extension=extension, image=image, label=stored)
                    place = (key, split, name, offset, len(image), extension, label)
                    rows.append((*place, *SIDES[extension], blake3(image).digest()))
                digest = tar.finish()
            shards.append(ShardEntry(name=name, samples=length, bytes=tar.num_bytes, blake3=digest))
        columns = [
            pa.array(values, pa.string() if pa.types.is_dictionary(field.type) else field.type)
            for values, field in zip(zip(*rows, strict=True), index_schema(), strict=True)
        ]
        table = pa.table(columns, names=index_schema().names)
        tables.append(table.cast(index_schema()))
        entries[split] = SplitEntry(
            num_samples=len(rows),
            num_bytes=sum(shard.bytes for shard in shards),
            fingerprint=split_fingerprint([sample_bytes(table)], shard_lengths=of_tar),
            shards=tuple(shards),
        )
    write_index(folder, tables=tables)
    write_info(folder, splits=entries)
    inputs = [
        (f"{key}.jpg", split, classes[label] if classes else None, None, key, image_hash)
        for table in tables
        for key, split, label, image_hash in zip(
            *(table[name].to_pylist() for name in ("key", "split", "label", "blake3")), strict=True
        )
    ]
    inputs += [(path, "train", name, reason, None, None) for path, name, reason in rejected]
    names = "path", "split", "class", "reason", "key", "blake3"
    columns = dict(zip(names, zip(*inputs, strict=True), strict=True))
    nothing = pa.nulls(len(inputs), pa.string())
    arrays = {
        name: pa.array(values, pa.binary(32) if name == "blake3" else pa.string())
        for name, values in columns.items()
    }
    ledger = write_ledger(folder, [pa.table(arrays | {"changes": nothing, "detail": nothing})])
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version="vitscale 0",
        fingerprint=folder_fingerprint(entries, classes=classes),
        source_fingerprint="0" * 64,
        label_map_sha256=label_map_sha256(classes),
        classes=tuple(classes),
        index_bytes=(folder / INDEX_NAME).stat().st_size,
        index_blake3=blake3_of_file(folder / INDEX_NAME),
        splits=entries,
        inputs=ledger.as_json(),
        config={},
    )
    write_manifest(folder, manifest=manifest)
    return manifest
