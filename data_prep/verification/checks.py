"""Compare a shard folder with its manifest: every file, every tar, every image.

Owns: checks of the manifest, the index, info and the ledger, and the tasks for the tars.
Leaves out: checks of one tar (`tar_checks`), showing findings (`verify_shards`).

The checks are independent. A tar is compared with its hash in the manifest, its members with the
index, each image with its own hash and its header. So damage is found more than once, and errors
made when the folder was written are found too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.labels.assignment import is_numbers
from data_prep.shards.fingerprints import folder_fingerprint, label_map_sha256, sample_bytes
from data_prep.shards.index import folder_of_tars, info_of
from data_prep.shards.ledger import LEDGER_NAME
from data_prep.verification.tar_checks import Finding, TarTask, check_tar
from vitscale.data.index import (
    INDEX_NAME,
    INFO_NAME,
    MANIFEST_NAME,
    NO_LABEL,
    Manifest,
    ShardEntry,
    SplitEntry,
    index_schema,
)
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.processes import ordered_results, workers_for
from vitscale.images.jpeg.entry_points import entry_points_file

if TYPE_CHECKING:
    import pyarrow as pa

STATUSES = ("kept", "repaired", "rejected")
BATCH_ROWS = 1 << 15


def check_folder(
    folder: Path,
    *,
    manifest: Manifest,
    num_workers: int | None,
    advance: Callable[[int], None],
    write_entry_points: bool = False,
) -> list[Finding]:
    """All findings; empty for a valid folder. Raises UserError for tars at a URL.

    write_entry_points: of the images of each tar without a finding.
    """
    findings = check_manifest(manifest)
    findings += _check_info(folder, manifest)
    findings += _check_whole_index(folder, manifest)
    index_rows = RowSum()
    num_bytes = sum(entry.num_bytes for entry in manifest.splits.values())
    num_workers = workers_for(num_bytes, num_workers=num_workers)
    notes: list[Finding] = []
    tasks = (
        replace(task, write_entry_points=write_entry_points)
        for task in tar_tasks(folder, manifest=manifest, sums=index_rows, notes=notes)
    )
    for task, found in ordered_results(check_tar, tasks, num_workers=num_workers):
        findings += found
        advance(task.entry.samples)
    findings += notes
    return findings + _check_ledger(folder, manifest, index_rows)


def check_manifest(manifest: Manifest) -> list[Finding]:
    """Compare the manifest with itself."""
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
    """A sum over (split, key), independent of their order: equal only for equal sets."""

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
    """Yield a task per tar, holding few rows at a time.

    Findings about the index are added to `notes`, its samples to `sums`. Tars without rows in the
    index come last.
    """
    sums, notes = RowSum() if sums is None else sums, [] if notes is None else notes
    ours = manifest.shards_root == "."
    labels_stored = ours or stores_labels(manifest)
    root = folder_of_tars(folder, manifest)

    def task(entry: ShardEntry, rows: pa.Table | None) -> TarTask:
        path = root / entry.name
        return TarTask(
            path=path,
            entry=entry,
            rows=rows,
            ours=ours,
            labels_stored=labels_stored,
            entry_points=entry_points_file(folder, entry.name),
        )

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
            what = "rows are not adjacent" if known else "not in the manifest"
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
                table = _without_nulls(pa.Table.from_batches([batch]), notes)
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


def _without_nulls(table: pa.Table, notes: list[Finding]) -> pa.Table:
    whole = table.drop_null()
    if len(whole) < len(table):
        notes.append(Finding(INDEX_NAME, f"has {len(table) - len(whole):,} rows without a value"))
    return whole


def _runs(table: pa.Table) -> Iterator[tuple[tuple[str, str], pa.Table]]:
    """Adjacent rows of one split and tar."""
    splits, shards = (table.column(name).to_pylist() for name in ("split", "shard"))
    start = 0
    for i in range(1, len(table) + 1):
        if i == len(table) or (splits[i], shards[i]) != (splits[start], shards[start]):
            yield (splits[start], shards[start]), table.slice(start, i - start)
            start = i


def _check_labels(rows: pa.Table, manifest: Manifest, shard: str) -> list[Finding]:
    labels = rows.column("label").to_numpy()
    if not manifest.classes:
        wrong = int(np.count_nonzero(labels != NO_LABEL))
        what = f"{wrong:,} labels in tar {shard!r}, but the manifest names no classes"
        return [Finding(INDEX_NAME, what)] if wrong else []
    wrong = int(np.count_nonzero((labels < 0) | (labels >= len(manifest.classes))))
    if not wrong:
        return []
    what = f"{wrong:,} labels in tar {shard!r} are outside 0 to {len(manifest.classes) - 1:,}"
    return [Finding(INDEX_NAME, what)]


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
