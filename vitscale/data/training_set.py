"""What a run trains on: one or several sets of shards, whole or in part, in one order.

Owns: subsets, mixtures, and the identity of the whole.
Leaves out: the order itself (`order`) and reading (`loader`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.config.errors import UserError, nearest
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.order import BLOCK_SHARDS, MILLION, SampleOrder, TrainingOrder
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.urls import location_of
from vitscale.data.settings import DataSettings, TrainingShards


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """The samples of a run and the order in which they come."""

    parts: tuple[SplitIndex, ...]
    order: TrainingOrder
    fingerprint: str
    """Names everything that decides the order, besides the seed."""

    @property
    def num_samples(self) -> int:
        """Of all parts together: what an epoch is counted in."""
        return sum(part.num_samples for part in self.parts)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.parts[0].classes

    @property
    def label_map_sha256(self) -> str:
        return self.parts[0].label_map_sha256


def open_training_set(settings: DataSettings, *, seed: int) -> TrainingSet:
    """Read every index. Raises UserError for damaged folders and parts that do not fit."""
    reading = settings.remote
    parts = [_read_part(settings, where="data", reading=reading)]
    for number, mixed_in in enumerate(settings.mixture):
        part = _read_part(mixed_in, where=f"data.mixture[{number}]", reading=reading)
        if part.label_map_sha256 != parts[0].label_map_sha256:
            raise UserError(
                f"its label map has {len(part.classes)} classes (the first is "
                f"{part.classes[0]!r}) and differs from that of {settings.path}, which has "
                f"{len(parts[0].classes)} (the first is {parts[0].classes[0]!r})",
                where=f"data.mixture[{number}].path",
                next_step="prepare both with the same labels.space",
            )
        parts.append(part)
    _check_cache(parts, reading)
    shares = [round(mixed_in.share * MILLION) for mixed_in in settings.mixture]
    order = TrainingOrder(
        parts=tuple(
            SampleOrder(shard_lengths=part.shard_lengths, fingerprint=part.fingerprint, seed=seed)
            for part in parts
        ),
        shares=(MILLION - sum(shares), *shares),
        views=settings.views,
    )
    return TrainingSet(parts=tuple(parts), order=order, fingerprint=_fingerprint(order))


def _read_part(settings: TrainingShards, *, where: str, reading: RemoteSettings) -> SplitIndex:
    folder = location_of(settings.path, where=f"{where}.path")
    index = read_split(folder, split=settings.train_split, reading=reading)
    if settings.first_percent < 100:
        num = math.ceil(index.num_samples * settings.first_percent / 100)
        index = index.subset(np.arange(num), name=f"first {num}")
    if settings.only_classes:
        labels = [_label(name, index, where=where) for name in settings.only_classes]
        rows = np.flatnonzero(np.isin(index.label, labels))
        if not len(rows):
            raise UserError(
                f"none of the {index.num_samples} samples is of these classes",
                where=f"{where}.only_classes",
                next_step="choose other classes, or a larger first_percent",
            )
        index = index.subset(rows, name=f"labels {sorted(set(labels))}")
    return index


def _check_cache(parts: Sequence[SplitIndex], reading: RemoteSettings) -> None:
    """Refuse a cache in which the shards that the order reads at once would evict each other."""
    needed = sum(
        sum(sorted(part.remote.sizes, reverse=True)[:BLOCK_SHARDS])
        for part in parts
        if part.remote is not None and part.remote.cache is not None
    )
    if needed > reading.cache_gib * 2**30:
        raise UserError(
            f"{reading.cache_gib:g} GiB hold less than the shards that are read at once "
            f"({needed / 2**30:.3g} GiB: the {BLOCK_SHARDS} largest of each set)",
            where="data.remote.cache_gib",
            next_step="raise it, twice as much lets shards be fetched ahead; or set "
            "data.remote.cache_path=null to read by range",
        )


def _label(name: str, index: SplitIndex, *, where: str) -> int:
    if name not in index.classes:
        like = nearest(name, index.classes)
        raise UserError(
            f"no class {name!r}" + (f"; did you mean {like!r}?" if like else ""),
            where=f"{where}.only_classes",
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
