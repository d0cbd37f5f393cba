"""Compare a shard folder with its manifest: every file, every tar, every image.

A tar is compared with its hash in the manifest, each image with its own hash and its header, and
our tars with the bytes that follow from the index. So damage is found, and so are errors made when
the folder was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from data_prep.duplicates.reading import image_of
from data_prep.formats.index_files import (
    INDEX_SCHEMA,
    INFO_NAME,
    folder_of_tars,
    info_of,
    sample_bytes,
    split_fingerprint,
)
from data_prep.formats.ledger import LEDGER_NAME
from data_prep.formats.tar_writer import END_MARK, around_image
from data_prep.images.check import SUFFIXES, Rejected, format_of, open_image
from data_prep.images.sheet import draw_rows
from data_prep.worker_processes import Workers
from vitscale.data.index import INDEX_NAME, NO_LABEL, Manifest, ShardEntry
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.processes import num_cores
from vitscale.images.jpeg import entry_points
from vitscale.tracking.journal import item_progress

# Of the sheet: at most this many classes, and images of each.
MAX_CLASSES, PER_CLASS = 40, 10

Task = tuple[ShardEntry, pa.Table]
"""A tar, and its rows of the index; none if that cannot be read."""


def check_folder(
    folder: Path,
    *,
    manifest: Manifest,
    num_workers: int | None,
    write_entry_points: bool = False,
) -> list[str]:
    """Return all findings; none for a valid folder. Raises UserError for tars at a URL."""
    index = _read_index(folder)
    found = [
        *_findings(INDEX_NAME, _check_index(folder, manifest, index)),
        *_findings(LEDGER_NAME, _check_ledger(folder, manifest, index)),
        *_findings(INFO_NAME, _check_info(folder, manifest)),
    ]
    check = partial(
        check_tar,
        folder=folder,
        root=folder_of_tars(folder, manifest),
        ours=manifest.shards_root == "." and index is not None,
        write_entry_points=write_entry_points,
    )
    num_samples = sum(entry.num_samples for entry in manifest.splits.values())
    num = num_workers or num_cores()
    with (
        item_progress("verify", total=num_samples) as advance,
        Workers(check, num=num, imports=[__name__]) as workers,
    ):
        for _, (shard, _), findings in workers.results(tar_tasks(index, manifest)):
            found += [f"{shard.name}: {finding}" for finding in findings]
            advance(shard.samples)
    return sorted(found)


def _findings(name: str, check: Iterator[str]) -> Iterator[str]:
    """Yield the findings about a file, or a single one if it cannot be read."""
    try:
        yield from (f"{name}: {one}" for one in check)
    except (OSError, ValueError, pa.ArrowException) as error:
        yield f"{name}: cannot be read ({error})"


def tar_tasks(index: pa.Table | None, manifest: Manifest) -> Iterator[Task]:
    """Yield every tar with its rows. index: of all tars, in their order."""
    rows, start = INDEX_SCHEMA.empty_table() if index is None else index, 0
    for shard in (shard for entry in manifest.splits.values() for shard in entry.shards):
        end = min(start + shard.samples, len(rows))
        # Copied: a pickled slice has the whole table.
        yield shard, rows.take(np.arange(start, end))
        start = end


def _read_index(folder: Path) -> pa.Table | None:
    try:
        table = pq.read_table(folder / INDEX_NAME)
    except (OSError, pa.ArrowException):
        return None
    if not table.schema.equals(INDEX_SCHEMA):
        return None
    return table.drop_null().unify_dictionaries().combine_chunks()


def _check_index(folder: Path, manifest: Manifest, index: pa.Table | None) -> Iterator[str]:
    """Compare labels with the classes, and the samples with each split's fingerprint."""
    if blake3_of_file(folder / INDEX_NAME) != manifest.index_blake3:
        yield "content differs from the manifest (BLAKE3)"
    if index is None:
        yield "is no table, or has other columns than this version writes"
        return
    labels = index.column("label").to_numpy()
    low, high = (0, len(manifest.classes)) if manifest.classes else (NO_LABEL, 0)
    if wrong := int(np.count_nonzero((labels < low) | (labels >= high))):
        yield f"{wrong:,} labels are outside {low} to {high - 1:,}"
    shards = [shard for entry in manifest.splits.values() for shard in entry.shards]
    names = [shard.name for shard in shards for _ in range(shard.samples)]
    if index["shard"].to_pylist() != names:
        yield "does not have the samples of the manifest's tars, in their order"
    splits = index.column("split").cast(pa.string())
    for split, entry in manifest.splits.items():
        content = [sample_bytes(index.filter(pc.equal(splits, split)))]
        if split_fingerprint(content, shard_lengths=entry.shard_lengths) != entry.fingerprint:
            yield f"samples of split {split!r} do not have the manifest's fingerprint"


def check_tar(
    task: Task, *, folder: Path, root: Path, ours: bool, write_entry_points: bool = False
) -> list[str]:
    """Compare one tar with the manifest and the index. Raises for no content of the file.

    ours: written by make_shards: an image and its label, if any, per sample; no other members.
    """
    shard, rows = task
    found, points = list[str](), dict[int, bytes]()
    try:
        if blake3_of_file(root / shard.name) != shard.blake3:
            found.append("content differs from the manifest (BLAKE3)")
        with open(root / shard.name, "rb") as file:
            for row in rows.to_pylist():
                problem, image = _check_sample(file, row, shard.bytes, ours=ours)
                if problem:
                    found.append(f"sample {row['key']!r}: {problem}")
                elif write_entry_points:
                    key = int.from_bytes(row["blake3"][:8], "little")
                    points[key] = entry_points.find_entry_points(image)
            if ours and file.read(len(END_MARK) + 1) != END_MARK:
                found.append("holds more than the samples of the index, or no end mark")
    except OSError as error:
        return [*found, f"cannot be read ({error.strerror})"]
    if write_entry_points and not found:
        place = entry_points.entry_points_file(folder, shard.name)
        entry_points.write_entry_points(place, points)
    return found


def _check_sample(
    file: BinaryIO, row: Mapping[str, Any], num_bytes: int, *, ours: bool
) -> tuple[str | None, bytes]:
    """(what is wrong with a sample of the index, its image). Leaves the file at its end."""
    if row["offset"] + row["length"] > num_bytes:
        return "lies outside the tar", b""
    before, after = b"", b""
    if ours:
        label = None if row["label"] == NO_LABEL else row["label"]
        before, after = around_image(
            row["key"], extension=row["format"], num_bytes=row["length"], label=label
        )
    file.seek(max(0, row["offset"] - len(before)))
    stored = file.read(len(before) + row["length"] + len(after))
    image = stored[len(before) :][: row["length"]]
    if stored != before + image + after:
        return "has another name, size, place or label in the tar", image
    if blake3(image).digest() != row["blake3"]:
        return "the image's bytes differ from the index (BLAKE3)", image
    try:
        opened = open_image(image, format_of(image))
    except Rejected as error:
        return f"the image cannot be read ({error})", image
    found = SUFFIXES[format_of(image)], *opened.size
    expected = row["format"], row["width"], row["height"]
    return (None if found == expected else f"is {found}, but the index says {expected}"), image


def _check_ledger(folder: Path, manifest: Manifest, index: pa.Table | None) -> Iterator[str]:
    """Check that it has all inputs, and that those not rejected are the samples."""
    ledger = pq.read_table(folder / LEDGER_NAME, columns=["split", "key", "status"])
    if len(ledger) != manifest.inputs.get("num_rows"):
        yield "has other sums than the manifest"
    kept = ledger.filter(pc.not_equal(ledger["status"].cast(pa.string()), "rejected"))
    if index is not None and _names(kept) != _names(index):
        yield "the inputs kept or repaired are not the samples of the index"


def _names(rows: pa.Table) -> list[tuple[str, str]]:
    """Split and key of each row, sorted."""
    parts = (rows[name].cast(pa.string()).to_pylist() for name in ("split", "key"))
    return sorted(zip(*parts, strict=True))


def _check_info(folder: Path, manifest: Manifest) -> Iterator[str]:
    info = info_of(manifest.splits, shards_root=manifest.shards_root)
    if json.loads((folder / INFO_NAME).read_text()) != json.loads(json.dumps(info)):
        yield "is not what the manifest says"


def draw_sheet(path: Path, folder: Path, manifest: Manifest) -> None:
    """Draw the first samples of each class, one class per row; at most MAX_CLASSES, evenly."""
    root = folder_of_tars(folder, manifest)
    table = pq.read_table(folder / INDEX_NAME, columns=["shard", "offset", "length", "label"])
    labels = table.column("label").to_numpy()
    present = np.unique(labels)
    chosen = present[np.linspace(0, len(present) - 1, min(MAX_CLASSES, len(present))).astype(int)]
    rows = []
    for label in chosen.tolist():
        positions = np.flatnonzero(labels == label)
        name = "no label" if label == NO_LABEL else f"{label} {manifest.classes[label]}"
        images = [
            image_of(row | {"file": root / row["shard"]})
            for row in table.take(positions[:PER_CLASS]).to_pylist()
        ]
        rows.append((f"{name}: {len(positions):,}", images))
    draw_rows(path, rows)
