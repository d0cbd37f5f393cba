"""Whether a shard folder is what its manifest says: every file, every tar, every image.

Owns: the checks and what each finds.
Leaves out: showing what is found (`verify_shards`, `shard_report`), walking a tar
(`sources.tar_walk`).

The checks do not build on each other. A tar is compared with its hash in the manifest, its members
with the index, each image with its own hash and its header: damage is found more than once, and
what was written wrongly in the first place is found too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from blake3 import blake3

from data_prep.images.check import SUFFIXES
from data_prep.images.header import HeaderError, read_header
from data_prep.labels.assignment import is_numbers
from data_prep.shards.fingerprints import folder_fingerprint, label_map_sha256, sample_bytes
from data_prep.shards.index import folder_of_tars, info_of
from data_prep.shards.ledger import LEDGER_NAME
from data_prep.sources.tar_walk import TarDefect, TarMember, walk_tar
from vitscale.data.index import (
    INDEX_NAME,
    INFO_NAME,
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    SplitEntry,
    index_schema,
)
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.processes import ordered_results, workers_for

if TYPE_CHECKING:
    import pyarrow as pa

STATUSES = ("kept", "repaired", "rejected")
CHUNK_BYTES = 1 << 20
BATCH_ROWS = 1 << 15
MAX_LABEL_BYTES = 32
# A broken tar of ten thousand samples would otherwise fill the screen; the rest is counted.
MAX_FINDINGS_PER_TAR = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TarTask:
    """One tar and what should be in it."""

    path: Path
    entry: ShardEntry
    rows: pa.Table | None
    """Rows of the index; None: it has none that can be read."""
    ours: bool
    """Written by make_shards: an image and a label per sample, and nothing else."""
    labels_stored: bool
    """Whether KEY.cls holds the label of the index."""


def check_folder(
    folder: Path,
    *,
    manifest: Manifest,
    num_workers: int | None,
    advance: Callable[[int], None],
) -> list[Finding]:
    """Everything found wrong; empty for a sound folder. Raises UserError for tars behind a URL."""
    findings = check_manifest(manifest)
    findings += _check_info(folder, manifest)
    findings += _check_whole_index(folder, manifest)
    index_rows = RowSum()
    num_bytes = sum(entry.num_bytes for entry in manifest.splits.values())
    num_workers = workers_for(num_bytes, num_workers=num_workers)
    notes: list[Finding] = []
    tasks = tar_tasks(folder, manifest=manifest, sums=index_rows, notes=notes)
    for task, found in ordered_results(check_tar, tasks, num_workers=num_workers):
        findings += found
        advance(task.entry.samples)
    findings += notes
    return findings + _check_ledger(folder, manifest, index_rows)


def check_manifest(manifest: Manifest) -> list[Finding]:
    """The manifest against itself."""
    wrong = []
    if manifest.label_map_sha256 != label_map_sha256(manifest.classes):
        wrong.append("label_map_sha256 is not that of the classes")
    if manifest.fingerprint != folder_fingerprint(manifest.splits, classes=manifest.classes):
        wrong.append("fingerprint is not that of the splits and classes")
    for name, entry in manifest.splits.items():
        if entry.num_samples != sum(entry.shard_lengths):
            wrong.append(f"num_samples of split {name!r} is not the sum over its tars")
        if entry.num_bytes != sum(shard.bytes for shard in entry.shards):
            wrong.append(f"num_bytes of split {name!r} is not the sum over its tars")
    return [Finding(MANIFEST_NAME, what) for what in wrong]


def _check_info(folder: Path, manifest: Manifest) -> list[Finding]:
    expected = json.loads(json.dumps(info_of(manifest.splits, shards_root=manifest.shards_root)))
    try:
        stored = json.loads((folder / INFO_NAME).read_text())
    except (OSError, ValueError) as error:
        return [Finding(INFO_NAME, f"cannot be read ({error})")]
    return [] if stored == expected else [Finding(INFO_NAME, "is not what the manifest says")]


def _check_whole_index(folder: Path, manifest: Manifest) -> list[Finding]:
    path = folder / INDEX_NAME
    try:
        num_bytes, content = path.stat().st_size, blake3_of_file(path)
    except OSError as error:
        return [Finding(INDEX_NAME, f"cannot be read ({error.strerror})")]
    if num_bytes != manifest.index_bytes:
        what = f"{num_bytes:,} bytes, but the manifest says {manifest.index_bytes:,}"
        return [Finding(INDEX_NAME, what)]
    if content != manifest.index_blake3:
        return [Finding(INDEX_NAME, "content differs from the manifest (BLAKE3)")]
    return []


@dataclass(slots=True)
class RowSum:
    """A number that two sets of (split, key) share only if they are equal; in any order."""

    count: int = 0
    total: int = 0

    def add(self, splits: list[str], keys: list[str | None]) -> None:
        self.count += len(keys)
        for split, key in zip(splits, keys, strict=True):
            name = f"{split}\0{key}".encode("utf-8", "surrogatepass")
            self.total += int.from_bytes(sha256(name).digest()[:16], "little")
        self.total %= 1 << 128


@dataclass(slots=True)
class SplitSum:
    """A split's fingerprint, row by row as `split_fingerprint` defines it."""

    digest: Any = field(default_factory=sha256)

    def add(self, rows: pa.Table) -> None:
        self.digest.update(sample_bytes(rows).tobytes())

    def value(self, entry: SplitEntry) -> str:
        self.digest.update(b"".join(int(n).to_bytes(8, "little") for n in entry.shard_lengths))
        return str(self.digest.hexdigest())


def tar_tasks(
    folder: Path,
    *,
    manifest: Manifest,
    sums: RowSum | None = None,
    notes: list[Finding] | None = None,
) -> Iterator[TarTask]:
    """A task per tar, holding few rows at a time.

    What the index itself gets wrong is added to `notes`, its samples to `sums`. A tar that the
    index does not speak of gets its task at the end.
    """
    sums, notes = RowSum() if sums is None else sums, [] if notes is None else notes
    ours = manifest.shards_root == "."
    labels_stored = ours or stores_labels(manifest)
    root = folder_of_tars(folder, manifest)

    def task(entry: ShardEntry, rows: pa.Table | None) -> TarTask:
        path = root / entry.name
        return TarTask(path=path, entry=entry, rows=rows, ours=ours, labels_stored=labels_stored)

    waiting = {
        (split, shard.name): shard
        for split, entry in manifest.splits.items()
        for shard in entry.shards
    }
    order = {split: [s.name for s in entry.shards] for split, entry in manifest.splits.items()}
    seen: dict[str, list[str]] = {split: [] for split in manifest.splits}
    fingerprints = {split: SplitSum() for split in manifest.splits}
    for split, shard, rows in _index_by_tar(folder, notes):
        tar = waiting.pop((split, shard), None)
        if tar is None:
            known = split in order and shard in order[split]
            what = "rows are not neighbours" if known else "not in the manifest"
            notes.append(Finding(INDEX_NAME, f"tar {shard!r} of split {split!r}: {what}"))
            continue
        seen[split].append(shard)
        notes += _check_labels(rows, manifest, shard)
        sums.add([split] * len(rows), rows.column("key").to_pylist())
        fingerprints[split].add(rows)
        yield task(tar, rows)
    for (split, shard), tar in waiting.items():
        notes.append(Finding(INDEX_NAME, f"has no rows of tar {shard!r} of split {split!r}"))
        yield task(tar, None)
    for split, entry in manifest.splits.items():
        if len(seen[split]) == len(order[split]) and seen[split] != order[split]:
            notes.append(Finding(INDEX_NAME, f"tars of split {split!r} are in another order"))
        elif fingerprints[split].value(entry) != entry.fingerprint:
            what = f"samples of split {split!r} do not have the manifest's fingerprint"
            notes.append(Finding(INDEX_NAME, what))


def stores_labels(manifest: Manifest) -> bool:
    """Whether the labels of an index of external tars are the numbers in their KEY.cls."""
    try:
        source, labels = manifest.config["source"], manifest.config["labels"]
        by_number = labels["space"] is None or labels["values"] == "index"
        plain = source["label"] in ("cls", "label") and labels["map"] is None and by_number
    except (KeyError, TypeError):
        return False
    if not plain:
        return False
    return bool(labels["values"] == "index") or is_numbers(manifest.classes)


def _index_by_tar(folder: Path, notes: list[Finding]) -> Iterator[tuple[str, str, pa.Table]]:
    """(split, tar, its rows), reading a batch at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    held: list[pa.Table] = []
    held_name: tuple[str, str] | None = None
    try:
        with pq.ParquetFile(folder / INDEX_NAME) as file:
            if not file.schema_arrow.equals(index_schema()):
                notes.append(Finding(INDEX_NAME, "has other columns than this version writes"))
                return
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                table = _without_gaps(pa.Table.from_batches([batch]), notes)
                for name, part in _runs(table):
                    if name != held_name and held_name is not None:
                        yield *held_name, pa.concat_tables(held).combine_chunks()
                        held = []
                    held_name = name
                    held.append(part)
    except (OSError, pa.ArrowException) as error:
        notes.append(Finding(INDEX_NAME, f"cannot be read to its end ({error})"))
        return
    if held_name is not None:
        yield *held_name, pa.concat_tables(held).combine_chunks()


def _without_gaps(table: pa.Table, notes: list[Finding]) -> pa.Table:
    whole = table.drop_null()
    if len(whole) < len(table):
        notes.append(Finding(INDEX_NAME, f"has {len(table) - len(whole):,} rows without a value"))
    return whole


def _runs(table: pa.Table) -> Iterator[tuple[tuple[str, str], pa.Table]]:
    """Neighbouring rows of one split and tar."""
    splits, shards = (table.column(name).to_pylist() for name in ("split", "shard"))
    start = 0
    for i in range(1, len(table) + 1):
        if i == len(table) or (splits[i], shards[i]) != (splits[start], shards[start]):
            yield (splits[start], shards[start]), table.slice(start, i - start)
            start = i


def _check_labels(rows: pa.Table, manifest: Manifest, shard: str) -> list[Finding]:
    labels = rows.column("label").to_numpy()
    wrong = int(np.count_nonzero((labels < 0) | (labels >= len(manifest.classes))))
    if not wrong:
        return []
    what = f"{wrong:,} labels in tar {shard!r} are outside 0 to {len(manifest.classes) - 1:,}"
    return [Finding(INDEX_NAME, what)]


def check_tar(task: TarTask) -> list[Finding]:
    """One tar against the manifest and the index. Raises nothing for what the file holds."""
    found: list[str] = []
    try:
        with open(task.path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != task.entry.bytes:
                found.append(f"{num_bytes:,} bytes, but the manifest says {task.entry.bytes:,}")
            defect = _check_members(file, task, found)
            num_found = len(found)
            found += _check_content(file, task, num_bytes)
            # A foreign tar that was damaged when it was indexed is still what was indexed.
            if defect is not None and (task.ours or len(found) > num_found):
                found.append(str(defect))
    except OSError as error:
        found.append(f"cannot be read ({error.strerror})")
    shown = [Finding(task.entry.name, what) for what in found[:MAX_FINDINGS_PER_TAR]]
    if len(found) > len(shown):
        more = f"{len(found) - len(shown):,} more findings in this tar"
        shown.append(Finding(task.entry.name, more))
    return shown


def _check_content(file: BinaryIO, task: TarTask, num_bytes: int) -> list[str]:
    """Every byte once: each image's hash and header, and the hash of the whole tar."""
    found = []
    whole = blake3()
    position = 0
    for row in _by_offset(task.rows):
        start, end = row["offset"], row["offset"] + row["length"]
        if not position <= start < end <= num_bytes:
            found.append(f"sample {row['key']!r}: bytes {start:,} to {end:,} are not there")
            continue
        position = _hash_to(file, start, position, whole)
        image = file.read(row["length"])
        whole.update(image)
        position += len(image)
        wrong = _image_problem(image, row)
        if wrong:
            found.append(f"sample {row['key']!r}: {wrong}")
    _hash_to(file, num_bytes, position, whole)
    if whole.hexdigest() != task.entry.blake3:
        found.insert(0, "content differs from the manifest (BLAKE3)")
    return found


def _by_offset(rows: pa.Table | None) -> list[dict[str, Any]]:
    if rows is None:
        return []
    columns = ["key", "offset", "length", "format", "label", "width", "height", "blake3"]
    return sorted(rows.select(columns).to_pylist(), key=lambda row: row["offset"])


def _hash_to(file: BinaryIO, end: int, position: int, digest: Any) -> int:
    """Read and hash from `position` to `end`; returns where the file stands."""
    file.seek(position)
    while position < end and (chunk := file.read(min(CHUNK_BYTES, end - position))):
        digest.update(chunk)
        position += len(chunk)
    return position


def _image_problem(image: bytes, row: dict[str, Any]) -> str | None:
    if blake3(image).digest() != row["blake3"]:
        return "the image's bytes differ from the index (BLAKE3)"
    try:
        header = read_header(image)
    except HeaderError as error:
        return f"the image cannot be read ({error.reason})"
    if SUFFIXES[header.format] != row["format"]:
        return f"is {SUFFIXES[header.format]}, but the index says {row['format']}"
    size, expected = (header.width, header.height), (row["width"], row["height"])
    if size != expected and not (header.orientation >= 5 and size == expected[::-1]):
        return f"is {size[0]} x {size[1]}, but the index says {expected[0]} x {expected[1]}"
    return None


def _check_members(file: BinaryIO, task: TarTask, found: list[str]) -> TarDefect | None:
    """The tar's members against the index: names, places, labels. Adds to `found`."""
    defect = None
    rows = {row["offset"]: row for row in _by_offset(task.rows)}
    num_rows = 0 if task.rows is None else len(task.rows)
    if task.rows is not None and num_rows != task.entry.samples:
        found.append(f"the index has {num_rows:,} samples, the manifest {task.entry.samples:,}")
    if len(rows) != num_rows:
        found.append("the index has two samples at one place")
    try:
        label_of = {f"{row['key']}.cls": row["label"] for row in rows.values()}
        for member in walk_tar(file.fileno(), end=os.fstat(file.fileno()).st_size):
            row = rows.pop(member.offset, None)
            if row is not None:
                if member.num_bytes != row["length"] or not _names(member.name, row, task.ours):
                    found.append(f"sample {row['key']!r}: is {member.name!r} in the tar")
            elif member.name in label_of:
                found += _label_problem(file, member, label_of.pop(member.name), task)
            elif task.ours and task.rows is not None:
                found.append(f"member {member.name!r} is not in the index")
        if task.ours:
            found += [f"{name!r} is missing" for name in label_of]
    except TarDefect as error:
        defect = error
    found += [f"sample {row['key']!r}: no member at {offset:,}" for offset, row in rows.items()]
    return defect


def _names(name: str, row: dict[str, Any], ours: bool) -> bool:
    if ours:
        return name == f"{row['key']}.{row['format']}"
    return name.startswith(row["key"] + ".")


def _label_problem(file: BinaryIO, member: TarMember, label: int, task: TarTask) -> list[str]:
    if not task.labels_stored:
        return []
    stored = os.pread(file.fileno(), min(member.num_bytes, MAX_LABEL_BYTES), member.offset)
    expected = str(label).encode()
    if (stored if task.ours else stored.strip()) == expected:
        return []
    return [f"{member.name!r} holds {stored!r}, but the index says {label}"]


def _check_ledger(folder: Path, manifest: Manifest, index_rows: RowSum) -> list[Finding]:
    """inputs = kept + repaired + rejected, and every kept input is a sample."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    counts = dict.fromkeys(STATUSES, 0)
    kept, found = RowSum(), []
    unexplained = 0
    try:
        with pq.ParquetFile(folder / LEDGER_NAME) as file:
            columns = ["split", "status", "reason", "key"]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                rows = [r for r in batch.to_pylist() if r["status"] != "rejected"]
                kept.add([r["split"] for r in rows], [r["key"] for r in rows])
                for row in batch.to_pylist():
                    counts[row["status"]] = counts.get(row["status"], 0) + 1
                    unexplained += row["status"] == "rejected" and not row["reason"]
    except (OSError, KeyError, pa.ArrowException) as error:
        return [Finding(LEDGER_NAME, f"cannot be read ({error})")]
    unknown = {status: num for status, num in counts.items() if status not in STATUSES}
    if unknown:
        found.append(f"{sum(unknown.values()):,} rows have another status than {STATUSES}")
    if unexplained:
        found.append(f"{unexplained:,} rejected inputs without a reason")
    if sum(counts.values()) != manifest.inputs.get("num_rows"):
        found.append("has other sums than the manifest")
    num_samples = sum(entry.num_samples for entry in manifest.splits.values())
    if kept.count != num_samples:
        found.append(f"{kept.count:,} inputs kept or repaired, but {num_samples:,} samples")
    elif kept != index_rows:
        found.append("the inputs kept or repaired are not the samples of the index")
    return [Finding(LEDGER_NAME, what) for what in found]
