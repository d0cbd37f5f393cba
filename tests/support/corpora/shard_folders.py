"""Write small shard folders with data_prep's own writers, without its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from blake3 import blake3
from PIL import Image

from data_prep.formats.index_files import (
    INDEX_SCHEMA,
    folder_fingerprint,
    write_index,
    write_manifest,
    write_split,
)
from data_prep.formats.ledger import LEDGER_SCHEMA, write_ledger
from tests.support.corpora.image_samples import encoded, noise
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    NO_LABEL,
    Manifest,
    ShardEntry,
    label_map_sha256,
)
from vitscale.data.tar_writer import TarShard
from vitscale.distributed.atomic_files import blake3_of_file

# Width and height, of each format others: the index must have those of the image itself.
SIDES = {"png": (5, 4), "jpg": (9, 7), "webp": (6, 8)}
FORMATS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


class Sample(NamedTuple):
    key: str
    extension: str
    image: bytes
    label: int | None
    width: int
    height: int


def image_bytes(
    extension: str, *, seed: int, side: tuple[int, int] | None = None
) -> bytes:
    width, height = side or SIDES[extension]
    return encoded(noise(width, height, seed=seed), FORMATS[extension])


def photo(seed: int, *, width: int = 40, height: int = 30) -> bytes:
    """A smooth random picture, different for every seed."""
    small = Image.fromarray(noise(6, 5, seed=seed))
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    return encoded(image, "JPEG", quality=90)


def make_shard_folder(
    folder: Path,
    *,
    lengths: dict[str, tuple[int, ...]] | None = None,
    classes: Sequence[str] = ("cat", "dog", "eel"),
    rejected: Sequence[tuple[str, str, str]] = (
        ("cat/broken.jpg", "cat", "bad_pixels"),
    ),
) -> Manifest:
    """Write a whole folder; `rejected`: path, class, reason of inputs that are in the ledger only.

    Image i of a split is of class i modulo the number of classes, png, jpg and webp in turn.
    Without classes the samples have no labels.
    """
    # The tars of a split differ in length: none may be taken for the length of all.
    if lengths is None:
        lengths = {"test": (2,), "train": (3, 2)}
    extensions = list(SIDES)
    splits = {}
    for split, of_tar in sorted(lengths.items()):
        samples = []
        for i in range(sum(of_tar)):
            extension = extensions[i % 3]
            label = _label(i, classes)
            key = f"{split}-c{_number(label)}-{i}"
            image = image_bytes(extension, seed=i)
            samples.append(Sample(key, extension, image, label, *SIDES[extension]))
        rest = iter(samples)
        splits[split] = [list(islice(rest, num)) for num in of_tar]
    return write_folder(folder, splits, classes=classes, rejected=rejected)


def _label(i: int, classes: Sequence[str]) -> int | None:
    if not classes:
        return None
    return i % len(classes)


def _number(label: int | None) -> int:
    """The label as the index has it, whose column has no null."""
    if label is None:
        return NO_LABEL
    return label


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
    """Write a folder with one split of photos; sample i is of class i modulo their number.

    Without classes: `num_per_class` samples without labels.
    """
    samples = []
    for i in range(num_per_class * max(1, len(classes))):
        # Widths in turn: batches of unequal images are the rule.
        width = side + i % 3
        height = side - 8
        image = photo(1000 * seed + i, width=width, height=height)
        label = _label(i, classes)
        samples.append(Sample(f"{split}-{i:05d}", "jpg", image, label, width, height))

    # As numpy's array_split: the first shards have one sample more, where the number demands it.
    num, num_longer = divmod(len(samples), num_shards)
    rest = iter(samples)
    shards = [list(islice(rest, num + (i < num_longer))) for i in range(num_shards)]

    # Not that of the bytes, which another release of Pillow changes, and the order with them.
    fingerprint = f"{split} {len(samples)} {seed}"
    write_folder(folder, {split: shards}, classes=classes, fingerprint=fingerprint)
    return folder


def write_folder(
    folder: Path,
    splits: Mapping[str, list[list[Sample]]],
    *,
    classes: Sequence[str],
    rejected: Sequence[tuple[str, str, str]] = (),
    fingerprint: str | None = None,
) -> Manifest:
    """Write the samples of each tar of each split. fingerprint: of all splits, for the true one."""
    folder.mkdir(parents=True)
    tables = []
    entries = {}
    inputs = []
    for split, tars in splits.items():
        rows = []
        shards = []
        for number, samples in enumerate(tars):
            name = f"{split}-{number:06d}.tar"
            with TarShard(folder / name) as tar:
                for key, extension, image, label, width, height in samples:
                    offset = tar.add(key, extension=extension, image=image, label=label)
                    digest = blake3(image).digest()
                    # In the order of the schema's columns.
                    row = (
                        *(key, split, name, offset, len(image), extension),
                        *(_number(label), width, height, digest),
                    )
                    rows.append(dict(zip(INDEX_SCHEMA.names, row, strict=True)))
                    source = {
                        "path": f"{key}.jpg",
                        "split": split,
                        "key": key,
                        "blake3": digest,
                    }
                    if label is not None:
                        source["class"] = classes[label]
                    inputs.append(source)
                hexdigest = tar.finish()
            entry = ShardEntry(
                name=name,
                samples=len(samples),
                bytes=tar.num_bytes,
                blake3=hexdigest,
            )
            shards.append(entry)

        table = pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
        tables.append(table)
        ends = np.cumsum([shard.samples for shard in shards])
        of_tars = [
            (shard, table[end - shard.samples : end])
            for shard, end in zip(shards, ends.tolist(), strict=True)
        ]
        entry = write_split(folder, split=split, tars=of_tars)
        entries[split] = replace(entry, fingerprint=fingerprint or entry.fingerprint)
    write_index(folder, tables=tables)

    # What was rejected has no key and no hash; its columns are null.
    inputs += [
        {"path": path, "split": "train", "class": name, "reason": reason}
        for path, name, reason in rejected
    ]
    # `changes` is read by write_ledger, which tells kept from repaired by it; the file has none.
    schema = LEDGER_SCHEMA.append(pa.field("changes", pa.string()))
    ledger = write_ledger(folder, [pa.Table.from_pylist(inputs, schema=schema)])
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
