"""Finish the work: from the outcomes of all tars to a committed folder.

Owns: index, info, card, ledger and manifest over all tars, and the rename that makes them one
folder.
Leaves out: their formats (`formats`).

All rows of the index are in memory.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from data_prep.formats.index_files import (
    folder_fingerprint,
    label_map_sha256,
    sample_bytes,
    split_fingerprint,
    write_card,
    write_index,
    write_info,
    write_manifest,
)
from data_prep.formats.ledger import Outcomes, write_ledger
from data_prep.sources.protocol import ChangedSource, Outage
from data_prep.steps.index_tar import root_of, tar_units
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import left_out, read_containers
from data_prep.steps.plan_shards import CLASSES_SHOWN, REJECTED, TRAIN, read_plan
from data_prep.steps.rows import read_table
from data_prep.steps.settings import tool_version, unchanged_config
from data_prep.steps.work import WorkFolder
from data_prep.steps.write_shard import facts_of
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
from vitscale.data.storage import Location, Url
from vitscale.distributed.atomic_files import blake3_of_file, commit_folder

# The folder to commit.
FINAL = "final"


@dataclass(frozen=True)
class Tar:
    """One tar, by the table of its outcomes."""

    file: Path
    split: str
    name: str
    facts: Mapping[str, str]

    @property
    def samples(self) -> pa.Table:
        """Its samples in its order."""
        table = read_table(self.file)
        return table.filter(pc.is_null(table["reason"])).sort_by("offset")

    @property
    def entry(self) -> ShardEntry:
        samples, num_bytes = int(self.facts["samples"]), int(self.facts["bytes"])
        digest = self.facts["blake3"]
        return ShardEntry(name=self.name, samples=samples, bytes=num_bytes, blake3=digest)

    def rows(self, classes: Sequence[str]) -> pa.Table:
        """Its samples as rows of the index."""
        table, num = self.samples, len(self.samples)
        labels = pa.array(np.full(num, NO_LABEL, np.int32))
        if classes:
            labels = pc.index_in(table["class"], value_set=pa.array(classes, pa.string()))
        made = {
            "split": pa.array([self.split] * num, pa.string()),
            "shard": pa.array([self.name] * num, pa.string()),
            "label": labels,
        }
        names = index_schema().names
        columns = [made[name] if name in made else table[name] for name in names]
        return pa.table(columns, names=names).cast(index_schema())


def finish_units(work: WorkFolder) -> list[str]:
    return ["finish"]  # done when the output is there


def finish_shards(work: WorkFolder, unit: str) -> None:
    """Commit the folder of new shards."""
    plan, tars, numbers = read_plan(work), [], Counter[str]()
    for (split, _, _), outcomes in zip(plan.shards, plan.units, strict=True):
        facts = facts_of(work, outcomes)
        if int(facts["samples"]):
            name = f"{split}-{numbers[split]:06d}.tar"
            numbers[split] += 1
            tars.append(Tar(work.path / outcomes, split, name, facts))
    sums, fingerprint = _write_ledger(work, [*plan.units, REJECTED])
    tables = [tar.rows(plan.classes) for tar in tars]
    labels = np.concatenate([np.zeros(0, np.int32), *(table["label"] for table in tables)])
    kept = {plan.classes[label] for label in np.unique(labels[labels != NO_LABEL])}
    lost = [name for name in plan.present if plan.classes and name not in kept]
    if not tables or (lost and load_labels(work.run.labels).space is None):
        shown = f" of {len(lost)} classes: {', '.join(lost[:CLASSES_SHOWN])}" if lost else ""
        raise UserError(
            f"no usable image is left{shown}\n{sums.describe()}",
            where="source.path",
            next_step="fix these files" + (" or remove the classes" if lost else ""),
        )
    for tar in tars:
        path = work.path / FINAL / tar.name
        with suppress(FileNotFoundError):  # of a process that died here
            os.rename(tar.file.with_suffix(".tar"), path)
        if not path.exists() or path.stat().st_size != tar.entry.bytes:
            raise Outage(
                f"{path.name}, written before, is missing or has another size",
                where=str(work.path),
                next_step="remove this folder and run the same command again",
            )
    _commit(work, tars, tables, plan.classes, inputs=sums.as_json(), source_fingerprint=fingerprint)


def finish_index(work: WorkFolder, unit: str) -> None:
    """Commit the index of tars that stay where they are."""
    root, tars, found, unknown = root_of(work), [], Counter[str](), Counter[str]()
    for container, outcomes in zip(read_containers(work), tar_units(work), strict=True):
        facts = facts_of(work, outcomes)
        _check_unchanged(root, container.path, facts)
        table = read_table(work.path / outcomes)
        unknown += _classes(table.filter(pc.equal(table["reason"], "unknown_class")))
        if int(facts["samples"]):
            tars.append(Tar(work.path / outcomes, container.split, container.path, facts))
            found += _classes(tars[-1].samples)
    labels = load_labels(work.run.labels)
    labels.check(unknown, found=found)
    sums, fingerprint = _write_ledger(work, tar_units(work))
    if not found:
        raise UserError("contains no usable samples", where=f"source.path={root}")
    tars.sort(key=lambda tar: tar.split)
    classes = labels.label_map(found, keep_numbers=True)
    tables = [tar.rows(classes) for tar in tars]
    train = [table["label"] for tar, table in zip(tars, tables, strict=True) if tar.split == TRAIN]
    labels_of_train = np.concatenate([np.zeros(0, np.int32), *train])
    check_mixed(labels_of_train, shard_lengths=list(map(len, train)), where="source.path")
    _commit(
        work,
        tars,
        tables,
        classes,
        inputs=sums.as_json(),
        source_fingerprint=fingerprint,
        shards_root=root_of_tars(root, output=work.output),
    )


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


def _check_unchanged(root: Location, name: str, facts: Mapping[str, str]) -> None:
    """Raise ChangedSource if a local tar is another one than when it was read."""
    if isinstance(root, Path):
        with suppress(FileNotFoundError):
            status = os.stat(root / name)
            found = str(status.st_size), str(status.st_mtime_ns)
            if found == (facts["bytes"], facts["modified_ns"]):
                return
        raise ChangedSource(name)


def _classes(rows: pa.Table) -> Counter[str]:
    """Count the rows of each class."""
    counts = zip(*pc.value_counts(rows["class"]).flatten(), strict=True)
    return Counter({name.as_py() or "": num.as_py() for name, num in counts})


def _write_ledger(work: WorkFolder, units: Sequence[str]) -> tuple[Outcomes, str]:
    """Write the ledger of all inputs; return its sums and the fingerprint of the source.

    Raises UserError for too many bad images.
    """
    digest, copy_of = blake3(), left_out(work.run.source.leave_out)

    def tables() -> Iterator[pa.Table]:
        for unit in units:
            table = read_table(work.path / unit)
            rows, num = dict(zip(table.column_names, table.columns, strict=True)), len(table)
            for name in ("changes", "key"):
                rows.setdefault(name, pa.nulls(num, pa.string()))
            hashes = rows.get("input_hash", pa.nulls(num, pa.binary(32)))
            paths, reasons = rows["path"].to_pylist(), rows["reason"].to_pylist()
            details = [
                copy_of.get(path) if reason == "left_out" else None
                for path, reason in zip(paths, reasons, strict=True)
            ]
            digest.update("\0".join(paths).encode())
            digest.update(b"".join(each or b"-" for each in hashes.to_pylist()))
            digest.update("\0".join(each or "" for each in reasons).encode())
            yield pa.table(rows | {"blake3": hashes, "detail": pa.array(details, pa.string())})

    final = work.path / FINAL
    final.mkdir(exist_ok=True)
    sums = write_ledger(final, tables())
    sums.check(max_bad_fraction=work.run.images.max_bad_fraction)
    return sums, digest.hexdigest()


def _commit(
    work: WorkFolder,
    tars: Sequence[Tar],
    tables: Sequence[pa.Table],
    classes: tuple[str, ...],
    *,
    inputs: dict[str, Any],
    source_fingerprint: str,
    shards_root: str = ".",
) -> None:
    """Write all files but the tars and the ledger, then give the folder its name."""
    final, splits = work.path / FINAL, {}
    write_index(final, tables=tables)
    for split in sorted({tar.split for tar in tars}):
        own = [pair for pair in zip(tars, tables, strict=True) if pair[0].split == split]
        shards = tuple(tar.entry for tar, _ in own)
        lengths = [shard.samples for shard in shards]
        content = (sample_bytes(table) for _, table in own)
        splits[split] = SplitEntry(
            num_samples=sum(lengths),
            num_bytes=sum(shard.bytes for shard in shards),
            fingerprint=split_fingerprint(content, shard_lengths=lengths),
            shards=shards,
        )
    write_info(final, splits=splits, shards_root=shards_root)
    if shards_root == ".":
        formats = {name for table in tables for name in table["format"].unique().to_pylist()}
        write_card(final, splits=splits, classes=classes, formats=sorted(formats))
    write_manifest(
        final,
        manifest=Manifest(
            format_version=FORMAT_VERSION,
            tool_version=tool_version(),
            fingerprint=folder_fingerprint(splits, classes=classes),
            source_fingerprint=source_fingerprint,
            label_map_sha256=label_map_sha256(classes),
            classes=classes,
            index_bytes=(final / INDEX_NAME).stat().st_size,
            index_blake3=blake3_of_file(final / INDEX_NAME),
            splits=splits,
            inputs=inputs,
            config=unchanged_config(work),
            shards_root=shards_root,
        ),
    )
    commit_folder(final, work.output)
    shutil.rmtree(work.path, ignore_errors=True)
