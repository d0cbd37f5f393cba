"""From judged files to a committed shard folder.

Owns: which sample goes where, the temporary folder, and what stands in the manifest.
Leaves out: the tar layout (`tar_shards`), columns and file formats (`vitscale.data.index`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data_prep.image_check import ImageFacts
from data_prep.image_folder import InputFile, class_names
from data_prep.input_ledger import LedgerRow, source_fingerprint, write_ledger
from data_prep.sample_order import held_out, make_keys, shuffled
from data_prep.tar_shards import TarShard, sample_bytes, shard_lengths
from vitscale.atomic_files import blake3_of_file, commit_folder
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    Manifest,
    ShardEntry,
    SplitEntry,
    folder_fingerprint,
    index_schema,
    label_map_sha256,
    split_fingerprint,
    write_index,
    write_info,
    write_manifest,
)
from vitscale.errors import UserError
from vitscale.runs.data_prep import DataPrepRun, ShardSettings

LOCK_NAME = ".lock"
# Index, ledger and manifest beside the tars, per sample; measured 60-120 bytes.
SIDE_FILE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """One kept image and its place."""

    file: InputFile
    facts: ImageFacts
    split: str
    label: int
    key: str


def content_config(run: DataPrepRun) -> dict[str, Any]:
    """The settings that decide the bytes written: not where they come from, go to, or who runs."""
    config = run.model_dump(mode="json")
    del config["output"], config["launch"], config["source"]["path"]
    return config


def arrange(rows: Sequence[LedgerRow], *, run: DataPrepRun) -> dict[str, list[Sample]]:
    """The kept samples of each split in the order in which they will be stored."""
    classes = class_names([row.file for row in rows])
    label_of = {name: label for label, name in enumerate(classes)}
    kept = [(row.file, row.facts) for row in rows if row.reason is None and row.facts is not None]
    paths_of_class: dict[str, list[str]] = {}
    for file, _ in kept:
        paths_of_class.setdefault(file.class_name or "", []).append(file.path)
    moved = held_out(paths_of_class, fraction=run.source.holdout_fraction, seed=run.seed)
    splits = [run.source.holdout_split if f.path in moved else f.split for f, _ in kept]
    keys = make_keys(
        [(split, f.class_name or "", f.path) for split, (f, _) in zip(splits, kept, strict=True)]
    )
    of_split: dict[str, list[Sample]] = {}
    for split, key, (file, facts) in zip(splits, keys, kept, strict=True):
        sample = Sample(file, facts, split, label_of[file.class_name or ""], key)
        of_split.setdefault(split, []).append(sample)
    for split, samples in of_split.items():
        if len(samples) < run.shards.min_shards:
            raise UserError(
                f"{run.shards.min_shards} shards cannot be filled from {len(samples)} images "
                f"of split {split!r}",
                where="shards.min_shards",
                allowed=f"at most {len(samples)}",
            )
    return {
        split: [samples[i] for i in shuffled([s.key for s in samples], seed=run.seed)]
        for split, samples in sorted(of_split.items())
    }


def write_shard_folder(
    output: Path,
    *,
    run: DataPrepRun,
    rows: Sequence[LedgerRow],
    splits: Mapping[str, Sequence[Sample]],
    advance: Callable[[int], None],
) -> Manifest:
    """Write tars, index, info, ledger and manifest, and give the folder its name at the end."""
    root = Path(run.source.path).expanduser()
    classes = class_names([row.file for row in rows])
    with _temporary_folder(output, needed=_needed_bytes(splits)) as folder:
        entries = {
            split: _write_split(folder, split, samples, root, run.shards, advance)
            for split, samples in splits.items()
        }
        lengths = {split: entry.shard_lengths for split, (entry, _) in entries.items()}
        write_index(
            folder,
            tables=(
                _index_table(split, splits[split], lengths[split], offsets)
                for split, (_, offsets) in entries.items()
            ),
        )
        split_entries = {split: entry for split, (entry, _) in entries.items()}
        write_info(folder, splits=split_entries)
        placed = {s.file.path: (s.split, s.key) for samples in splits.values() for s in samples}
        write_ledger(folder, rows=rows, split_and_key=placed)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            tool_version=tool_version(),
            fingerprint=folder_fingerprint(split_entries, classes=classes),
            source_fingerprint=source_fingerprint(rows),
            label_map_sha256=label_map_sha256(classes),
            classes=classes,
            index_bytes=(folder / INDEX_NAME).stat().st_size,
            index_blake3=blake3_of_file(folder / INDEX_NAME),
            splits=split_entries,
            config=content_config(run),
        )
        write_manifest(folder, manifest=manifest)
    return manifest


def tool_version() -> str:
    try:
        return f"vitscale {version('vitscale')}"
    except PackageNotFoundError:
        return "vitscale (not installed)"


def _needed_bytes(splits: Mapping[str, Sequence[Sample]]) -> int:
    samples = [sample for split in splits.values() for sample in split]
    return sum(sample_bytes(s.facts.num_bytes) for s in samples) + SIDE_FILE_BYTES * len(samples)


def _write_split(
    folder: Path,
    split: str,
    samples: Sequence[Sample],
    root: Path,
    shards: ShardSettings,
    advance: Callable[[int], None],
) -> tuple[SplitEntry, list[int]]:
    """Write one split's tars; returns their entry and each image's offset in its tar."""
    lengths = shard_lengths(
        [sample.facts.num_bytes for sample in samples],
        shard_mib=shards.shard_mib,
        min_shards=shards.min_shards,
    )
    entries: list[ShardEntry] = []
    offsets: list[int] = []
    remaining = iter(samples)
    for number, length in enumerate(lengths):
        with TarShard(folder / f"{split}-{number:06d}.tar") as tar:
            for _ in range(length):
                sample = next(remaining)
                image = _read_again(root, sample)
                offset = tar.add(
                    sample.key, extension=sample.facts.extension, image=image, label=sample.label
                )
                offsets.append(offset)
                advance(1)
        entries.append(tar.entry)
    fingerprint = split_fingerprint(
        (sample.facts.sha256 or b"" for sample in samples),
        labels=(sample.label for sample in samples),
        shard_lengths=lengths,
    )
    entry = SplitEntry(
        num_samples=len(samples),
        num_bytes=sum(shard.bytes for shard in entries),
        fingerprint=fingerprint,
        shards=tuple(entries),
    )
    return entry, offsets


def _read_again(root: Path, sample: Sample) -> bytes:
    """The bytes that were judged. A source that changes meanwhile ends the run."""
    path = root / sample.file.path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"was read before, but not now ({error.strerror})",
            where=repr(str(path)),
            next_step="run the command again once the source no longer changes",
        ) from None
    if hashlib.sha256(data).digest() != sample.facts.sha256:
        raise UserError(
            "changed while the shards were written",
            where=repr(str(path)),
            next_step="run the command again once the source no longer changes",
        )
    return data


def _index_table(
    split: str, samples: Sequence[Sample], lengths: Sequence[int], offsets: Sequence[int]
) -> Any:
    import pyarrow as pa

    shard_names = [
        f"{split}-{number:06d}.tar" for number, length in enumerate(lengths) for _ in range(length)
    ]
    columns = {
        "key": [s.key for s in samples],
        "split": [split] * len(samples),
        "shard": shard_names,
        "offset": offsets,
        "length": [s.facts.num_bytes for s in samples],
        "format": [s.facts.extension for s in samples],
        "label": [s.label for s in samples],
        "width": [s.facts.width for s in samples],
        "height": [s.facts.height for s in samples],
        "blake3": [s.facts.sha256 for s in samples],
    }
    return pa.table(columns, schema=index_schema())


@contextmanager
def _temporary_folder(output: Path, *, needed: int) -> Iterator[Path]:
    """A locked folder beside `output` that takes its name when the block ends well.

    Its name is fixed, so that what a killed run left behind is cleared by the next one; the lock
    tells that from a run still going on.
    """
    temporary = output.with_name(f".{output.name}.preparing")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        with open(temporary / LOCK_NAME, "wb") as lock:
            _take_lock(lock.fileno(), output)
            try:
                _clear(temporary)
                free = shutil.disk_usage(temporary).free
                if free < needed:
                    raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free")
                yield temporary
                commit_folder(temporary, output)
                (output / LOCK_NAME).unlink()
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        size = f"; {max(1, needed >> 20)} MiB are needed in all"
        raise UserError(
            f"cannot be written ({error.strerror}{size if full else ''}); nothing was left behind",
            where=str(output),
            next_step="free space or choose another output" if full else "choose another output",
        ) from None


def _take_lock(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            "another process is writing this folder",
            where=str(output),
            next_step="wait for it, or choose another output",
        ) from None


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name != LOCK_NAME:
            entry.unlink()
