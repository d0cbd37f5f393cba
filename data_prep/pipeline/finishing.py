"""Finish a preparation: from written shards to a committed folder.

Owns: index, info, ledger and manifest over all shards, and the rename that makes them one folder.
Leaves out: their formats (`vitscale.data.index`, `shards.ledger`).

Everything is streamed, bucket by bucket and shard by shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from data_prep.pipeline.listing import bucket_path, num_inputs
from data_prep.pipeline.planning import SplitPlan, assignments_path, read_plan
from data_prep.pipeline.row_tables import read_table
from data_prep.pipeline.shard_writing import outcome_path, shard_path
from data_prep.pipeline.workspace import (
    SETTINGS_NAME,
    Preparation,
    content_config,
    tool_version,
    unchanged_config,
)
from data_prep.shards.fingerprints import (
    folder_fingerprint,
    label_map_sha256,
    sample_bytes,
    split_fingerprint,
)
from data_prep.shards.index import write_card, write_index, write_info, write_manifest
from data_prep.shards.ledger import (
    LedgerWriter,
    describe_rejected,
)
from data_prep.sources.outages import Interrupted
from vitscale.config.errors import UserError
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    Manifest,
    ShardEntry,
    SplitEntry,
    index_schema,
)
from vitscale.distributed.atomic_files import (
    blake3_of_file,
    commit_folder,
    fsync_folder,
)

CLASSES_SHOWN = 10


def side_file_units(p: Preparation) -> list[str]:
    return ["ledger", "index"]


def write_side_file(p: Preparation, unit: str) -> None:
    """Write the ledger or the index: each needs all rows, neither needs the other."""
    plans = read_plan(p)
    if unit == "ledger":
        with _side_files(p) as folder, LedgerWriter(folder) as ledger:
            source = _write_ledger_rows(p, ledger, plans)
        _check_corpus(p, ledger)
        p.put_result(unit, {"source": source, "inputs": ledger.as_json()})
        return
    names = {split: _final_names(p, split, plan) for split, plan in plans.items()}
    formats: set[str] = set()

    def tables() -> Iterator[pa.Table]:
        for split in sorted(names):
            for number, name in names[split].items():
                table = _index_rows(p, split, number, name)
                formats.update(table.column("format").unique().to_pylist())
                yield table

    with _side_files(p) as folder:
        write_index(folder, tables=tables())
    fingerprints = {split: _fingerprint(p, split, names[split]) for split in names}
    digest = blake3_of_file(p.path("final") / INDEX_NAME)
    known = {"blake3": digest, "fingerprints": fingerprints, "formats": sorted(formats)}
    p.put_result(unit, known)


@contextmanager
def _side_files(p: Preparation) -> Iterator[Path]:
    """A folder of this process; its files are moved to the finished ones at the end."""
    folder, final = p.work.temporary("final"), p.path("final")
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        os.replace(path, final / path.name)
    fsync_folder(final)


def finish(p: Preparation, unit: str) -> None:
    """Write info, card and manifest, and commit the folder."""
    config = _unchanged_config(p)
    final = p.path("final")
    names = {split: _final_names(p, split, plan) for split, plan in read_plan(p).items()}
    ledger, index = p.result("ledger"), p.result("index")
    entries = {
        split: _split_entry(p, split, names[split], fingerprint=index["fingerprints"][split])
        for split in sorted(names)
    }
    classes = tuple(p.result("selection")["classes"])
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version=tool_version(),
        fingerprint=folder_fingerprint(entries, classes=classes),
        source_fingerprint=ledger["source"],
        label_map_sha256=label_map_sha256(classes),
        classes=classes,
        index_bytes=(final / INDEX_NAME).stat().st_size,
        index_blake3=index["blake3"],
        splits=entries,
        inputs=ledger["inputs"],
        config=config,
    )
    with _side_files(p) as folder:
        write_info(folder, splits=entries)
        write_card(folder, splits=entries, classes=classes, formats=index["formats"])
        write_manifest(folder, manifest=manifest)
    _commit(p, final, names, entries)


def _unchanged_config(p: Preparation) -> dict[str, Any]:
    """The settings, with hashes of their files. Raises UserError if those have changed."""
    begun = p.path(SETTINGS_NAME)
    if not begun.exists():
        return content_config(p.run)
    return unchanged_config(json.loads(begun.read_text()), p.run)


def _final_names(p: Preparation, split: str, plan: SplitPlan) -> dict[int, str]:
    """Planned number -> file name; shards without any accepted image are left out."""
    names: dict[int, str] = {}
    for number in range(len(plan.shard_lengths)):
        if p.result(f"shard-{split}-{number:06d}")["samples"]:
            names[number] = f"{split}-{len(names):06d}.tar"
    return names


class _Outcomes:
    """The outcomes of the images of one split, in stored order, read shard by shard."""

    def __init__(self, p: Preparation, split: str, plan: SplitPlan) -> None:
        paths = [outcome_path(p, split, number) for number in range(len(plan.shard_lengths))]
        self._tables: Iterator[pa.Table] = map(read_table, paths)
        self._rest: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any]:
        while not self._rest:
            columns = ["reason", "changes", "input_hash", "key"]
            self._rest = next(self._tables).select(columns).to_pylist()[::-1]
        return self._rest.pop()


def _write_ledger_rows(p: Preparation, ledger: LedgerWriter, plans: dict[str, SplitPlan]) -> str:
    """One row per input in seeded order; returns the hash over all of it."""
    outcomes = {split: _Outcomes(p, split, plan) for split, plan in plans.items()}
    digest = blake3()
    for number in range(p.result("buckets")):
        rows, assignments = (
            read_table(bucket_path(p, number)),
            read_table(assignments_path(p, number)),
        )
        reasons, splits = (
            assignments.column("reason").to_pylist(),
            assignments.column("split").to_pylist(),
        )
        changes: list[str | None] = [None] * len(rows)
        keys: list[str | None] = [None] * len(rows)
        hashes: list[bytes | None] = [None] * len(rows)
        for i, reason in enumerate(reasons):
            if reason is None:
                outcome = outcomes[splits[i]].next()
                reasons[i], changes[i] = outcome["reason"], outcome["changes"]
                keys[i], hashes[i] = outcome["key"], outcome["input_hash"] or None
        paths = rows.column("path").to_pylist()
        names = [path.decode("utf-8", "backslashreplace") for path in paths]
        columns = {
            "path": names,
            "split": splits,
            "class": rows.column("class").to_pylist(),
            "reason": reasons,
            "detail": [
                p.left_out[name] if reason == "left_out" else None
                for name, reason in zip(names, reasons, strict=True)
            ],
            "key": keys,
            "blake3": hashes,
        }
        ledger.add(columns, changes)
        digest.update(b"\0".join(paths))
        digest.update(b"".join(hash_ or b"-" for hash_ in hashes))
        digest.update("\0".join(reason or "" for reason in reasons).encode())
    assert ledger.num_rows == num_inputs(p)
    return digest.hexdigest()


def _check_corpus(p: Preparation, ledger: LedgerWriter) -> None:
    """Raise UserError for too many bad images, or a class without any accepted image."""
    ledger.check_bad_fraction(p.run.images.max_bad_fraction)
    if p.labels.space is not None:
        return
    kept = Counter[int]()
    for split, plan in read_plan(p).items():
        for number in range(len(plan.shard_lengths)):
            labels = read_table(outcome_path(p, split, number)).column("label").to_pylist()
            kept.update(label for label in labels if label is not None)
    selection = p.result("selection")
    # Labels that the source itself skips never had an image.
    present = set(selection["present"])
    lost = [n for label, n in enumerate(selection["classes"]) if not kept[label] and n in present]
    if lost or not kept:
        shown = f" of {len(lost)} classes: {', '.join(lost[:CLASSES_SHOWN])}" if lost else ""
        raise UserError(
            f"no usable image is left{shown}\n{describe_rejected(ledger.reasons, ledger.examples)}",
            where="source.path",
            next_step="fix these files" + (" or remove the classes" if lost else ""),
        )


def _kept(p: Preparation, split: str, number: int, columns: Sequence[str]) -> pa.Table:
    table = read_table(outcome_path(p, split, number))
    reasons = table.column("reason")
    if reasons.null_count < len(table):
        kept = [i for i, reason in enumerate(reasons.to_pylist()) if reason is None]
        table = table.take(np.array(kept, np.int64))
    return table.select(columns)


def _index_rows(p: Preparation, split: str, number: int, name: str) -> pa.Table:
    columns = ["key", "offset", "length", "format", "label", "width", "height", "content_hash"]
    table = _kept(p, split, number, columns).rename_columns([*columns[:-1], "blake3"])
    for column, value in (("split", split), ("shard", name)):
        table = table.append_column(column, pa.array([value] * len(table), pa.string()))
    return table.select(index_schema().names).cast(index_schema())


def _fingerprint(p: Preparation, split: str, names: dict[int, str]) -> str:
    lengths = [p.result(f"shard-{split}-{number:06d}")["samples"] for number in names]
    tables = (
        _kept(p, split, number, ["content_hash", "label"]).rename_columns(["blake3", "label"])
        for number in names
    )
    return split_fingerprint(map(sample_bytes, tables), shard_lengths=lengths)


def _split_entry(
    p: Preparation, split: str, names: dict[int, str], *, fingerprint: str
) -> SplitEntry:
    shards = tuple(
        ShardEntry(name=name, **p.result(f"shard-{split}-{number:06d}"))
        for number, name in names.items()
    )
    return SplitEntry(
        num_samples=sum(shard.samples for shard in shards),
        num_bytes=sum(shard.bytes for shard in shards),
        fingerprint=fingerprint,
        shards=shards,
    )


def _commit(
    p: Preparation,
    final: Path,
    names: dict[str, dict[int, str]],
    entries: dict[str, SplitEntry],
) -> None:
    """Move the tars beside the index and commit the folder; every step may be repeated."""
    for split, numbers in names.items():
        for number, name in numbers.items():
            with suppress(FileNotFoundError):
                os.rename(shard_path(p, split, number), final / name)
        for shard in entries[split].shards:
            path = final / shard.name
            if not path.exists() or path.stat().st_size != shard.bytes:
                raise Interrupted(
                    f"{shard.name}, written before, is missing or has another size",
                    where=str(p.work.path),
                    next_step="remove this folder and run the same command again",
                )
    commit_folder(final, p.output)
    shutil.rmtree(p.work.path, ignore_errors=True)
