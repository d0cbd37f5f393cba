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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from data_prep.formats.index_files import (
    INDEX_SCHEMA,
    folder_fingerprint,
    write_card,
    write_index,
    write_manifest,
    write_split,
)
from data_prep.formats.ledger import Outcomes, write_ledger
from data_prep.sources.files import stem_and_suffix
from data_prep.sources.protocol import ChangedSource, Container, printable
from data_prep.steps.corpus_check import (
    CLASSES_SHOWN,
    TRAIN,
    check_classes,
    notes_on,
    take_census,
)
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import read_containers
from data_prep.steps.plan_shards import REJECTED, read_plan, with_column
from data_prep.steps.tars import facts_of, root_of, split_of, tar_units
from data_prep.steps.work import (
    WorkFolder,
    check_settings,
    content_config,
    tool_version,
)
from vitscale.config.errors import StorageError, UserError
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    NO_LABEL,
    Manifest,
    ShardEntry,
    label_map_sha256,
)
from vitscale.data.order import check_mixed, some_shards
from vitscale.data.positions import POSITION, positions_name
from vitscale.data.remote import Location, Url
from vitscale.distributed.atomic_files import blake3_of_file, commit_folder

# The folder to commit.
FINAL = "final"
# The unit of its step, which is done when the output is there.
FINISHED = "finish"


class Tar(NamedTuple):
    """One tar, and how to read its samples."""

    split: str
    entry: ShardEntry
    read: Callable[[], pa.Table]
    """The outcome of each input, with facts about the tar."""

    @classmethod
    def of(cls, read: Callable[[], pa.Table], *, split: str, name: str) -> Tar:
        table = read()
        facts = facts_of(table)
        entry = ShardEntry(
            name=name,
            samples=table["reason"].null_count,
            bytes=int(facts["bytes"]),
            blake3=facts["blake3"],
        )
        return cls(split, entry, read)

    def samples(self) -> pa.Table:
        """Return what is kept, sorted by its place in the tar, as readers go through it."""
        table = self.read()
        return table.filter(pc.is_null(table["reason"])).sort_by("offset")

    def rows(self, classes: Sequence[str]) -> pa.Table:
        """Return its samples as rows of the index."""
        samples = self.samples()
        labels = pc.index_in(samples["class"], value_set=pa.array(classes, pa.string()))
        rows = samples.append_column("label", labels.fill_null(NO_LABEL))
        rows = rows.append_column("shard", pa.repeat(self.entry.name, len(rows)))
        return rows.select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)


def finish_shards(work: WorkFolder, unit: str) -> None:
    """Give the tars that have samples their final numbers, and commit the folder."""
    plan = read_plan(work)
    sums, fingerprint = _write_ledger(work, map(work.table, [*plan.units, REJECTED]))
    tars = []
    numbers = Counter[str]()
    kept = set[str]()
    has_train = any(split_of(outcomes) == TRAIN for outcomes in plan.units)
    for outcomes in plan.units:
        split = split_of(outcomes)
        name = f"{split}-{numbers[split]:06d}.tar"
        tar = Tar.of(partial(work.table, outcomes), split=split, name=name)
        # A shard whose images were all rejected has no tar.
        if not tar.entry.samples:
            continue
        tars.append(tar)
        numbers[split] += 1
        if split == TRAIN or not has_train:
            kept.update(tar.samples()["class"].unique().to_pylist())
        path = work.path / FINAL / name
        with suppress(FileNotFoundError):  # of a process that died here
            os.rename((work.path / outcomes).with_suffix(".tar"), path)
        # A process may have died between the rename and the commit.
        if not path.exists() or path.stat().st_size != tar.entry.bytes:
            raise StorageError(
                f"{path.name}, written before, is missing or has another size",
                where=work.path,
                next_step="remove this folder and run the same command again",
            )

    # The plan found images of each class, in train if there is one; are they all rejected?
    lost = [name for name in plan.present if plan.classes and name not in kept]
    if not tars or (lost and load_labels(work.run.labels).space is None):
        problem = "no usable image is left"
        advice = "fix these files"
        if lost:
            problem += f" of {len(lost)} classes: {', '.join(lost[:CLASSES_SHOWN])}"
            advice += " or remove the classes"
            if has_train:
                problem += f" (in {TRAIN})"
        raise UserError(
            f"{problem}\n{sums.describe()}", where="source.path", next_step=advice
        )

    _commit(work, tars, plan.classes, inputs=sums, source_fingerprint=fingerprint)


def finish_index(work: WorkFolder, unit: str) -> None:
    """Commit the index of tars that stay where they are."""
    root = root_of(work)
    labels = load_labels(work.run.labels)
    containers = read_containers(work)
    tables = [work.table(name) for name in tar_units(work)]
    tables = _with_unique_keys(tables, containers)

    tars = []
    for table, container in zip(tables, containers, strict=True):
        _check_unchanged(root, container.path, facts_of(table))
        # Bound now: the tables stay in memory.
        read = partial(lambda table: table, table)
        tars.append(Tar.of(read, split=container.split, name=container.path))

    # Everything is checked before the output appears.
    census = take_census(tables)
    found = census.images
    labels.check(census.unknown, found=found)
    sums, fingerprint = _write_ledger(work, tables)
    if not found:
        raise UserError("contains no usable samples", where=f"source.path={root}")
    check_classes(census, labels=labels.settings, are_values=True)

    tars = sorted((tar for tar in tars if tar.entry.samples), key=lambda tar: tar.split)
    classes = labels.label_map(found, keep_numbers=True)
    _commit(
        work,
        tars,
        classes,
        inputs=sums,
        source_fingerprint=fingerprint,
        shards_root=root_of_tars(root, output=work.output),
    )


def _with_unique_keys(
    tables: Sequence[pa.Table], containers: Sequence[Container]
) -> list[pa.Table]:
    """Put the tar's name before keys that other tars of the split have, too: lists go by key.

    Writers often begin each tar with 00000.
    """
    rows = pa.concat_tables(table.select(["split", "key"]) for table in tables)
    again = {
        split: _repeated(rows["key"].filter(pc.equal(rows["split"], split)))
        for split in {container.split for container in containers}
    }

    changed = []
    for table, container in zip(tables, containers, strict=True):
        # Only repeated keys change, so that lists of other keys stay valid.
        keys = table["key"]
        prefix = printable(stem_and_suffix(container.path)[0])
        longer = pc.binary_join_element_wise(prefix, keys, "/")
        is_again = pc.is_in(keys, value_set=again[container.split])
        unique = pc.if_else(is_again, longer, keys)
        changed.append(with_column(table, "key", unique))
    return changed


def _repeated(values: pa.ChunkedArray) -> pa.Array:
    """Return the values that occur more than once."""
    counts = values.drop_null().value_counts()
    return counts.field("values").filter(pc.greater(counts.field("counts"), 1))


def root_of_tars(tars: Location, *, output: Path) -> str:
    """The path or URL of the tars' folder in the manifest.

    Relative if one folder contains tars and output, so that both can be moved; else absolute.
    """
    if isinstance(tars, Url):
        return str(tars)
    real = tars.resolve()
    parent = output.resolve().parent
    if real.is_relative_to(parent):
        return os.path.relpath(real, parent / output.name)
    return str(real)


def _check_unchanged(root: Location, name: str, facts: Mapping[str, str]) -> None:
    """Raise ChangedSource if a local tar has changed since it was read."""
    if isinstance(root, Path):
        # A tar that is gone has changed, too.
        with suppress(FileNotFoundError):
            status = os.stat(root / name)
            now = (str(status.st_size), str(status.st_mtime_ns))
            if now == (facts["bytes"], facts["modified_ns"]):
                return
        raise ChangedSource(name)


def _write_ledger(
    work: WorkFolder, outcomes: Iterable[pa.Table]
) -> tuple[Outcomes, str]:
    """Write the ledger of all inputs; return its sums and the fingerprint of the source.

    Raises UserError for too many bad images.
    """
    digest = blake3()

    def tables() -> Iterator[pa.Table]:
        for table in outcomes:
            paths, hashes, reasons = (
                table[name].to_pylist() for name in ("path", "input_hash", "reason")
            )
            # The fingerprint covers all inputs, also those that were rejected.
            digest.update("\0".join(paths).encode())
            digest.update(b"".join(each or b"-" for each in hashes))
            digest.update("\0".join(each or "" for each in reasons).encode())
            yield table.drop("blake3").rename_columns({"input_hash": "blake3"})

    final = work.path / FINAL
    final.mkdir(exist_ok=True)
    sums = write_ledger(final, tables())
    sums.check(
        max_bad_fraction=work.run.images.max_bad_fraction, num_images=sums.num_images
    )
    return sums, digest.hexdigest()


def _commit(
    work: WorkFolder,
    tars: Sequence[Tar],
    classes: Sequence[str],
    *,
    inputs: Outcomes,
    source_fingerprint: str,
    shards_root: str = ".",
) -> None:
    """Write all files but the tars and the ledger, then give the folder its name."""
    # The files that the settings name may have changed since the work began.
    check_settings(work)
    final = work.path / FINAL
    # With a label space the order of the classes was chosen by the user.
    sorted_classes = () if work.run.labels.space else classes
    formats = set[str]()

    def rows_of(tars: Iterable[Tar]) -> Iterator[tuple[ShardEntry, pa.Table]]:
        """Yield the tars with their rows of the index, which are read anew each time."""
        for tar in tars:
            rows = tar.rows(classes)
            formats.update(rows["format"].unique().to_pylist())
            yield tar.entry, rows

    write_index(final, tables=(rows for _, rows in rows_of(tars)))
    splits = {}
    hashes = dict[str, np.ndarray]()
    for split in sorted({tar.split for tar in tars}):
        of_split = [tar for tar in tars if tar.split == split]
        splits[split] = write_split(final, split=split, tars=rows_of(of_split))
        records = np.memmap(final / positions_name(split), POSITION, "r")
        hashes[split] = records["hash"]
        # Tars of others were not shuffled here, and may hold one class after the other.
        if split == TRAIN and shards_root != ".":
            lengths = np.array([tar.entry.samples for tar in of_split])
            shards = some_shards(len(lengths))
            chosen = np.repeat(np.isin(np.arange(len(lengths)), shards), lengths)
            check_mixed(
                records["label"][chosen],
                shard_lengths=lengths[shards],
                where="source.path",
            )

    # The card lies beside the tars that it describes.
    if shards_root == ".":
        write_card(final, splits=splits, classes=classes, formats=sorted(formats))
    write_manifest(
        final,
        manifest=Manifest(
            format_version=FORMAT_VERSION,
            tool_version=tool_version(),
            fingerprint=folder_fingerprint(splits, classes=classes),
            source_fingerprint=source_fingerprint,
            label_map_sha256=label_map_sha256(classes),
            classes=tuple(classes),
            index_bytes=(final / INDEX_NAME).stat().st_size,
            index_blake3=blake3_of_file(final / INDEX_NAME),
            splits=splits,
            inputs=inputs.as_json(),
            config=content_config(work.run),
            shards_root=shards_root,
            source_path=work.run.source.place,
            notes=tuple(notes_on(sorted_classes, hashes)),
        ),
    )

    # One rename makes the output; what is left of the work is of no use then.
    commit_folder(final, work.output)
    shutil.rmtree(work.path, ignore_errors=True)
