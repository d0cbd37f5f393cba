from __future__ import annotations

import hashlib
import random
import re

from hypothesis import given
from hypothesis import strategies as st

from data_prep.sample_order import MAX_KEY_LENGTH, held_out, make_keys, shuffled

KEYS = st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=40)
# Surrogates stand for bytes that are not UTF-8; Linux allows all but "/" and NUL in a name.
NAMES = st.text(
    st.one_of(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]),
        st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    ),
    min_size=1,
    max_size=120,
)


@given(KEYS, st.integers(0, 2**40))
def test_order_is_a_permutation_of_every_sample(keys: list[str], seed: int) -> None:
    assert sorted(shuffled(keys, seed=seed)) == list(range(len(keys)))


@given(KEYS, st.integers(0, 9), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_input_order(
    keys: list[str], seed: int, rng: random.Random
) -> None:
    other = rng.sample(keys, len(keys))
    assert [keys[i] for i in shuffled(keys, seed=seed)] == [
        other[i] for i in shuffled(other, seed=seed)
    ]


def test_order_is_that_of_sha256_written_out() -> None:
    keys = [f"train-cat-{i}" for i in range(50)]
    slow = sorted(keys, key=lambda k: hashlib.sha256(f"order\x007\x00{k}".encode()).hexdigest())
    assert [keys[i] for i in shuffled(keys, seed=7)] == slow
    assert shuffled(keys, seed=7) != shuffled(keys, seed=8)


@given(st.lists(NAMES, unique=True, max_size=30))
def test_keys_are_unique_short_and_without_dots(names: list[str]) -> None:
    parts = [("train", name[:3], f"train/{name[:3]}/{name}.jpg") for name in names]
    keys = make_keys(parts)
    assert len({key.lower() for key in keys}) == len(names)
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9_-]+", key) and len(key) <= MAX_KEY_LENGTH


def test_plain_names_stay_readable_and_colliding_ones_get_a_hash() -> None:
    parts = [("train", "cat", f"cat/{name}") for name in ("a.jpg", "a.png", "A.png", "b.jpg")]
    keys = make_keys(parts)
    assert keys[3] == "train-cat-b"
    assert all(re.fullmatch(r"train-cat-[aA]-[0-9a-f]{16}", key) for key in keys[:3])
    assert make_keys(parts[::-1]) == keys[::-1]


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 40)), st.floats(0, 0.99))
def test_holdout_takes_its_share_of_each_class_and_never_all(
    sizes: dict[str, int], fraction: float
) -> None:
    classes = {name: [f"{name}/{i}" for i in range(num)] for name, num in sizes.items()}
    chosen = held_out(classes, fraction=fraction, seed=0)
    for paths in classes.values():
        num = len(chosen.intersection(paths))
        assert num < len(paths)
        assert num == min(len(paths) - 1, int(len(paths) * fraction + 0.5))
