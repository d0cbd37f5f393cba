"""Open the training set of a run: one or several sets of shards, a subset, or tars."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.class_names import closest
from vitscale.data.index import (
    MANIFEST_NAME,
    PIECE_SAMPLES,
    SplitIndex,
    choose_by_key,
    label_map_sha256,
    read_manifest,
    read_split,
)
from vitscale.data.order import BLOCK_SHARDS, MILLION, SampleOrder, TrainingOrder
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.data.targets import StoredTargets, images_of, open_targets
from vitscale.data.webdataset import tars_of_split
from vitscale.distributed.random_numbers import GOLDEN, splitmix, stream_key

# Bits of the table of the hashes that are held out: 16 MiB.
HELD_BITS = 24


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """The training samples of a run and their order."""

    num_samples: int
    """Samples of all parts: the length of an epoch."""
    classes: tuple[str, ...]
    label_map_sha256: str
    fingerprint: str
    """Hash of everything that determines the order, except the seed."""
    parts: tuple[SplitIndex, ...] = ()
    order: TrainingOrder | None = None
    """None, as without `parts`, for streamed tars, which have no positions."""
    dev: SplitIndex | None = None
    """The samples that `data.dev_percent` holds out; no part has them."""
    tars: tuple[Path, ...] = ()
    """With `reader: webdataset`."""
    key_hash: str | None = None
    """Of the rows that `only_keys` chose."""
    targets: StoredTargets | None = None
    """What teachers say of the samples."""


def open_training_set(
    settings: DataSettings,
    *,
    seed: int,
    check_files: bool = True,
    needs_labels: bool = True,
) -> TrainingSet:
    """Read every index. check_files: False where another rank checks that the shards are there.

    needs_labels: False where the sets of a mixture may have classes of their own, or none.
    Raises UserError for damaged folders and incompatible label maps.
    """
    if settings.is_streamed:
        return _streamed_set(settings)

    read = partial(
        read_split,
        split=settings.train_split,
        key="data.train_split",
        remote_settings=settings.remote,
        check_files=check_files,
    )
    first = _selected(read(settings.path), settings)
    dev = None

    num_dev = settings.num_dev(first.num_samples)
    if num_dev:
        # The tail is held out, as the ViT paper's code cuts it.
        name = f"{num_dev} drawn for evaluation"
        if first.is_shuffled:
            name = f"last {num_dev}"
        rest, tail = _cut(first, first.num_samples - num_dev)
        dev = first.subset(tail, name=name)
        first = first.subset(rest, name=f"without the {name}")

    parts = [first, *(read(mixed_in.path) for mixed_in in settings.mixture)]
    for number, part in enumerate(parts[1:]):
        where = f"data.mixture[{number}].path"
        if part.label_map_sha256 != first.label_map_sha256:
            what = (
                f"its {len(part.classes)} classes differ from the {len(first.classes)} of "
                f"{settings.path}"
            )
            if needs_labels:
                raise UserError(
                    what,
                    where=where,
                    next_step="prepare both with the same labels.space",
                )
            note = f"{part.folder}: labels are ignored, also by evaluations: {what}"
            parts[number + 1] = replace(part, note=note)
        num_held_out = 0 if dev is None else _num_shared(dev, part)
        if num_held_out:
            # Images are compared by their bytes, since a copy elsewhere has another name.
            raise UserError(
                f"training would read {num_held_out:,} of the images that data.dev_percent holds "
                "out",
                where=where,
                next_step="mix in other images, or none",
            )

    _check_cache(parts, settings.remote)
    shares = [round(mixed_in.share * MILLION) for mixed_in in settings.mixture]

    orders = (SampleOrder(split=part, seed=seed) for part in parts)
    order = TrainingOrder(
        parts=tuple(orders),
        shares=(MILLION - sum(shares), *shares),
        repeats=settings.repeats,
    )
    # One set without repeats keeps its own fingerprint, so that its checkpoints stay valid.
    fingerprint = first.fingerprint
    if len(parts) > 1 or settings.repeats > 1:
        fingerprint = _hash(
            [[part.fingerprint for part in parts], order.shares, order.repeats]
        )
    return TrainingSet(
        num_samples=sum(part.num_samples for part in parts),
        classes=first.classes,
        label_map_sha256=first.label_map_sha256,
        fingerprint=fingerprint,
        parts=tuple(parts),
        order=order,
        dev=dev,
        key_hash=first.key_hash,
    )


def with_targets(
    training_set: TrainingSet, folder: str, settings: DataSettings, **views: Any
) -> TrainingSet:
    """The same samples with what teachers say of them, from a folder of `vitscale prepare targets`.

    views: further arguments of `images_of`. Raises UserError for targets that do not fit.
    """
    parts = training_set.parts
    images = images_of(parts, settings, **views)
    targets = open_targets(folder, parts, images, remote=settings.remote)
    return replace(training_set, targets=targets)


def _streamed_set(settings: DataSettings) -> TrainingSet:
    tars = tars_of_split(
        Path(settings.path), settings.train_split, where="data.train_split"
    )
    num_samples = settings.webdataset.num_samples or 0
    classes = class_names(settings)
    return TrainingSet(
        num_samples=num_samples,
        classes=classes,
        label_map_sha256=label_map_sha256(classes),
        fingerprint=_hash(
            ["webdataset", [tar.name for tar in tars], num_samples, classes]
        ),
        tars=tuple(tars),
    )


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def class_names(settings: DataSettings) -> tuple[str, ...]:
    """The classes of `data.path`, read without its index. Raises UserError."""
    if settings.is_streamed:
        return tuple(map(str, range(settings.webdataset.num_classes or 0)))
    return read_manifest(settings.path).classes


def open_val_split(
    settings: DataSettings, *, parts: Sequence[SplitIndex] = ()
) -> SplitIndex | None:
    """The samples of `data.val_split`, of `only_classes`; None: there is none. Raises UserError.

    parts: of the training set; a line says how many of the samples are in those mixed in.
    """
    if settings.val_split is None:
        return None
    split = read_split(
        settings.path,
        split=settings.val_split,
        key="data.val_split",
        remote_settings=settings.remote,
    )

    if settings.only_classes:
        split = _of_classes(split, settings.only_classes)
    # A copy in the training set is allowed here, but makes the evaluation look better than it is.
    for part in parts[1:]:
        if num := _num_shared(split, part):
            print(
                f"{part.folder}: training reads {num:,} images of {split.split!r}",
                flush=True,
            )
    return split


def _num_shared(held_out: SplitIndex, part: SplitIndex) -> int:
    """Number of images of a part that are held out, by their bytes: copies have the same."""
    held = np.concatenate([each["hash"] for each in held_out.pieces()])
    held.sort()
    # A table of the first bits passes few of the others, so that the search is rarely made.
    may_be_held = np.zeros(1 << HELD_BITS, bool)
    shift = np.uint64(64 - HELD_BITS)
    may_be_held[held >> shift] = True

    num = 0
    for each in part.pieces():
        hashes = each["hash"]
        hashes = hashes[may_be_held[hashes >> shift]]
        places = np.searchsorted(held, hashes)
        num += int((held[np.minimum(places, len(held) - 1)] == hashes).sum())
    return num


def _selected(index: SplitIndex, settings: DataSettings) -> SplitIndex:
    """The samples that `first_percent`, `only_classes` and `only_keys` leave of a split."""
    if settings.first_percent < 100:
        num = settings.num_first(index.num_samples)
        name = f"first {num}" if index.is_shuffled else f"{num} drawn"
        index = index.subset(_cut(index, num)[0], name=name)
    if settings.only_classes:
        index = _of_classes(index, settings.only_classes)
    if settings.only_keys:
        return choose_by_key(index, settings.only_keys)
    return index


def _of_classes(index: SplitIndex, names: Sequence[str]) -> SplitIndex:
    """The samples of these classes. Raises UserError for unknown ones, and if there are none."""
    unknown = [name for name in names if name not in index.classes]
    if unknown:
        close = closest(unknown[0], index.classes)
        raise UserError(
            f"no class {unknown[0]!r}",
            where="data.only_classes",
            allowed=f"class names in {index.folder / MANIFEST_NAME}",
            next_step=f"did you mean {close}?" if close else None,
        )

    labels = [index.classes.index(name) for name in names]
    rows = _rows(index, (np.isin(each["label"], labels) for each in index.pieces()))
    if not len(rows):
        raise UserError(
            f"none of the {index.num_samples} samples of {index.split!r} has one of these classes",
            where="data.only_classes",
            next_step="choose other classes",
        )
    return index.subset(rows, name=f"labels {sorted(set(labels))}")


def _cut(index: SplitIndex, num: int) -> tuple[slice | np.ndarray, slice | np.ndarray]:
    """Cut the samples into the first `num` and the rest, so that each is a random subset.

    External tars may be sorted, so theirs are the first of a permutation.
    """
    if index.is_shuffled:
        return slice(0, num), slice(num, None)
    # Those with the smallest hashes, as `permutation` sorts them: equal ones do not exist.
    key = stream_key("subset", index.fingerprint)
    hashes = np.empty(index.num_samples, np.uint64)
    for start in range(0, len(hashes), PIECE_SAMPLES):
        part = hashes[start : start + PIECE_SAMPLES]
        part[:] = splitmix((key + start * GOLDEN) % (1 << 64), len(part))
    is_first = hashes <= np.partition(hashes, num - 1)[num - 1]
    return _rows(index, [is_first]), _rows(index, [~is_first])


def _rows(index: SplitIndex, masks: Iterable[np.ndarray]) -> np.ndarray:
    """Numbers of the samples that a mask has, which comes in pieces."""
    rows = []
    first = 0
    for mask in masks:
        rows.append((np.flatnonzero(mask) + first).astype(index.narrow))
        first += len(mask)
    return np.concatenate(rows)


def _check_cache(parts: Sequence[SplitIndex], remote_settings: RemoteSettings) -> None:
    """Raise UserError if the cache cannot hold the shards that the order reads at once."""
    needed = 0
    for part in parts:
        # Shards of one block per set are read at once; the largest ones are the worst case.
        if part.is_remote:
            needed += int(np.sort(part.tars.num_bytes)[-BLOCK_SHARDS:].sum())
    if needed > remote_settings.cache_gib * 2**30:
        raise UserError(
            f"less than the {BLOCK_SHARDS} largest shards of each set, which are read at once",
            where="data.remote.cache_gib",
            allowed=f"{needed / 2**30:.3g} GiB or more; twice as much allows prefetching",
        )
