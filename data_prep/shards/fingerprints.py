"""Compute fingerprints: hashes over samples, their order and division into tars, and the label map.

Owns: what they contain, in which order.
Leaves out: where they are stored (`shards.index`) and compared (`verification`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from vitscale.data.index import SplitEntry


def label_map_sha256(classes: Sequence[str]) -> str:
    """Hash of the class names in label order."""
    text = json.dumps(list(classes), ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def split_fingerprint(content: Iterable[np.ndarray], *, shard_lengths: Sequence[int]) -> str:
    """Hash of a split: its samples in order, then the samples per tar.

    content: pieces of [samples, 36] uint8, an image's BLAKE3 and its label (uint32, little-endian).
    """
    digest = hashlib.sha256()
    for piece in content:
        assert piece.dtype == np.uint8 and piece.shape[1:] == (36,)
        digest.update(piece.tobytes())
    digest.update(b"".join(int(length).to_bytes(8, "little") for length in shard_lengths))
    return digest.hexdigest()


def sample_bytes(rows: pa.Table) -> np.ndarray:
    """The input of `split_fingerprint`, from rows of the index."""
    hashes = np.frombuffer(b"".join(rows.column("blake3").to_pylist()), np.uint8)
    labels = rows.column("label").to_numpy().astype("<u4").view(np.uint8)
    return np.hstack([hashes.reshape(-1, 32), labels.reshape(-1, 4)])


def folder_fingerprint(splits: Mapping[str, SplitEntry], *, classes: Sequence[str]) -> str:
    """Hash of the whole corpus as stored."""
    parts = {name: entry.fingerprint for name, entry in splits.items()}
    text = json.dumps([parts, label_map_sha256(classes)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
