"""Searching by shared keys equals comparing all pairs."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.duplicates import search
from data_prep.duplicates.descriptors import (
    SIDE_PX,
    are_duplicates,
    has_contrast,
    picture_descriptors,
)
from data_prep.duplicates.search import first_equal, first_similar


def all_pairs(descriptors: np.ndarray) -> list[int]:
    """Apply the definition, pair by pair."""
    first = []
    for i in range(len(descriptors)):
        before, own = descriptors[:i], descriptors[[i]].repeat(i)
        same = np.flatnonzero(before == own)
        alike = np.flatnonzero(are_duplicates(before, own))
        compared = has_contrast(descriptors[[i]])[0]
        first.append(int([*same, *alike, i][0]) if compared else i)
    return first


def pictures(num: int, *, seed: int) -> np.ndarray:
    """Smooth noise: [num, SIDE_PX, SIDE_PX]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (num, 8, 8), dtype=np.uint8)
    return coarse.repeat(SIDE_PX // 8, axis=1).repeat(SIDE_PX // 8, axis=2)


@st.composite
def corpora(draw: st.DrawFn) -> np.ndarray:
    """Descriptors of pictures, of noisy and mirrored versions, and of blank ones."""
    originals = pictures(4, seed=draw(st.integers(0, 3)))
    originals[3] //= 64
    made = []
    for _ in range(draw(st.integers(0, 14))):
        picture = originals[draw(st.integers(0, 3))].astype(int)
        noise = draw(st.sampled_from([0, 0, 1, 10, 25, 40, 60]))
        random_state = np.random.default_rng(draw(st.integers(0, 5)))
        picture = picture + random_state.integers(-noise, noise + 1, picture.shape)
        made.append(picture[:, ::-1] if draw(st.booleans()) else picture)
    stacked = np.array(made).reshape(-1, SIDE_PX, SIDE_PX)
    return picture_descriptors(stacked.clip(0, 255).astype(np.uint8))


@given(descriptors=corpora(), max_pairs=st.sampled_from([5, 1 << 17]))
@settings(max_examples=60, deadline=None)
def test_result_equals_comparing_all_pairs(descriptors: np.ndarray, max_pairs: int) -> None:
    with mock.patch.multiple(search, MAX_PAIRS=max_pairs, BATCH_ROWS=3):
        assert first_similar(descriptors).tolist() == all_pairs(descriptors)


@pytest.mark.parametrize("num", [0, 1, 300])
def test_every_copy_in_a_larger_corpus_is_found(num: int) -> None:
    """Every third picture is a mirrored, noisy copy of the one before."""
    originals = pictures(num, seed=0)
    noise = np.random.default_rng(0).integers(-4, 5, originals.shape)
    noisy = (originals.astype(int) + noise).clip(0, 255).astype(np.uint8)
    originals[2::3] = noisy[1::3][: len(originals[2::3]), :, ::-1]
    found = first_similar(picture_descriptors(originals))
    assert found.tolist() == [i - 1 if i % 3 == 2 else i for i in range(num)]


def test_large_families_are_settled_in_few_comparisons() -> None:
    """One picture saved 600 times with small differences, another 600 times identically."""
    both = pictures(2, seed=1).astype(int)
    noise = np.random.default_rng(0).integers(-3, 4, (600, SIDE_PX, SIDE_PX))
    varied = picture_descriptors((both[0] + noise).clip(0, 255).astype(np.uint8))
    alike = picture_descriptors(both[1:].astype(np.uint8).repeat(600, axis=0))
    compared = 0

    def counting(left: np.ndarray, right: np.ndarray, *, mirrored: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(left)
        return real(left, right, mirrored=mirrored)

    real = search.pictures_correlate
    with mock.patch.object(search, "pictures_correlate", counting):
        found = first_similar(np.concatenate([varied, alike]))
    assert found.tolist() == [600 * (position // 600) for position in range(1200)]
    assert compared < 600 * 600 / 8


def test_candidates_are_compared_until_one_matches() -> None:
    """All are candidates, but only pictures of one group of seven match: 0, 7, 14 ..."""
    noise = np.random.default_rng(0).integers(-3, 4, (50, SIDE_PX, SIDE_PX))
    varied = picture_descriptors((pictures(1, seed=2) + noise).clip(0, 255).astype(np.uint8))
    groups = {descriptor.tobytes(): i % 7 for i, descriptor in enumerate(varied)}

    def same_group(left: np.ndarray, right: np.ndarray, *, mirrored: np.ndarray) -> np.ndarray:
        return np.array(
            [groups[a.tobytes()] == groups[b.tobytes()] for a, b in zip(left, right, strict=True)]
        )

    with mock.patch.object(search, "pictures_correlate", same_group):
        assert first_similar(varied).tolist() == [i % 7 for i in range(50)]


def test_equal_rows_match_the_first() -> None:
    rows = np.random.default_rng(0).integers(0, 3, (200, 3), dtype=np.uint64)
    listed = rows.tolist()
    assert first_equal(rows).tolist() == [listed.index(row) for row in listed]
