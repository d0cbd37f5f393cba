"""Grouping a corpus on disk equals comparing all pairs."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.duplicates import search
from data_prep.duplicates.descriptors import (
    DESCRIPTOR,
    SIDE_PX,
    are_duplicates,
    has_contrast,
    picture_descriptors,
)
from data_prep.duplicates.partitions import Parts, sorted_rows
from data_prep.duplicates.search import find_duplicates

Row = tuple[int, bytes | None, bytes | None]
# Several pieces of everything: parts of a few rows, batches of three rows, few pairs.
TINY = {"PART_BYTES": 700, "BATCH_ROWS": 3, "MAX_PAIRS": 5}


def write_survey(folder: Path, rows: list[Row], *, num_files: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(num_files):
        ranks, hashes, descriptors = [], [], []
        for rank, content, descriptor in rows[number::num_files]:
            ranks.append(rank)
            hashes.append(content)
            descriptors.append(descriptor)
        table = pa.table(
            {
                "rank": pa.array(ranks, pa.uint64()),
                "reason": pa.array([None] * len(ranks), pa.string()),
                "content_hash": pa.array(hashes, pa.binary(32)),
                "descriptor": pa.array(descriptors, pa.binary(DESCRIPTOR.itemsize)),
            }
        )
        paths.append(folder / f"{number}.arrow")
        with pa.OSFile(str(paths[-1]), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return paths


def found(
    rows: list[Row], folder: Path, *, similar: bool, num_files: int = 2, max_kept: int = 1
) -> list[Any]:
    survey = write_survey(folder / "survey", rows, num_files=num_files)
    output, scratch = folder / "leaving.arrow", folder / "scratch"
    count = find_duplicates(
        survey, similar=similar, scratch=scratch, output=output, max_kept=max_kept
    )
    with pa.OSFile(str(output)) as file, pa.ipc.open_file(file) as reader:
        leaving = reader.read_all().to_pylist()
    assert count == len(leaving)
    assert list((folder / "scratch").iterdir()) == []
    return [tuple(row.values()) for row in leaving]


def all_pairs(rows: list[Row], *, similar: bool) -> list[Any]:
    """The definition, pair by pair."""
    leaving = []
    whole = sorted(row for row in rows if row[1] and (row[2] or not similar))
    for i, (rank, content, raw) in enumerate(whole):
        equal = [r for r, other, _ in whole[:i] if other == content]
        if equal:
            leaving.append((rank, equal[0], "exact"))
        elif similar and has_contrast(described(raw))[0]:
            same = [r for r, _, other in whole[:i] if other == raw]
            others = described(b"".join(other or b"" for _, _, other in whole[:i]))
            matches = are_duplicates(others, described(raw).repeat(i)).tolist()
            alike = [row[0] for row, match in zip(whole[:i], matches, strict=True) if match]
            if same or alike:
                leaving.append((rank, (same or alike)[0], "similar"))
    return leaving


def described(raw: bytes | None) -> np.ndarray:
    assert raw is not None
    return np.frombuffer(raw, DESCRIPTOR)


def pictures(num: int, *, seed: int) -> np.ndarray:
    """Smooth noise: [num, SIDE_PX, SIDE_PX]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (num, 8, 8), dtype=np.uint8)
    return coarse.repeat(SIDE_PX // 8, axis=1).repeat(SIDE_PX // 8, axis=2)


@st.composite
def corpora(draw: st.DrawFn) -> list[Row]:
    """Pictures with noisy and mirrored versions, blanks, equal bytes, rejected rows."""
    originals = pictures(4, seed=draw(st.integers(0, 3)))
    originals[3] //= 64
    num = draw(st.integers(0, 14))
    ranks = draw(st.lists(st.integers(0, 2**64 - 1), min_size=num, max_size=num, unique=True))
    rows: list[Row] = []
    for rank in ranks:
        kind = draw(st.integers(0, 3))
        picture = originals[kind].astype(int)
        noise = draw(st.sampled_from([0, 0, 1, 10, 25, 40, 60]))
        random_state = np.random.default_rng(draw(st.integers(0, 5)))
        picture = picture + random_state.integers(-noise, noise + 1, picture.shape)
        if draw(st.booleans()):
            picture = picture[:, ::-1]
        raw = picture_descriptors(picture.clip(0, 255).astype(np.uint8)[None]).tobytes()
        # A picture saved in one of two ways; equal bytes always show the same picture.
        content = blake3(raw + bytes([draw(st.integers(0, 1))])).digest()
        whole = draw(st.integers(0, 9)) > 0
        rows.append((rank, content if whole else None, raw if whole else None))
    return rows


@given(rows=corpora(), similar=st.booleans(), num_files=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_result_equals_comparing_all_pairs(rows: list[Row], similar: bool, num_files: int) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(search, **TINY):
        result = found(rows, Path(folder), similar=similar, num_files=num_files)
    assert result == all_pairs(rows, similar=similar)


def copies(num: int, *, seed: int) -> list[Row]:
    """`num` pictures; every third is a mirrored, noisy copy of the one before."""
    originals = pictures(num, seed=seed)
    noise = np.random.default_rng(seed).integers(-4, 5, originals.shape)
    noisy = (originals.astype(int) + noise).clip(0, 255).astype(np.uint8)
    originals[2::3] = noisy[1::3][: len(originals[2::3]), :, ::-1]
    descriptors = picture_descriptors(originals)
    return [(7 * i, i.to_bytes(32, "big"), descriptors[i].tobytes()) for i in range(num)]


def test_result_is_independent_of_order_files_and_sizes(tmp_path: Path) -> None:
    rows = copies(300, seed=0)
    expected = [(7 * i, 7 * (i - 1), "similar") for i in range(2, 300, 3)]
    files = set()
    for number, num_files in enumerate((1, 3, 7)):
        random.Random(number).shuffle(rows)
        with mock.patch.multiple(search, PART_BYTES=(8 << number) << 10):
            assert (
                found(rows, tmp_path / f"{number}", similar=True, num_files=num_files) == expected
            )
        files.add((tmp_path / f"{number}/leaving.arrow").read_bytes())
    assert len(files) == 1


def test_large_families_are_settled_in_few_comparisons(tmp_path: Path) -> None:
    """One picture saved 600 times with small differences, another 600 times identically."""
    both = pictures(2, seed=1).astype(int)
    noise = np.random.default_rng(0).integers(-3, 4, (600, SIDE_PX, SIDE_PX))
    varied = picture_descriptors((both[0] + noise).clip(0, 255).astype(np.uint8))
    alike = picture_descriptors(both[1:].astype(np.uint8).repeat(600, axis=0))
    rows: list[Row] = [
        (rank, rank.to_bytes(32, "big"), descriptor.tobytes())
        for rank, descriptor in enumerate([*varied, *alike])
    ]
    compared = 0

    def counting(left: np.ndarray, right: np.ndarray, *, mirrored: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(left)
        return real(left, right, mirrored=mirrored)

    real = search.pictures_correlate
    with mock.patch.object(search, "pictures_correlate", counting):
        result = found(rows, tmp_path, similar=True)
    assert result == [(rank, 600 * (rank // 600), "similar") for rank in range(1200) if rank % 600]
    assert compared < 600 * 600 / 8


def test_candidates_are_compared_until_one_matches(tmp_path: Path) -> None:
    """All are candidates, but only pictures of one group of seven match: 0, 7, 14 ..."""
    noise = np.random.default_rng(0).integers(-3, 4, (50, SIDE_PX, SIDE_PX))
    varied = picture_descriptors((pictures(1, seed=2) + noise).clip(0, 255).astype(np.uint8))
    groups = {descriptor.tobytes(): i % 7 for i, descriptor in enumerate(varied)}

    def same_group(left: np.ndarray, right: np.ndarray, *, mirrored: np.ndarray) -> np.ndarray:
        return np.array(
            [groups[a.tobytes()] == groups[b.tobytes()] for a, b in zip(left, right, strict=True)]
        )

    rows: list[Row] = [(i, i.to_bytes(32, "big"), d.tobytes()) for i, d in enumerate(varied)]
    with mock.patch.object(search, "pictures_correlate", same_group):
        result = found(rows, tmp_path, similar=True)
    assert result == [(i, i % 7, "similar") for i in range(7, 50)]


@pytest.mark.parametrize("part_bytes", [700, 8 << 20])
def test_equal_descriptors_have_several_originals(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them may show something else at higher resolution."""
    monkeypatch.setattr(search, "PART_BYTES", part_bytes)
    same, other = (d.tobytes() for d in picture_descriptors(pictures(2, seed=3)))
    near = copies(3, seed=5)
    rows: list[Row] = [(100 + i, bytes([65 + i]) * 32, same) for i in range(8)]
    rows += [(200, b"x" * 32, other), *near]
    result = found(rows, tmp_path, similar=True, max_kept=4)
    kept = {i: [100 + j for j in range(min(i, 4))] for i in range(1, 8)}
    expected = [(100 + i, original, "similar") for i, lowest in kept.items() for original in lowest]
    assert result == [(near[2][0], near[1][0], "similar"), *expected]


def test_exact_copies_need_no_descriptors(tmp_path: Path) -> None:
    rows: list[Row] = [(3, b"a" * 32, None), (1, b"a" * 32, None), (2, None, None)]
    assert found(rows, tmp_path, similar=False) == [(3, 1, "exact")]


def test_an_empty_survey_gives_an_empty_list(tmp_path: Path) -> None:
    assert found([], tmp_path, similar=True) == []


@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_more_rows_than_memory_are_sorted(part_bytes: int, tmp_path: Path) -> None:
    dtype = np.dtype([("a", "<u8"), ("b", "<u8")])
    rows = np.random.default_rng(0).integers(0, 50, (500, 2), dtype=np.uint64).view(dtype)[:, 0]
    parts = Parts(tmp_path / "rows", dtype, num=3)
    parts.add(rows, np.arange(500) % 3)
    pieces = list(sorted_rows(parts, tmp_path / "sorted", by=("a", "b"), part_bytes=part_bytes))
    assert np.array_equal(np.concatenate(pieces), np.sort(rows, order=("a", "b")))
    assert (len(pieces) > 1) == (part_bytes == 64)
    for before, after in zip(pieces, pieces[1:], strict=False):
        assert before["a"].max() < after["a"].min()
