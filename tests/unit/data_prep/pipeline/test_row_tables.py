"""The seeded order of rows, unique keys, and the external sort."""

from __future__ import annotations

import hashlib
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.pipeline.row_tables import (
    bucket,
    make_key,
    rows_table,
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
