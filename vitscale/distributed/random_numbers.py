"""Counter-based random numbers: pure functions of a key, equal on every rank and machine.

All are from SplitMix64 (Steele et al. 2014).
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np

# 2^64 divided by the golden ratio: the step of SplitMix64's counter.
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
Words = TypeVar("Words", int, np.ndarray)


def stream_key(*parts: object) -> int:
    """A 64-bit key from any printable parts; equal parts give equal keys on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def mix(value: Words) -> Words:
    """SplitMix64's output function: 64 bits in, 64 well-mixed bits out; of arrays, each element."""
    # Python's integers do not overflow, so they are cut to 64 bits; arrays wrap by themselves.
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class CounterRandom:
    """Uniform numbers as a function of (key, draw number): SplitMix64 from a given start."""

    def __init__(self, key: int) -> None:
        self._state = key

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """The next number in [low, high)."""
        self._state = (self._state + GOLDEN) & _MASK
        # The upper 53 bits are as many as a double holds exactly.
        return low + (high - low) * (mix(self._state) >> 11) * 2.0**-53


def permutation(num: int, *, key: int) -> np.ndarray:
    """A permutation of range(num), int64 [num], from `key` alone.

    Sorted SplitMix64 hashes rather than numpy's shuffle, whose stream may change between versions.
    """
    return np.argsort(splitmix(key, num), kind="stable")


def splitmix(start: int | np.ndarray, num: int) -> np.ndarray:
    """The first `num` outputs of SplitMix64 from each start, uint64 [..., num]."""
    steps = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix(np.asarray(start, np.uint64)[..., None] + steps)
