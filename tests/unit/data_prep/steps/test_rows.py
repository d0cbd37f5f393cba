"""The seeded order of rows, unique keys, and what a class holds out."""

from __future__ import annotations

import hashlib
import os
import random
import re

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.protocol import Input
from data_prep.steps.list_inputs import make_key, rows_table
from data_prep.steps.plan_shards import _ordered, held_out

NAMES = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\udcff\udc80/.-_aA"), min_size=1, max_size=120
)


def make_input(path: str, *, class_name: str = "cat", split: str = "train") -> Input:
    name = path.rpartition(".")[0] or path
    return Input(path=path, split=split, class_name=class_name, name=name, num_bytes=1)


def ordered(inputs: list[Input], *, batch: int, seed: int = 0) -> list[tuple[bytes, str]]:
    """(path, key) in stored order."""
    parts = [
        rows_table(inputs[start : start + batch], seed=seed)
        for start in range(0, len(inputs), batch)
    ]
    rows = pa.concat_tables([*parts, rows_table([], seed=0)])
    rows, order = _ordered(rows)
    return [(row["path"], row["key"]) for row in rows.take(order).to_pylist()]


@settings(deadline=None, max_examples=60)
@given(st.lists(NAMES, unique=True, max_size=60), st.integers(1, 20))
def test_order_and_keys_do_not_depend_on_the_order_of_listing(names: list[str], batch: int) -> None:
    inputs = [make_input(name) for name in names]
    whole = ordered(inputs, batch=1000)
    shuffled = random.Random(batch).sample(inputs, len(inputs))
    assert ordered(shuffled, batch=batch) == whole
    assert sorted(path for path, _ in whole) == sorted(map(os.fsencode, names))
    keys = [key for _, key in whole]
    assert len({key.lower() for key in keys}) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,70}", key) for key in keys)


def test_order_is_that_of_sha256_written_out() -> None:
    inputs = [make_input(f"{i}.jpg") for i in range(50)]
    rows = ordered(inputs, batch=7, seed=5)
    expected = sorted(
        range(50), key=lambda i: hashlib.sha256(f"order\0{5}\0train-cat-{i}".encode()).digest()
    )
    assert [path for path, _ in rows] == [f"{i}.jpg".encode() for i in expected]
    other = ordered(inputs, batch=7, seed=6)
    assert other != rows and sorted(other) == sorted(rows)


def test_a_repeated_path_is_one_sample() -> None:
    listed = rows_table([make_input("a.jpg"), make_input("b.jpg"), make_input("a.jpg")], seed=0)
    rows, _ = _ordered(listed)
    assert rows["reason"].to_pylist() == [None, None, "duplicate_path"]


def test_plain_names_stay_readable_and_others_get_a_hash() -> None:
    assert make_key("n01440764", "n01440764_10026", path="p") == "n01440764-n01440764_10026"
    assert re.fullmatch(r"cat-a_b-[0-9a-f]{16}", make_key("cat", "a b", path="p"))
    assert make_key("cat", "a b", path="p") != make_key("cat", "a b", path="q")
    # A name that looks hashed gets a hash of its own, so collisions cannot be forged.
    forged = make_key("cat", "a b", path="p").removeprefix("cat-")
    assert make_key("cat", forged, path="q") != make_key("cat", "a b", path="p")


def test_each_class_holds_out_the_rows_with_its_smallest_hashes() -> None:
    random_numbers = np.random.default_rng(0)
    class_of = random_numbers.integers(0, 5, 300)
    hashes = random_numbers.integers(0, 1 << 63, 300).astype(np.uint64)
    taken = held_out(class_of, hashes, fraction=0, num=7)
    for number in range(5):
        own = sorted(hashes[class_of == number].tolist())
        assert sorted(hashes[taken & (class_of == number)].tolist()) == own[:7]
