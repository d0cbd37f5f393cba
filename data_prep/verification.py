"""Compare a shard folder with its manifest: every file, every tar, every image.

A tar is compared with its hash in the manifest, each image with its own hash and its header, and
our tars with the bytes that follow from the index. So damage is found, and so are errors made when
the folder was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
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
    records_of,
    sample_bytes,
    shards_of,
    shards_of_split,
    tar_files,
)
from data_prep.formats.ledger import LEDGER_NAME
from data_prep.images.check import Rejected, known_format, open_image
from vitscale.data.index import (
    INDEX_NAME,
    NO_LABEL,
    Manifest,
    ShardEntry,
    StoredFile,
)
from vitscale.data.positions import positions_name, tars_name
from vitscale.data.tar_members import END_MARK
from vitscale.data.tar_writer import around_image
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.worker_processes import Workers
from vitscale.images.jpeg import entry_points
from vitscale.images.plain import SUFFIXES
from vitscale.images.sheet import draw_rows
from vitscale.tracking.journal import item_progress

# The sheet has at most so many classes, and images of each.
MAX_CLASSES = 40
PER_CLASS = 10

BATCH_ROWS = 1 << 13

Task = tuple[ShardEntry, pa.Table]
"""A tar, and its rows of the index; none if that cannot be read."""


def check_folder(
    folder: Path,
    *,
    manifest: Manifest,
    num_workers: int,
    write_entry_points: bool = False,
) -> list[str]:
    """Return all findings; none for a valid folder. Raises UserError for tars at a URL."""
    is_index = _is_index(folder / INDEX_NAME)
    found: list[str] = []
    for split, entry in manifest.splits.items():
        stored = {positions_name(split): entry.positions, tars_name(split): entry.tars}
        for name, file in stored.items():
            found += _findings(name, _check_stored(folder / name, file))
    # Without these tables nothing is known of the tars.
    if any(finding.startswith("tars-") for finding in found):
        return sorted(found)

    found += [
        *_findings(INDEX_NAME, _check_index(folder, manifest, is_index=is_index)),
        *_findings(LEDGER_NAME, _check_ledger(folder, manifest, has_index=is_index)),
        *_findings(INFO_NAME, _check_info(folder, manifest)),
    ]

    check = partial(
        check_tar,
        folder=folder,
        root=folder_of_tars(folder, manifest),
        ours=manifest.shards_root == "." and is_index,
        write_entry_points=write_entry_points,
    )

    num_samples = sum(entry.num_samples for entry in manifest.splits.values())
    with (
        item_progress("verify", total=num_samples) as advance,
        Workers(check, num=num_workers, imports=[__name__]) as workers,
    ):
        # Rows up to the first damage can still be compared.
        pieces = _readable(_batches(folder / INDEX_NAME)) if is_index else ()
        tasks = tar_tasks(pieces, shards_of(folder, manifest))
        for _, (shard, _), findings in workers.results(tasks):
            found += [f"{shard.name}: {finding}" for finding in findings]
            advance(shard.samples)
    return sorted(found)


def _findings(name: str, check: Iterator[str]) -> Iterator[str]:
    """Yield the findings about a file, or a single one if it cannot be read."""
    try:
        yield from (f"{name}: {one}" for one in check)
    except (OSError, ValueError, pa.ArrowException) as error:
        yield f"{name}: cannot be read ({error})"


def tar_tasks(
    index: Iterable[pa.Table], shards: Iterable[ShardEntry]
) -> Iterator[Task]:
    """Yield every tar with its rows. index: pieces of the index, whose rows are in that order."""
    pieces = iter(index)
    rows = INDEX_SCHEMA.empty_table()
    for shard in shards:
        # Row groups and tars end at different rows.
        while len(rows) < shard.samples and (piece := next(pieces, None)) is not None:
            rows = pa.concat_tables([rows, piece])
        samples = rows.slice(0, shard.samples).unify_dictionaries()
        rows = rows.slice(len(samples))
        # Copied: a pickled slice has the whole table.
        yield shard, samples.take(np.arange(len(samples)))


def _is_index(path: Path) -> bool:
    try:
        return bool(pq.read_schema(path).equals(INDEX_SCHEMA))
    except (OSError, pa.ArrowException):
        return False


def _batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield some columns of a table, some rows at a time: all would be 100 bytes a row.

    Rows that lack a value are left out.
    """
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            # One group at a time: a reader of several keeps the bytes of all that it has read.
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=[number], columns=columns
            ):
                yield pa.Table.from_batches([batch]).drop_null()


def _readable(pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows up to the first damage, which is a finding of its own."""
    with suppress(OSError, pa.ArrowException):
        yield from pieces


def _check_index(folder: Path, manifest: Manifest, *, is_index: bool) -> Iterator[str]:
    """Compare labels with the classes, and the samples with each split's fingerprint."""
    path = folder / INDEX_NAME
    if blake3_of_file(path) != manifest.index_blake3:
        yield "content differs from the manifest (BLAKE3)"
    if not is_index:
        yield "is no table, or has other columns than this version writes"
        return

    # Without classes every label is NO_LABEL.
    low, high = (0, len(manifest.classes)) if manifest.classes else (NO_LABEL, 0)
    labels = (piece["label"].to_numpy() for piece in _batches(path))
    num_wrong = sum(int(((some < low) | (some >= high)).sum()) for some in labels)
    if num_wrong:
        yield f"{num_wrong:,} labels are outside {low} to {high - 1:,}"

    names = (name for piece in _batches(path) for name in piece["shard"].to_pylist())
    counts = [(name, len(list(rows))) for name, rows in groupby(names)]
    tars = [(shard.name, shard.samples) for shard in shards_of(folder, manifest)]
    # Tars without samples have no rows.
    if counts != [(name, num) for name, num in tars if num]:
        yield "does not have the samples of the manifest's tars, in their order"
    for split, entry in manifest.splits.items():
        digest = hashlib.sha256()
        is_same = True
        with open(folder / positions_name(split), "rb") as positions:
            for piece in _batches(path):
                rows = piece.filter(pc.equal(piece["split"].cast(pa.string()), split))
                digest.update(sample_bytes(rows).tobytes())
                expected = records_of(rows, where=str(path)).tobytes()
                is_same &= positions.read(len(expected)) == expected
            is_same &= not positions.read(1)
        lengths = [shard.samples for shard in shards_of_split(folder, split, entry)]
        digest.update(np.array(lengths, "<i8").tobytes())
        if digest.hexdigest() != entry.fingerprint:
            yield f"samples of split {split!r} do not have the manifest's fingerprint"
        if not is_same:
            yield f"samples of split {split!r} do not have the places in {positions.name}"


def _check_stored(path: Path, stored: StoredFile) -> Iterator[str]:
    if blake3_of_file(path) != stored.blake3:
        yield "content differs from the manifest (BLAKE3)"


def check_tar(
    task: Task,
    *,
    folder: Path,
    root: Path,
    ours: bool,
    write_entry_points: bool = False,
) -> list[str]:
    """Compare one tar with the manifest and the index. Raises for no content of the file.

    ours: written by make_shards: an image and its label, if any, per sample; no other members.
    """
    shard, rows = task
    found: list[str] = []
    points: dict[int, bytes] = {}

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
            # One byte more shows what follows the end mark.
            if ours and file.read(len(END_MARK) + 1) != END_MARK:
                found.append("holds more than the samples of the index, or no end mark")
    except OSError as error:
        return [*found, f"cannot be read ({error.strerror})"]

    # Entry points of damaged images could be wrong.
    if write_entry_points and not found:
        place = entry_points.entry_points_file(folder, shard.name)
        if not place.parent.resolve().is_relative_to(folder.resolve()):
            return [f"its entry points were not written: a link leads out of {folder}"]
        entry_points.write_entry_points(place, points)
    return found


def _check_sample(
    file: BinaryIO, row: Mapping[str, Any], num_bytes: int, *, ours: bool
) -> tuple[str | None, bytes]:
    """(what is wrong with a sample of the index, its image). Leaves the file at its end."""
    if row["offset"] + row["length"] > num_bytes:
        return "lies outside the tar", b""
    before = b""
    after = b""
    if ours:
        label = None if row["label"] == NO_LABEL else row["label"]
        before, after = around_image(
            row["key"], extension=row["format"], num_bytes=row["length"], label=label
        )

    # Headers and padding are compared as well, so all bytes of the tar are.
    file.seek(max(0, row["offset"] - len(before)))
    stored = file.read(len(before) + row["length"] + len(after))
    image = stored[len(before) :][: row["length"]]
    if stored != before + image + after:
        return "has another name, size, place or label in the tar", image
    if blake3(image).digest() != row["blake3"]:
        return "the image's bytes differ from the index (BLAKE3)", image

    try:
        format = known_format(image)
        actual = (SUFFIXES.get(format), *open_image(image, format).size)
    except Rejected as error:
        return f"the image cannot be read ({error})", image
    expected = (row["format"], row["width"], row["height"])
    if actual != expected:
        return f"is {actual}, but the index says {expected}", image
    return None, image


def _check_ledger(
    folder: Path, manifest: Manifest, *, has_index: bool
) -> Iterator[str]:
    """Check that it has all inputs, and that those not rejected are the samples."""
    path = folder / LEDGER_NAME
    if pq.read_metadata(path).num_rows != manifest.inputs.get("num_rows"):
        yield "has other sums than the manifest"
    if not has_index:
        return
    # Both files have the samples of a split in their stored order.
    if _key_hashes(path, "status") != _key_hashes(folder / INDEX_NAME):
        yield "the inputs kept or repaired are not the samples of the index"


def _key_hashes(path: Path, *status: str) -> dict[str, bytes]:
    """Split -> hash of the keys of its samples. status: the column, if the file has it."""
    hashes: dict[str, blake3] = {}
    for rows in _batches(path, ["split", "key", *status]):
        for row in rows.to_pylist():
            # The index has no column `status`, and no rejected rows.
            if row.get("status") != "rejected":
                hashes.setdefault(row["split"], blake3()).update(
                    f"{row['key']}\0".encode()
                )
    return {split: found.digest() for split, found in hashes.items()}


def _check_info(folder: Path, manifest: Manifest) -> Iterator[str]:
    if json.loads((folder / INFO_NAME).read_text()) != info_of(folder, manifest):
        yield "is not what the manifest says"


def draw_sheet(path: Path, folder: Path, manifest: Manifest) -> None:
    """Draw the first samples of each class, one class per row; at most MAX_CLASSES, evenly."""
    table = pq.read_table(
        folder / INDEX_NAME, columns=["shard", "offset", "length", "label"]
    )
    labels = table.column("label").to_numpy()
    present = np.unique(labels)
    # Evenly over the labels, so that the last classes are seen, too.
    num_shown = min(MAX_CLASSES, len(present))
    shown_labels = present[np.linspace(0, len(present) - 1, num_shown).astype(int)]

    rows = []
    for label in shown_labels.tolist():
        positions = np.flatnonzero(labels == label)
        name = "no label" if label == NO_LABEL else f"{label} {manifest.classes[label]}"
        shown = table.take(positions[:PER_CLASS]).to_pylist()
        tars = tar_files(folder, manifest, [row["shard"] for row in shown])
        images = [
            image_of(row | {"file": tar}) for row, tar in zip(shown, tars, strict=True)
        ]
        rows.append((f"{name}: {len(positions):,}", images))
    draw_rows(path, rows)
