"""Open the training set of a run: one or several sets of shards, or subsets of them.

Owns: subsets, mixtures, the fingerprint of the whole, and what tars without an index give instead.
Leaves out: the order (`order`) and reading (`loader`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.config.errors import UserError, nearest
from vitscale.data.index import SplitIndex, read_manifest, read_split
from vitscale.data.index_keys import ChosenByKey, choose_by_key
from vitscale.data.order import BLOCK_SHARDS, MILLION, SampleOrder, TrainingOrder
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.data.storage import location_of
from vitscale.data.webdataset import StreamedTars, open_tars, tar_classes


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
    """Empty for streamed tars."""
    order: TrainingOrder | None = None
    """None for streamed tars, which have no positions."""
    dev: SplitIndex | None = None
    """The samples that `data.dev_percent` holds out; no part has them."""
    key_hash: str | None = None
    """Hash of the rows that `only_keys` chose; None: not set."""
    streamed: StreamedTars | None = None
    """With `reader: webdataset`."""


def open_training_set(
    settings: DataSettings, *, seed: int, check_files: bool = True
) -> TrainingSet:
    """Read every index. Raises UserError for damaged folders and incompatible label maps.

    check_files: False where another rank checks that the shards are there.
    """
    if settings.is_streamed:
        return _streamed_set(settings)
    whole, chosen = select(_read_part(settings, check_files=check_files), settings)
    first, dev = _cut(whole, settings.num_dev(whole.num_samples))
    parts = [first]
    for number, mixed_in in enumerate(settings.mixture):
        where = f"data.mixture[{number}]"
        part = _read_part(settings, mixed_in.path, where=where, check_files=check_files)
        if part.label_map_sha256 != parts[0].label_map_sha256:
            raise UserError(
                f"its label map has {_classes(part)} and differs from that of {settings.path}, "
                f"which has {_classes(parts[0])}",
                where=f"{where}.path",
                next_step="prepare both with the same labels.space",
            )
        parts.append(part)
    _check_cache(parts, settings.remote)
    shares = [round(mixed_in.share * MILLION) for mixed_in in settings.mixture]
    order = TrainingOrder(
        parts=tuple(
            SampleOrder(shard_lengths=part.shard_lengths, fingerprint=part.fingerprint, seed=seed)
            for part in parts
        ),
        shares=(MILLION - sum(shares), *shares),
        views=settings.views,
    )
    return TrainingSet(
        num_samples=sum(part.num_samples for part in parts),
        classes=first.classes,
        label_map_sha256=first.label_map_sha256,
        fingerprint=_fingerprint(order),
        parts=tuple(parts),
        order=order,
        dev=dev,
        key_hash=None if chosen is None else chosen.sha256,
    )


def class_names(settings: DataSettings) -> tuple[str, ...]:
    """The classes of `data.path`, read without its index. Raises UserError."""
    if settings.is_streamed:
        return tar_classes(settings)
    return read_manifest(settings.path).classes


def open_val_split(settings: DataSettings, *, check_files: bool = True) -> SplitIndex | None:
    """The samples of `data.val_split`; None: there is none. Raises UserError."""
    if settings.val_split is None:
        return None
    return read_split(
        settings.path,
        split=settings.val_split,
        key="data.val_split (null: none)",
        remote_settings=settings.remote,
        check_files=check_files,
    )


def _streamed_set(settings: DataSettings) -> TrainingSet:
    streamed = open_tars(settings)
    # As in a manifest.
    names = json.dumps(list(streamed.classes), ensure_ascii=False, separators=(",", ":"))
    return TrainingSet(
        num_samples=streamed.num_samples,
        classes=streamed.classes,
        label_map_sha256=hashlib.sha256(names.encode()).hexdigest(),
        fingerprint=streamed.fingerprint,
        streamed=streamed,
    )


def _cut(whole: SplitIndex, num_dev: int) -> tuple[SplitIndex, SplitIndex | None]:
    """(what is trained on, what is held out): the tail, as the ViT paper's code cuts it."""
    if num_dev == 0:
        return whole, None
    rows = np.arange(whole.num_samples)
    return (
        whole.subset(rows[:-num_dev], name=f"without the last {num_dev}"),
        whole.subset(rows[-num_dev:], name=f"last {num_dev}"),
    )


def _read_part(
    settings: DataSettings,
    path: str | None = None,
    *,
    where: str = "data",
    check_files: bool,
) -> SplitIndex:
    """The training split of a set of shards; path None: of `data.path`."""
    return read_split(
        location_of(path or settings.path, where=f"{where}.path"),
        split=settings.train_split,
        key="data.train_split",
        remote_settings=settings.remote,
        check_files=check_files,
    )


def select(index: SplitIndex, settings: DataSettings) -> tuple[SplitIndex, ChosenByKey | None]:
    """The samples that `first_percent`, `only_classes` and `only_keys` leave of a split, and what
    `only_keys` did."""
    if settings.first_percent < 100:
        num = settings.num_first(index.num_samples)
        index = index.subset(np.arange(num), name=f"first {num}")
    if settings.only_classes:
        if not index.classes:
            raise UserError(
                f"the shards of {settings.path} have no labels",
                where="data.only_classes",
                next_step="remove it, or set the path to labelled shards",
            )
        labels = [_label(name, index) for name in settings.only_classes]
        rows = np.flatnonzero(np.isin(index.label, labels))
        if not len(rows):
            raise UserError(
                f"none of the {index.num_samples} samples has one of these classes",
                where="data.only_classes",
                next_step="choose other classes, or a larger first_percent",
            )
        index = index.subset(rows, name=f"labels {sorted(set(labels))}")
    if settings.only_keys is None:
        return index, None
    by_key = choose_by_key(index, settings.only_keys)
    return by_key.index, by_key


def _check_cache(parts: Sequence[SplitIndex], remote_settings: RemoteSettings) -> None:
    """Raise UserError if the cache cannot hold the shards that the order reads at once."""
    needed = sum(
        sum(sorted((file.num_bytes for file in part.remote.files), reverse=True)[:BLOCK_SHARDS])
        for part in parts
        if part.remote is not None
    )
    if needed > remote_settings.cache_gib * 2**30:
        raise UserError(
            f"{remote_settings.cache_gib:g} GiB are less than the shards that are read at once "
            f"({needed / 2**30:.3g} GiB: the {BLOCK_SHARDS} largest of each set)",
            where="data.remote.cache_gib",
            next_step="raise it; twice as much allows prefetching",
        )


def _classes(index: SplitIndex) -> str:
    if not index.classes:
        return "no classes"
    return f"{len(index.classes)} classes (the first is {index.classes[0]!r})"


def _label(name: str, index: SplitIndex) -> int:
    if name not in index.classes:
        like = nearest(name, index.classes)
        raise UserError(
            f"no class {name!r}" + (f"; did you mean {like!r}?" if like else ""),
            where="data.only_classes",
            allowed=f"class names in {index.folder / 'manifest.json'}, such as "
            f"{index.classes[0]!r}",
        )
    return index.classes.index(name)


def _fingerprint(order: TrainingOrder) -> str:
    first = order.parts[0].fingerprint
    if len(order.parts) == 1 and order.views == 1:
        return first
    names = [part.fingerprint for part in order.parts]
    text = json.dumps([names, order.shares, order.views])
    return hashlib.sha256(text.encode()).hexdigest()
