"""Open the training set of a run: one or several sets of shards, or subsets of them.

Owns: subsets, mixtures, the fingerprint of the whole, and what tars without an index give instead.
Leaves out: the order (`order`) and reading (`loader`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitscale.config.errors import UserError, did_you_mean
from vitscale.data.index import (
    MANIFEST_NAME,
    SplitIndex,
    choose_by_key,
    read_manifest,
    read_split,
)
from vitscale.data.order import BLOCK_SHARDS, MILLION, SampleOrder, TrainingOrder
from vitscale.data.remote import RemoteFile
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.data.webdataset import tars_of_split


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
    tars: tuple[Path, ...] = ()
    """With `reader: webdataset`."""

    @property
    def key_hash(self) -> str | None:
        """Hash of the rows that `only_keys` chose; None: not set."""
        return self.parts[0].key_hash if self.parts else None


def open_training_set(
    settings: DataSettings, *, seed: int, check_files: bool = True
) -> TrainingSet:
    """Read every index. Raises UserError for damaged folders and incompatible label maps.

    check_files: False where another rank checks that the shards are there.
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
    whole = _selected(read(settings.path), settings)
    first, dev = whole, None
    if num_dev := settings.num_dev(whole.num_samples):
        # The tail is held out, as the ViT paper's code cuts it.
        rows = np.arange(whole.num_samples)
        first = whole.subset(rows[:-num_dev], name=f"without the last {num_dev}")
        dev = whole.subset(rows[-num_dev:], name=f"last {num_dev}")
    parts = [first, *(read(mixed_in.path) for mixed_in in settings.mixture)]
    for number, part in enumerate(parts[1:]):
        if part.label_map_sha256 != first.label_map_sha256:
            raise UserError(
                f"its label map has {_classes(part)} and differs from that of {settings.path}, "
                f"which has {_classes(first)}",
                where=f"data.mixture[{number}].path",
                next_step="prepare both with the same labels.space",
            )
    _check_cache(parts, settings.remote)
    shares = [round(mixed_in.share * MILLION) for mixed_in in settings.mixture]
    orders = tuple(
        SampleOrder(shard_lengths=part.shard_lengths, fingerprint=part.fingerprint, seed=seed)
        for part in parts
    )
    shares = [MILLION - sum(shares), *shares]
    order = TrainingOrder(parts=orders, shares=tuple(shares), views=settings.views)
    fingerprint = first.fingerprint
    if len(parts) > 1 or settings.views > 1:
        facts = [[part.fingerprint for part in parts], order.shares, order.views]
        fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return TrainingSet(
        num_samples=sum(part.num_samples for part in parts),
        classes=first.classes,
        label_map_sha256=first.label_map_sha256,
        fingerprint=fingerprint,
        parts=tuple(parts),
        order=order,
        dev=dev,
    )


def class_names(settings: DataSettings) -> tuple[str, ...]:
    """The classes of `data.path`, read without its index. Raises UserError."""
    if settings.is_streamed:
        return tuple(map(str, range(settings.webdataset.num_classes or 0)))
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
    tars = tars_of_split(Path(settings.path), settings.train_split, where="data.train_split")
    num_samples, classes = settings.webdataset.num_samples or 0, class_names(settings)
    facts = ["webdataset", [tar.name for tar in tars], num_samples, classes]
    # As in a manifest.
    names = json.dumps(classes, ensure_ascii=False, separators=(",", ":"))
    return TrainingSet(
        num_samples=num_samples,
        classes=classes,
        label_map_sha256=hashlib.sha256(names.encode()).hexdigest(),
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        tars=tuple(tars),
    )


def _selected(index: SplitIndex, settings: DataSettings) -> SplitIndex:
    """The samples that `first_percent`, `only_classes` and `only_keys` leave of a split."""
    if settings.first_percent < 100:
        num = settings.num_first(index.num_samples)
        index = index.subset(np.arange(num), name=f"first {num}")
    if settings.only_classes:
        unknown = [name for name in settings.only_classes if name not in index.classes]
        if unknown:
            known = f", such as {index.classes[0]!r}" if index.classes else "; it has none"
            raise UserError(
                f"no class {unknown[0]!r}",
                where="data.only_classes",
                allowed=f"class names in {index.folder / MANIFEST_NAME}{known}",
                next_step=did_you_mean(unknown[0], index.classes),
            )
        labels = [index.classes.index(name) for name in settings.only_classes]
        rows = np.flatnonzero(np.isin(index.label, labels))
        if not len(rows):
            raise UserError(
                f"none of the {index.num_samples} samples has one of these classes",
                where="data.only_classes",
                next_step="choose other classes, or a larger first_percent",
            )
        index = index.subset(rows, name=f"labels {sorted(set(labels))}")
    if settings.only_keys is None:
        return index
    return choose_by_key(index, settings.only_keys)


def _check_cache(parts: Sequence[SplitIndex], remote_settings: RemoteSettings) -> None:
    """Raise UserError if the cache cannot hold the shards that the order reads at once."""
    needed = 0
    for part in parts:
        sizes = [each.num_bytes for each in part.shards if isinstance(each, RemoteFile)]
        needed += sum(sorted(sizes)[-BLOCK_SHARDS:])
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
