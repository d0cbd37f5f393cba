"""Write small shard folders with real images, without data_prep's pipeline."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from blake3 import blake3
from PIL import Image

from data_prep.formats.index_files import label_map_sha256, write_index, write_info, write_manifest
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


def photo(seed: int, *, width: int = 40, height: int = 30, format: str = "JPEG") -> bytes:
    """A smooth random picture, different for every seed."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 255, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, format=format, quality=90)
    return file.getvalue()


def write_shard_folder(
    folder: Path,
    *,
    num_per_class: int,
    num_shards: int,
    classes: Sequence[str] = ("cat", "dog"),
    split: str = "train",
    seed: int = 0,
    side: int = 40,
) -> Path:
    """Write a folder with one split; sample i is of class i modulo their number.

    Without classes: `num_per_class` samples without labels.
    """
    folder.mkdir(parents=True)
    num = num_per_class * max(1, len(classes))
    rows, entries = [], []
    for number, samples in enumerate(np.array_split(np.arange(num), num_shards)):
        name = f"{split}-{number:06d}.tar"
        with TarShard(folder / name) as tar:
            for i in samples.tolist():
                image = photo(1000 * seed + i, width=side + i % 3, height=side - 8)
                key, label = f"{split}-{i:05d}", i % len(classes) if classes else None
                offset = tar.add(key, extension="jpg", image=image, label=label)
                rows.append(
                    {
                        "key": key,
                        "split": split,
                        "shard": name,
                        "offset": offset,
                        "length": len(image),
                        "format": "jpg",
                        "label": NO_LABEL if label is None else label,
                        "width": side + i % 3,
                        "height": side - 8,
                        "blake3": blake3(image).digest(),
                    }
                )
            digest = tar.finish()
        entries.append(
            ShardEntry(name=name, samples=len(samples), bytes=tar.num_bytes, blake3=digest)
        )
    write_index(folder, tables=[pa.Table.from_pylist(rows, schema=index_schema())])
    splits = {
        split: SplitEntry(
            num_samples=num,
            num_bytes=sum(entry.bytes for entry in entries),
            fingerprint=f"{split} {num} {seed}",
            shards=tuple(entries),
        )
    }
    write_info(folder, splits=splits)
    write_manifest(
        folder,
        manifest=Manifest(
            format_version=FORMAT_VERSION,
            tool_version="",
            fingerprint="",
            source_fingerprint="",
            label_map_sha256=label_map_sha256(classes),
            classes=tuple(classes),
            index_bytes=(folder / INDEX_NAME).stat().st_size,
            index_blake3=blake3_of_file(folder / INDEX_NAME),
            splits=splits,
            inputs={},
            config={},
        ),
    )
    return folder
