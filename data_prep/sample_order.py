"""Keys, held-out samples and the order of samples: pure functions of names and a seed.

Owns: hashes that decide. Leaves out: files.
Our own hash and not a generator of numpy or Python: their streams may change between versions,
and the same input has to give the same bytes years later.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

# A tar header has 100 bytes for a name; the key shares them with a suffix like ".webp".
MAX_KEY_LENGTH = 88
HASH_LENGTHS = (16, 64)


def seeded_hash(text: str, *, seed: int, purpose: str) -> bytes:
    """32 bytes that look random, the same on every machine."""
    return hashlib.sha256(f"{purpose}\0{seed}\0".encode() + os.fsencode(text)).digest()


def shuffled(keys: Sequence[str], *, seed: int) -> list[int]:
    """Positions of `keys` in the order in which they are stored; the input order is irrelevant."""
    assert len(set(keys)) == len(keys)
    hashes = [seeded_hash(key, seed=seed, purpose="order") for key in keys]
    return sorted(range(len(keys)), key=lambda i: (hashes[i], keys[i]))


def held_out(
    paths_of_class: Mapping[str, Sequence[str]], *, fraction: float, seed: int
) -> set[str]:
    """Paths of each class that leave the training split, rounded half up, never a whole class."""
    chosen: set[str] = set()
    for paths in paths_of_class.values():
        num = min(int(fraction * len(paths) + 0.5), len(paths) - 1)
        ranked = sorted(paths, key=lambda p: seeded_hash(p, seed=seed, purpose="holdout"))
        chosen.update(ranked[:num])
    return chosen


def make_keys(parts: Sequence[tuple[str, str, str]]) -> list[str]:
    """One key per (split, class, path): `split-class-stem`, with a hash where that is not unique.

    Keys hold A-Z a-z 0-9 _ - only and differ even where upper and lower case are one. The hash is
    of the path, so a key does not depend on the order of its neighbours.
    """
    keys = []
    for split, class_name, path in parts:
        stem = os.path.splitext(os.path.basename(path))[0]
        raw = f"{split}-{class_name}-{stem}"
        key = re.sub(r"[^A-Za-z0-9_-]", "_", raw)
        altered = key != raw or len(key) > MAX_KEY_LENGTH
        keys.append(_with_hash(key, path, HASH_LENGTHS[0]) if altered else key)
    for length in HASH_LENGTHS:
        counts = Counter(key.lower() for key in keys)
        keys = [
            _with_hash(key, path, length) if counts[key.lower()] > 1 else key
            for key, (_, _, path) in zip(keys, parts, strict=True)
        ]
    assert len({key.lower() for key in keys}) == len(keys)
    return keys


def _with_hash(key: str, path: str, length: int) -> str:
    suffix = hashlib.sha256(os.fsencode(path)).hexdigest()[:length]
    return f"{key[: MAX_KEY_LENGTH - length - 1]}-{suffix}"
