"""Compare a shard folder with its manifest: every file, every tar, every image.

Owns: checks of the index, info and the ledger, and the tasks for the tars.
Leaves out: checks of one tar (`tar_checks`), showing findings (`verify_shards`).

A tar is compared with its hash in the manifest, its members with the index, each image with its own
hash and its header. So damage is found, and so are errors made when the folder was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.labels.assignment import is_numbers
from data_prep.shards.fingerprints import sample_bytes, split_fingerprint
from data_prep.shards.index import folder_of_tars, info_of
from data_prep.shards.ledger import LEDGER_NAME
from data_prep.verification.tar_checks import Finding, TarTask, check_tar
from vitscale.data.index import INDEX_NAME, INFO_NAME, NO_LABEL, Manifest, index_schema
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.processes import ordered_results, workers_for
from vitscale.images.jpeg.entry_points import entry_points_file

if TYPE_CHECKING:
    import pyarrow as pa

STATUSES = ("kept", "repaired", "rejected")


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
    index, findings = _read_index(folder, manifest)
    findings += _check_info(folder, manifest)
    num_bytes = sum(entry.num_bytes for entry in manifest.splits.values())
    num_workers = workers_for(num_bytes, num_workers=num_workers)
    tasks = tar_tasks(folder, index, manifest=manifest, write_entry_points=write_entry_points)
    for task, found in ordered_results(check_tar, tasks, num_workers=num_workers):
        findings += found
        advance(task.entry.samples)
    if index is not None:
        findings += _check_index(index, manifest)
    return findings + _check_ledger(folder, manifest, index)


def _check_info(folder: Path, manifest: Manifest) -> list[Finding]:
    expected = json.loads(json.dumps(info_of(manifest.splits, shards_root=manifest.shards_root)))
    try:
        stored = json.loads((folder / INFO_NAME).read_text())
    except (OSError, ValueError) as error:
        return [Finding(INFO_NAME, f"cannot be read ({error})")]
    return [] if stored == expected else [Finding(INFO_NAME, "is not what the manifest says")]


def _read_index(folder: Path, manifest: Manifest) -> tuple[pa.Table | None, list[Finding]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, found = folder / INDEX_NAME, []
    try:
        if blake3_of_file(path) != manifest.index_blake3:
            found.append(Finding(INDEX_NAME, "content differs from the manifest (BLAKE3)"))
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        return None, [*found, Finding(INDEX_NAME, f"cannot be read ({error})")]
    if not table.schema.equals(index_schema()):
        found.append(Finding(INDEX_NAME, "has other columns than this version writes"))
        return None, found
    return table.drop_null().unify_dictionaries().combine_chunks(), found


def tar_tasks(
    folder: Path, index: pa.Table | None, *, manifest: Manifest, write_entry_points: bool = False
) -> Iterator[TarTask]:
    """Yield a task per tar. index: of all tars; None if it cannot be read."""
    ours = manifest.shards_root == "."
    root = folder_of_tars(folder, manifest)
    rows_of = {} if index is None else _rows_of_tars(index)
    for split, entry in manifest.splits.items():
        for shard in entry.shards:
            rows = None
            if index is not None:
                rows = rows_of.get((split, shard.name), index.slice(0, 0))
            yield TarTask(
                path=root / shard.name,
                entry=shard,
                rows=rows,
                ours=ours,
                labels_stored=ours or stores_labels(manifest),
                entry_points=entry_points_file(folder, shard.name),
                write_entry_points=write_entry_points,
            )


def _rows_of_tars(index: pa.Table) -> dict[tuple[str, str], pa.Table]:
    """(split, tar) -> its rows, which are neighbours."""
    if not len(index):
        return {}
    columns = [index.column(name).combine_chunks() for name in ("split", "shard")]
    codes = [column.indices.to_numpy() for column in columns]
    changes = np.any([np.diff(code) != 0 for code in codes], axis=0)
    starts = np.r_[0, 1 + np.flatnonzero(changes), len(index)].tolist()
    return {
        (columns[0][start].as_py(), columns[1][start].as_py()): index.slice(start, stop - start)
        for start, stop in zip(starts, starts[1:], strict=False)
    }


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


def _check_index(index: pa.Table, manifest: Manifest) -> list[Finding]:
    """Compare labels with the classes, and the samples with each split's fingerprint."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = []
    labels = index.column("label").to_numpy()
    low, high = (0, len(manifest.classes)) if manifest.classes else (NO_LABEL, 0)
    if wrong := int(np.count_nonzero((labels < low) | (labels >= high))):
        found.append(f"{wrong:,} labels are outside {low} to {high - 1:,}")
    splits = index.column("split").cast(pa.string())
    for split, entry in manifest.splits.items():
        rows = index.filter(pc.equal(splits, split))
        lengths = entry.shard_lengths
        if split_fingerprint([sample_bytes(rows)], shard_lengths=lengths) != entry.fingerprint:
            found.append(f"samples of split {split!r} do not have the manifest's fingerprint")
    return [Finding(INDEX_NAME, what) for what in found]


def _check_ledger(folder: Path, manifest: Manifest, index: pa.Table | None) -> list[Finding]:
    """inputs = kept + repaired + rejected, and the inputs kept or repaired are the samples."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        columns = ["split", "status", "reason", "key"]
        ledger = pq.read_table(folder / LEDGER_NAME, columns=columns)
        names = [ledger.column(name).cast(pa.string()) for name in columns]
    except (OSError, pa.ArrowException) as error:
        return [Finding(LEDGER_NAME, f"cannot be read ({error})")]
    found = []
    split, status, reason, key = names
    if unknown := len(ledger) - (pc.sum(pc.is_in(status, pa.array(STATUSES))).as_py() or 0):
        found.append(f"{unknown:,} rows have another status than {STATUSES}")
    is_rejected = pc.equal(status, "rejected")
    if unexplained := pc.sum(pc.and_(is_rejected, pc.is_null(reason))).as_py():
        found.append(f"{unexplained:,} rejected inputs without a reason")
    if len(ledger) != manifest.inputs.get("num_rows"):
        found.append("has other sums than the manifest")
    if index is not None:
        kept = pc.binary_join_element_wise(split, key, "\0").filter(pc.invert(is_rejected))
        samples = [index.column(name).cast(pa.string()) for name in ("split", "key")]
        stored = pc.binary_join_element_wise(*samples, "\0")
        if _sorted(kept) != _sorted(stored):
            found.append("the inputs kept or repaired are not the samples of the index")
    return [Finding(LEDGER_NAME, what) for what in found]


def _sorted(texts: pa.ChunkedArray) -> pa.Array:
    import pyarrow.compute as pc

    in_order: pa.Array = texts.take(pc.sort_indices(texts)).combine_chunks()
    return in_order
