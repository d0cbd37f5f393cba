"""List the samples of tars that nobody indexed, for evaluations, which need exactly all of them.

Reads headers and labels; at a URL also images that are smaller than a request is worth.
Leaves out: streaming for training (`stream`).
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.remote.index import HeaderFile
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.urls import Location, Url
from vitscale.data.tars.labels import IMAGE_SUFFIXES, LABEL_SUFFIX, MAX_LABEL_BYTES, TarLabels

SCAN_THREADS = 16
# A header, a short label and the next header.
WINDOW_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ScannedTars:
    """The samples of some tars, in stored order. Arrays have one entry per sample."""

    sizes: tuple[int, ...]
    """Bytes of each tar."""
    shard_of: np.ndarray
    """int32: number of the tar."""
    offset: np.ndarray
    """int64: first byte of the image."""
    length: np.ndarray
    """int64: bytes of the image."""
    label: np.ndarray
    """int32; -1 everywhere if there are no classes."""
    fingerprint: str
    """Hash of names, keys, places and labels."""


@dataclass(slots=True)
class _Sample:
    key: str
    offset: int = 0
    length: int = 0
    label: bytes | None = None


def scan_tars(
    tars: Sequence[Location], *, labels: TarLabels, remote_settings: RemoteSettings
) -> ScannedTars:
    """Raises UserError for a damaged tar, a sample without a label, or no sample at all."""

    def scanned(tar: Location) -> tuple[int, list[_Sample]]:
        try:
            with _opened(tar, remote_settings) as file:
                samples = _samples(file)
                return file.seek(0, io.SEEK_END), samples
        except UserError:
            raise
        except (OSError, tarfile.TarError, ValueError) as error:
            raise UserError(
                f"is not a readable tar ({error})", where=str(tar), next_step="get the file again"
            ) from None

    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        found = list(pool.map(scanned, tars))
    digest, values = hashlib.sha256(), []
    for number, (tar, (_, samples)) in enumerate(zip(tars, found, strict=True)):
        digest.update(str(tar).rpartition("/")[2].encode())
        for each in samples:
            label = _label(each, labels, tar=str(tar))
            values.append((number, each.offset, each.length, label))
            digest.update(f"\0{each.key}\0{each.offset}\0{each.length}\0{label}".encode())
    if not values:
        raise UserError("no images in these tars", where="data.val_split")
    table = np.array(values, dtype=np.int64)
    return ScannedTars(
        sizes=tuple(size for size, _ in found),
        shard_of=table[:, 0].astype(np.int32),
        offset=table[:, 1].copy(),
        length=table[:, 2].copy(),
        label=table[:, 3].astype(np.int32),
        fingerprint=digest.hexdigest(),
    )


def _opened(tar: Location, remote_settings: RemoteSettings) -> IO[bytes]:
    file: Any
    if isinstance(tar, Url):
        file = HeaderFile(tar, remote_settings=remote_settings)
    else:
        file = open(Path(tar), "rb", buffering=WINDOW_BYTES)
    return file


def _samples(file: IO[bytes]) -> list[_Sample]:
    """Samples with an image. Consecutive members with equal keys are one, as in webdataset."""
    from webdataset.tariterators import base_plus_ext

    samples = [_Sample("")]
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            key, suffix = base_plus_ext(member.name)
            tar.members = []  # type: ignore[attr-defined]  # else all of them stay in memory
            if key is None or not member.isreg() or member.sparse is not None:
                continue
            if key != samples[-1].key:
                samples.append(_Sample(key))
            if suffix.lower() in IMAGE_SUFFIXES:
                samples[-1].offset, samples[-1].length = member.offset_data, member.size
            elif suffix.lower() == LABEL_SUFFIX:
                content = tar.extractfile(member)
                assert content is not None
                samples[-1].label = content.read(MAX_LABEL_BYTES)
        # Python takes a cut tar, and a damaged header, for the end.
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("no end mark after its last member: cut or damaged")
    return [sample for sample in samples if sample.length]


def _label(sample: _Sample, labels: TarLabels, *, tar: str) -> int:
    try:
        label = labels.label(sample.label, key=sample.key, tar=tar)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"sample {sample.key!r} has no label ({error})",
            where=tar,
            next_step="set data.val_split=null for no evaluation, or correct the tar",
        ) from None
    return -1 if label is None else label
