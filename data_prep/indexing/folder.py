"""Write the index folder of external tars: index, info, ledger and manifest, but no tars.

Owns: labels over all tars, the order of rows, and the path of the tars in the manifest.
Leaves out: the content of a tar (`tars`), columns (`vitscale.data.index`, `shards.ledger`).
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.indexing.tars import TarResult, TarUnit
from data_prep.labels.assignment import load_labels
from data_prep.pipeline.row_tables import read_table
from data_prep.pipeline.workspace import tool_version
from data_prep.shards.fingerprints import (
    folder_fingerprint,
    label_map_sha256,
    sample_bytes,
    split_fingerprint,
)
from data_prep.shards.index import write_index, write_info, write_manifest
from data_prep.shards.ledger import (
    LedgerWriter,
)
from vitscale.config.errors import UserError
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    NO_LABEL,
    Manifest,
    ShardEntry,
    SplitEntry,
    index_schema,
)
from vitscale.data.order import check_mixed
from vitscale.data.urls import Location, Url
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.runs.data_prep import DataPrepRun

TRAIN = "train"
Tars = Sequence[tuple[TarUnit, TarResult]]


@dataclass(slots=True)
class IndexedTars:
    """All tars in order. Class counts are summed; kept per tar, they would fill the memory."""

    tars: list[tuple[TarUnit, TarResult]] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, unit: TarUnit, result: TarResult) -> None:
        self.classes.update(result.classes)
        self.unknown.update(result.unknown)
        self.tars.append((unit, replace(result, classes={}, unknown={})))


def write_index_folder(
    folder: Path,
    *,
    run: DataPrepRun,
    config: dict[str, Any],
    indexed: IndexedTars,
    shards_root: str,
) -> Manifest:
    """Write all files of the index folder. `config`: `content_config` from the start of the run.

    Raises UserError for classes outside the label space, too many bad images, or no samples.
    """
    tars, found = indexed.tars, indexed.classes
    labels = load_labels(run.labels)
    labels.check(indexed.unknown, found=found)
    with LedgerWriter(folder) as ledger:
        source = _write_ledger(ledger, tars)
    ledger.check_bad_fraction(run.images.max_bad_fraction)
    if not found:
        raise UserError(f"{run.source.path!r} contains no usable samples", where="source.path")
    classes = labels.label_map(found, keep_numbers=True)
    of_split: dict[str, list[tuple[TarUnit, TarResult]]] = {}
    for unit, result in sorted(tars, key=lambda pair: pair[0].container.split):
        if result.num_kept:
            of_split.setdefault(unit.container.split, []).append((unit, result))
    write_index(
        folder,
        tables=(_index_rows(unit, classes) for tars in of_split.values() for unit, _ in tars),
    )
    splits = {split: _split_entry(tars, classes) for split, tars in of_split.items()}
    if TRAIN in splits:
        rows = pq.read_table(
            folder / INDEX_NAME, columns=["label"], filters=[("split", "==", TRAIN)]
        )
        lengths = splits[TRAIN].shard_lengths
        check_mixed(rows["label"].to_numpy(), shard_lengths=lengths, where="source.path")
    write_info(folder, splits=splits, shards_root=shards_root)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version=tool_version(),
        fingerprint=folder_fingerprint(splits, classes=classes),
        source_fingerprint=source,
        label_map_sha256=label_map_sha256(classes),
        classes=classes,
        index_bytes=(folder / INDEX_NAME).stat().st_size,
        index_blake3=blake3_of_file(folder / INDEX_NAME),
        splits=splits,
        inputs=ledger.as_json(),
        config=config,
        shards_root=shards_root,
    )
    write_manifest(folder, manifest=manifest)
    return manifest


def _write_ledger(ledger: LedgerWriter, tars: Tars) -> str:
    """Write one row per input, tar after tar; returns a hash of all of them."""
    digest = hashlib.sha256()
    for unit, _ in tars:
        rows = read_table(unit.table_path)
        columns = {name: rows.column(name).to_pylist() for name in rows.column_names}
        kept = [reason is None for reason in columns["reason"]]
        keys = [key if ok else None for key, ok in zip(columns["key"], kept, strict=True)]
        fixed = {"split": [unit.container.split] * len(rows), "key": keys}
        names = ("path", "class", "reason", "detail", "blake3")
        ledger.add({name: columns[name] for name in names} | fixed, [None] * len(rows))
        for path, content, reason in zip(
            columns["path"], columns["blake3"], columns["reason"], strict=True
        ):
            name = f"{unit.container.split}\0{path}\0{reason or 'kept'}\0".encode()
            digest.update(name + (content or b"-"))
    return digest.hexdigest()


def root_of_tars(tars: Location, *, output: Path) -> str:
    """The path or URL of the tars' folder in the manifest.

    Relative if one folder contains tars and output, so that both can be moved; else absolute.
    """
    if isinstance(tars, Url):
        return str(tars)
    real, parent = tars.resolve(), output.resolve().parent
    if real.is_relative_to(parent):
        return os.path.relpath(real, parent / output.name)
    return str(real)


def _split_entry(tars: Tars, classes: Sequence[str]) -> SplitEntry:
    shards = tuple(
        ShardEntry(
            name=unit.container.path,
            samples=result.num_kept,
            bytes=result.num_bytes,
            blake3=result.blake3,
        )
        for unit, result in tars
    )
    lengths = [shard.samples for shard in shards]
    content = (sample_bytes(_index_rows(unit, classes)) for unit, _ in tars)
    return SplitEntry(
        num_samples=sum(lengths),
        num_bytes=sum(shard.bytes for shard in shards),
        fingerprint=split_fingerprint(content, shard_lengths=lengths),
        shards=shards,
    )


def _index_rows(unit: TarUnit, classes: Sequence[str]) -> pa.Table:
    """The rows of one tar that become samples, in tar order."""
    table = read_table(unit.table_path)
    rows = table.filter(pc.is_null(table.column("reason"))).sort_by("offset")
    labels = pa.array([NO_LABEL] * len(rows), pa.int32())
    if classes:
        labels = pc.index_in(rows.column("class"), value_set=pa.array(classes, pa.string()))
    made = {
        "split": pa.array([unit.container.split] * len(rows), pa.string()),
        "shard": pa.array([unit.container.path] * len(rows), pa.string()),
        "label": labels,
    }
    names = index_schema().names
    columns = [made[name] if name in made else rows.column(name) for name in names]
    return pa.table(columns, names=names).cast(index_schema())
