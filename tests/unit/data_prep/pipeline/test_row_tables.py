"""The seeded order of rows, unique keys, and the external sort."""

from __future__ import annotations

import hashlib
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep.pipeline.row_tables as row_tables
from data_prep.pipeline.row_tables import (
    bucket,
    make_key,
    read_table,
    rows_table,
    smallest,
    write_table,
)
from data_prep.sources.protocol import Input

NAMES = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\udcff\udc80/.-_aA"), min_size=1, max_size=120
)


def make_input(path: str, *, class_name: str = "cat", split: str = "train") -> Input:
    name = path.rpartition(".")[0] or path
    return Input(path=path, split=split, class_name=class_name, name=name, num_bytes=1)


def sort_through_disk(
    inputs: list[Input], folder: Path, *, run_rows: int, num_buckets: int, seed: int = 0
) -> list[tuple[bytes, str]]:
    """(path, key) in stored order."""
    folder.mkdir(exist_ok=True)
    runs = []
    for start in range(0, len(inputs), run_rows):
        runs.append(folder / f"{start}.arrow")
        table = rows_table(inputs[start : start + run_rows], seed=seed, holds_out=True)
        write_table(table, runs[-1], temporary=folder / "temporary")
    rows = []
    for number in range(num_buckets):
        table = bucket(runs, number=number, of=num_buckets)
        rows += list(
            zip(table.column("path").to_pylist(), table.column("key").to_pylist(), strict=True)
        )
    return rows


@settings(deadline=None, max_examples=60)
@given(st.lists(NAMES, unique=True, max_size=60), st.integers(1, 20), st.integers(1, 7))
def test_order_and_keys_do_not_depend_on_runs_and_buckets(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], run_rows: int, num_buckets: int
) -> None:
    inputs = [make_input(name) for name in names]
    folder = tmp_path_factory.mktemp("runs")
    whole = sort_through_disk(inputs, folder / "a", run_rows=1000, num_buckets=1)
    shuffled = random.Random(run_rows).sample(inputs, len(inputs))
    parts = sort_through_disk(shuffled, folder / "b", run_rows=run_rows, num_buckets=num_buckets)
    assert parts == whole
    assert sorted(path for path, _ in whole) == sorted(map(os.fsencode, names))
    keys = [key for _, key in whole]
    assert len({key.lower() for key in keys}) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,70}", key) for key in keys)


def test_order_is_that_of_sha256_written_out(tmp_path: Path) -> None:
    inputs = [make_input(f"{i}.jpg") for i in range(50)]
    rows = sort_through_disk(inputs, tmp_path, run_rows=7, num_buckets=3, seed=5)
    expected = sorted(
        range(50), key=lambda i: hashlib.sha256(f"order\0{5}\0train-cat-{i}".encode()).digest()
    )
    assert [path for path, _ in rows] == [f"{i}.jpg".encode() for i in expected]
    other = sort_through_disk(inputs, tmp_path / "6", run_rows=7, num_buckets=3, seed=6)
    assert other != rows and sorted(other) == sorted(rows)


def test_plain_names_stay_readable_and_others_get_a_hash() -> None:
    assert make_key("n01440764", "n01440764_10026", path="p") == "n01440764-n01440764_10026"
    assert re.fullmatch(r"cat-a_b-[0-9a-f]{16}", make_key("cat", "a b", path="p"))
    assert make_key("cat", "a b", path="p") != make_key("cat", "a b", path="q")
    # A name that looks hashed gets a hash of its own, so collisions cannot be forged.
    forged = make_key("cat", "a b", path="p").removeprefix("cat-")
    assert make_key("cat", forged, path="q") != make_key("cat", "a b", path="p")


def test_names_unlike_only_in_case_or_suffix_get_own_keys(tmp_path: Path) -> None:
    inputs = [make_input(name) for name in ("a.jpg", "A.jpg", "a.png", "b.jpg")]
    rows = dict(sort_through_disk(inputs, tmp_path, run_rows=2, num_buckets=5))
    assert rows[b"b.jpg"] == "cat-b"
    assert all(re.fullmatch(r"cat-[aA]-[0-9a-f]{16}", rows[n]) for n in (b"a.jpg", b"A.jpg"))


def test_a_table_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    table = rows_table([make_input("a.jpg")], seed=0, holds_out=True)
    with pytest.raises(FileNotFoundError):
        write_table(table, tmp_path / "t.arrow", temporary=tmp_path / "none" / "t")
    assert not list(tmp_path.iterdir())
    write_table(table, tmp_path / "t.arrow", temporary=tmp_path / "t")
    assert read_table(tmp_path / "t.arrow").equals(table)
    assert [path.name for path in tmp_path.iterdir()] == ["t.arrow"]


def test_bucket_size_stays_near_a_run_whatever_the_corpus() -> None:
    assert row_tables.num_buckets(0) == 1
    assert row_tables.num_buckets(row_tables.BUCKET_ROWS + 1) == 2
    assert row_tables.num_buckets(14_200_000) == 1734


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1)), max_size=80), st.data())
def test_radix_selection_finds_the_smallest_of_each_class(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    rows = list({hash_: (label, hash_) for label, hash_ in rows}.values())
    of_label = [sorted(h for label, h in rows if label == k) for k in range(4)]
    wanted = [data.draw(st.integers(0, len(hashes))) for hashes in of_label]
    folder = tmp_path_factory.mktemp("parts")
    paths = []
    for start in range(0, len(rows), 30):
        paths.append(folder / f"{start}.npy")
        np.save(paths[-1], np.array(rows[start : start + 30], [("class", "<u4"), ("hash", "<u8")]))
    found = smallest(paths, np.array(wanted))
    for k, hashes in enumerate(of_label):
        if wanted[k]:
            assert [h for h in hashes if h <= int(found[k])] == hashes[: wanted[k]]
