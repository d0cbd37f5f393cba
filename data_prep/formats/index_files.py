"""Write the files of an index beside the tars, and compute fingerprints.

Owns: their bytes, which depend only on the stored samples.
Leaves out: the fields of a manifest (`vitscale.data.index`), the form of positions and tables of
tars (`vitscale.data.positions`), the tars (`vitscale.data.tar_writer`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from blake3 import blake3

from vitscale.config.errors import UserError
from vitscale.data.index import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    SplitEntry,
    StoredFile,
    label_map_sha256,
    location_of_tars,
    shard_entry,
)
from vitscale.data.positions import (
    BLOCK_BYTES,
    POSITION,
    layout_hash,
    open_tars,
    positions_name,
    tars_name,
    tars_schema,
)
from vitscale.data.remote import (
    HASH_BYTES,
    Location,
    is_url,
    location_of,
    prefix_of_hash,
)
from vitscale.distributed.atomic_files import (
    atomic_file,
    blake3_of_file,
    write_json,
    write_text,
)

INFO_NAME = "_info.json"
CARD_NAME = "README.md"
_NAMES = pa.dictionary(pa.int32(), pa.string())
INDEX_SCHEMA = pa.schema(
    {
        "key": "string",
        "split": _NAMES,
        "shard": _NAMES,
        "offset": "int64",
        "length": "int64",
        "format": _NAMES,
        "label": "int32",
        "width": "int32",
        "height": "int32",
        "blake3": pa.binary(32),
    }
)

# The same without dictionaries.
TEXT_SCHEMA = pa.schema(
    [
        (field.name, "string" if field.type == _NAMES else field.type)
        for field in INDEX_SCHEMA
    ]
)
# Up to these numbers of images, `next_step` takes published weights or a small model, and DeiT's
# recipe.
SMALL_SAMPLES, MEDIUM_SAMPLES = 50_000, 2_000_000
# Median short sides: from here on images are photographs, and up to here not worth 32 px.
PHOTOGRAPH_PX, TINY_PX = 96, 32
PUBLISHED = "timm/vit_small_patch16_224.augreg_in21k"
PUBLISHED_NOTE = """
  published weights, fetched once (88 MB); without a network set init to a file or folder of them.
  Random weights learn far less from photographs as few as these: docs/own_images.md has figures"""
RANDOM_NOTE = """
  from random weights: enough for simple images; docs/own_images.md has what to expect"""
# Rows per parquet row group, which readers of a split skip as one.
ROW_GROUP_ROWS = 1 << 13


def write_index(folder: Path, *, tables: Iterable[pa.Table]) -> None:
    """Write index.parquet from tables in stored order, each of one split.

    The bytes depend only on the rows, not on their division into tables.
    """
    with atomic_file(folder / INDEX_NAME) as file:
        with pq.ParquetWriter(file, INDEX_SCHEMA, compression="zstd") as writer:
            for _, group in groupby(
                filter(len, tables), lambda table: table["split"][0].as_py()
            ):
                for part in _row_groups(group):
                    # New dictionaries: those of the tables depend on the division.
                    part = part.cast(TEXT_SCHEMA).combine_chunks()
                    writer.write_table(part.cast(INDEX_SCHEMA))


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of some tables, ROW_GROUP_ROWS at a time."""
    rest = INDEX_SCHEMA.empty_table()
    for table in tables:
        rest = pa.concat_tables([rest, table])
        while len(rest) >= ROW_GROUP_ROWS:
            yield rest.slice(0, ROW_GROUP_ROWS)
            rest = rest.slice(ROW_GROUP_ROWS)
    if len(rest):
        yield rest


def write_split(
    folder: Path, *, split: str, tars: Iterable[tuple[ShardEntry, pa.Table]]
) -> SplitEntry:
    """Write positions and the table of tars of a split. tars: with the rows of the index of each.

    Raises UserError for an image that does not begin where those of tars do.
    """
    entries = []
    checks = []
    digest = hashlib.sha256()
    hashed = blake3()
    with atomic_file(folder / positions_name(split)) as file:
        for entry, rows in tars:
            records = records_of(rows, where=entry.name).tobytes()
            file.write(records)
            hashed.update(records)
            checks.append(prefix_of_hash(records))
            digest.update(sample_bytes(rows).tobytes())
            entries.append(entry)

    lengths = [entry.samples for entry in entries]
    ends = np.cumsum(lengths)
    digest.update(np.array(lengths, "<i8").tobytes())
    columns: dict[str, Any] = {
        "name": [entry.name for entry in entries],
        "end": ends,
        "bytes": [entry.bytes for entry in entries],
        "positions": checks,
        "blake3": [bytes.fromhex(entry.blake3) for entry in entries],
    }
    return SplitEntry(
        num_samples=sum(lengths),
        num_bytes=sum(entry.bytes for entry in entries),
        num_tars=len(entries),
        fingerprint=digest.hexdigest(),
        layout=layout_hash(ends, np.array(checks, np.uint64)),
        tars=write_tars(folder / tars_name(split), columns),
        positions=StoredFile(
            bytes=sum(lengths) * POSITION.itemsize, blake3=hashed.hexdigest()
        ),
    )


def write_tars(path: Path, columns: Mapping[str, Any]) -> StoredFile:
    """Write a table of tars. columns: of `tars_schema`."""
    schema = tars_schema()
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    with atomic_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return StoredFile(bytes=path.stat().st_size, blake3=blake3_of_file(path))


def records_of(rows: pa.Table, *, where: str) -> np.ndarray:
    """POSITION of each of some rows of the index. where: their tar.

    Raises UserError for an image that does not begin at a whole block.
    """
    offsets = rows["offset"].to_numpy()
    records = np.empty(len(rows), POSITION)
    first_bytes = np.ascontiguousarray(sample_bytes(rows)[:, :HASH_BYTES])
    records["hash"] = first_bytes.view("<u8")[:, 0]
    records["block"] = offsets // BLOCK_BYTES
    records["length"] = rows["length"].to_numpy()
    records["label"] = rows["label"].to_numpy()
    # A larger number would have lost its first bits.
    is_same = np.array_equal(records["block"].astype("<i8") * BLOCK_BYTES, offsets)
    if not is_same or not np.array_equal(records["length"], rows["length"].to_numpy()):
        raise UserError(
            "has an image that cannot be indexed",
            where=where,
            allowed=f"images that begin at a multiple of {BLOCK_BYTES} bytes, within 2 TiB",
            next_step="write the tar again with another program",
        )
    return records


def info_of(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """`_info.json` in the form timm's WebDataset reader takes."""
    # timm opens the tars by these paths: names beside this file, or the place of other tars.
    root = location_of(manifest.shards_root)
    info = {}
    for name, entry in manifest.splits.items():
        shards = list(shards_of_split(folder, name, entry))
        info[name] = {
            "name": name,
            "num_samples": entry.num_samples,
            "filenames": [str(root / shard.name) for shard in shards],
            "shard_lengths": [shard.samples for shard in shards],
        }
    return {"splits": info}


def write_card(
    folder: Path,
    *,
    splits: Iterable[str],
    classes: Sequence[str],
    formats: Iterable[str],
) -> None:
    """Write README.md, from which Hugging Face `datasets` knows the splits and the classes.

    formats: suffixes of the images.
    """
    features: list[dict[str, Any]] = [
        {"name": suffix, "dtype": "image"} for suffix in formats
    ]

    if classes:
        names = {str(label): name for label, name in enumerate(classes)}
        features.append({"name": "cls", "dtype": {"class_label": {"names": names}}})
    features += [{"name": name, "dtype": "string"} for name in ("__key__", "__url__")]
    # Tars of all splits are in one folder, so their names tell them apart.
    files = [{"split": name, "path": f"{name}-*.tar"} for name in sorted(splits)]

    facts = {
        "configs": [{"config_name": "default", "data_files": files}],
        "dataset_info": {"features": features},
    }
    # As it is, YAML folds a line end of Unicode into a blank.
    is_plain = "".join(classes).isprintable()
    front = yaml.safe_dump(
        facts, sort_keys=False, width=math.inf, allow_unicode=is_plain
    )
    text = "Images as WebDataset tars; manifest.json has their numbers."
    write_text(folder / CARD_NAME, f"---\n{front}---\n\n{text}\n")


def write_manifest(folder: Path, *, manifest: Manifest) -> None:
    """Write manifest.json and `_info.json`."""
    write_json(folder / INFO_NAME, info_of(folder, manifest))
    write_json(folder / MANIFEST_NAME, asdict(manifest))


def sample_bytes(rows: pa.Table) -> np.ndarray:
    """[samples, 36] uint8 of rows of the index: an image's BLAKE3 and its label (uint32,
    little-endian). The fingerprint of a split is the SHA-256 of these, in order, and of the samples
    per tar."""
    hashes = np.frombuffer(b"".join(rows.column("blake3").to_pylist()), np.uint8)
    labels = rows.column("label").to_numpy().astype("<u4").view(np.uint8)
    return np.hstack([hashes.reshape(-1, 32), labels.reshape(-1, 4)])


def folder_fingerprint(
    splits: Mapping[str, SplitEntry], *, classes: Sequence[str]
) -> str:
    """Hash of the whole corpus as stored."""
    # Sorted keys make the text the same whatever order the splits come in.
    parts = {name: entry.fingerprint for name, entry in splits.items()}
    text = json.dumps([parts, label_map_sha256(classes)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def folder_of_tars(folder: Path, manifest: Manifest) -> Path:
    """The folder of the tars of a shard folder. Raises UserError if it is a URL."""
    where = f"{folder / MANIFEST_NAME}: shards_root"
    return local_folder(location_of_tars(folder, manifest), where=where)


def shards_of(folder: Path, manifest: Manifest) -> Iterator[ShardEntry]:
    """Yield the tars of all splits, in the order of the index. Raises UserError."""
    for split, entry in manifest.splits.items():
        yield from shards_of_split(folder, split, entry)


def shards_of_split(
    folder: Path, split: str, entry: SplitEntry
) -> Iterator[ShardEntry]:
    """Yield the tars of a split. Raises UserError where their table is damaged."""
    path = folder / tars_name(split)
    try:
        tars = open_tars(path, entry.layout)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UserError(
            f"cannot be read ({error})", where=path, next_step="make the shards again"
        ) from None
    for shard in range(len(tars.ends)):
        yield shard_entry(tars, shard, where=path)


def tar_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[Path]:
    """Return the tars that an index names. Raises UserError for one that the manifest lacks."""
    root = folder_of_tars(folder, manifest)
    known = {shard.name for shard in shards_of(folder, manifest)}
    # A name from elsewhere could lead out of the folder.
    for name in (name for name in names if name not in known):
        raise UserError(
            f"names the tar {name!r}, which the tables of tars do not have",
            where=folder / INDEX_NAME,
            next_step="make the shards again",
        )
    return [root / name for name in names]


def local_folder(place: Location | str, *, where: str) -> Path:
    """The place as a path. Raises UserError if it is a URL."""
    place = location_of(place, where=where)
    if isinstance(place, Path):
        return place
    raise UserError(
        f"{place} is a URL, and only local folders can be read here",
        where=where,
        next_step="download the folder; if it has tars alone, index them with vitscale prepare "
        "index",
    )


def next_step(folder: Path, manifest: Manifest, *, gpus: int) -> str:
    """A command that suits these images and a machine with so many GPUs, with what to expect of it.

    Published weights where photographs are too few to train a model from random ones; a small model
    for small images; of a large recipe without GPUs the plan alone.
    """
    num = sum(entry.num_samples for entry in manifest.splits.values())
    sizes = pq.read_table(folder / INDEX_NAME, columns=["width", "height"])
    side = np.median(np.minimum(*sizes.columns))

    settings = f"model.num_classes={len(manifest.classes)}"
    note = ""
    if not manifest.classes:
        recipe = "pretrain mae/b16"
        settings = "'evaluate=[]'"
    elif num > MEDIUM_SAMPLES:
        recipe = "pretrain vit_b16"
    elif num > SMALL_SAMPLES:
        recipe = "pretrain deit/s16"
    elif side >= PHOTOGRAPH_PX:
        recipe = "finetune own" if gpus else "evaluate own_features"
        # Few photographs: published weights know more than these can teach.
        settings = f"init={PUBLISHED}"
        note = PUBLISHED_NOTE
    else:
        recipe = "pretrain digits/pretrain"
        # The epochs of the file could be fewer steps than its warm-up.
        settings = "name=pretrain schedule.epochs=null schedule.steps=1000"
        if side > TINY_PX:
            settings += " model.image_size=32 data.horizontal_flip=true"
        note = RANDOM_NOTE
        gpus = gpus or 2

    if gpus:  # a power of two, which divides the batches of all recipes
        recipe += f" --num-procs {1 << gpus.bit_length() - 1}"
    elif not note:
        # Without a GPU a large recipe would take weeks, so only its plan is shown.
        recipe = f"{recipe.replace('pretrain', 'launch')} --dry-run"
    # `val` comes before others; among these the first by name.
    held_out = sorted(manifest.splits.keys() - {"train"}, key="val".__ne__)
    settings += f" data.val_split={quote(next(iter(held_out), 'null'))}"
    if note and not held_out:
        settings += " data.dev_percent=10"
    if is_url(manifest.shards_root):
        settings += " data.remote.cache_path=FOLDER"
    return f"vitscale {recipe} data.path={quote(str(folder))} {settings}{note}"
