"""The plan of shards beside a slow one in plain Python, with any number of buckets and passes."""

import errno
import hashlib
import os
import random
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from data_prep.duplicates.equal import num_shared, repeated
from data_prep.sources.protocol import Container, Input, Source
from data_prep.steps import list_inputs, plan_shards
from data_prep.steps.list_inputs import hashed_key, make_key
from data_prep.steps.plan_shards import PLAN, REJECTED, ROWS, read_plan
from data_prep.steps.tars import split_of
from data_prep.steps.work import WorkFolder, open_work_folder
from tests.support.corpora.image_corpus import contents, corpus, prepared, run_of
from tests.support.tables import rows
from vitscale.config.errors import StorageError

NUM_INPUTS = 1000
# Small enough for several runs in a list, buckets of the order and passes over the lists.
SMALL_PARTS = {
    "data_prep.steps.list_inputs.BATCH_ROWS": 32,
    "data_prep.steps.listed_rows.BUCKET_BYTES": 40_000,
    "data_prep.steps.plan_shards.REJECTED_ROWS": 64,
    "data_prep.duplicates.equal.PASS_ROWS": 400,
    "data_prep.steps.plan_shards.PASS_ROWS": 400,
}


@pytest.fixture
def in_small_parts(monkeypatch):
    for name, value in SMALL_PARTS.items():
        monkeypatch.setattr(name, value)


def made_up(seed, *, splits):
    """Inputs as sources may give them: names equal in lower case, links, rejects, rare classes."""
    rng = random.Random(seed)
    inputs = []
    for number in range(NUM_INPUTS):
        # Squared, since classes of a corpus differ in size.
        class_name = f"class{int(40 * rng.random() ** 2)}"
        letters = "".join(rng.choice("aA") for _ in range(rng.randint(1, 10)))
        name = f"{letters}{number // 40}"
        item = Input(
            f"{class_name}/{number}/{name}.jpg",
            rng.choice(splits),
            class_name,
            name,
            rng.randint(1, 1000),
        )
        item.modified_ns = number
        item.inode = number + 1
        if rng.random() < 0.1:
            item.reason = rng.choice(["hidden", "other_name", "link_broken"])
        inputs.append(item)

    # The same file once more by another path, in its class and split or others.
    for item in rng.sample(inputs, 60):
        other = rng.choice(inputs)
        again = Input(
            f"{other.class_name}/../{item.path}",
            rng.choice(splits),
            rng.choice([item.class_name, item.class_name, other.class_name]),
            f"{item.name}-again{rng.randint(0, 5)}",
            item.num_bytes,
        )
        again.inode = item.inode
        again.modified_ns = NUM_INPUTS + len(inputs)
        inputs.append(again)

    # Another file of the same number, such as one of another disk.
    inputs[0].inode = inputs[1].inode
    rng.shuffle(inputs)
    return inputs


def planned(run, inputs):
    """Plan them; returns the rows of each shard, and the rejected ones."""

    class Listed(Source):
        has_label_values = False

        def containers(self):
            return [Container(str(start), "train") for start in range(0, 40)]

        def inputs(self, container):
            start = int(container.path)
            yield from inputs[start::40]

    work = WorkFolder(run)
    open_work_folder(work)
    work.open()
    opened = mock.Mock(side_effect=Listed)
    with (
        mock.patch.object(list_inputs, "open_source", opened),
        mock.patch.object(plan_shards, "open_source", opened),
    ):
        list_inputs.list_containers(work, list_inputs.CONTAINERS)
        for unit in list_inputs.list_units(work):
            list_inputs.list_inputs(work, unit)
        plan_shards.plan_shards(work, PLAN)

    batches = work.table(ROWS).to_batches()
    plan = read_plan(work)
    assert len(batches) == len(plan.units)
    shards = []
    for unit, num in zip(plan.units, plan.num_rows, strict=True):
        table = batches[plan.shards[unit][0]].to_pylist()
        assert len(table) == num
        shards.append((split_of(unit), table))
    return shards, work.table(REJECTED).to_pylist()


def slow_plan(run, inputs):
    """The same by sorted(), dicts and Counter; keys and labels are those of the row's number."""
    source = run.source

    def order(item):
        text = (
            f"order\0{run.seed}\0"
            + f"{item.split}-{item.class_name}-{item.name}".lower()
        )
        return hashlib.sha256(text.encode()).digest()[:16], item.path.encode()

    stored = sorted(inputs, key=order)
    reason = {item.path: item.reason for item in inputs}

    # Files with several paths.
    by_file = defaultdict(list)
    for item in stored:
        if item.reason is None:
            by_file[os.path.normpath(item.path)].append(item)
    for names in by_file.values():
        kept = next((item for item in names if item.split != "train"), names[0])
        same = len({item.class_name for item in names}) == 1
        for item in names:
            if len(names) > 1 and not (same and item is kept):
                reason[item.path] = "duplicate_path"

    sizes = Counter(item.class_name for item in inputs if reason[item.path] is None)
    for item in inputs:
        is_small = sizes[item.class_name] < source.min_images_per_class
        if reason[item.path] is None and is_small:
            reason[item.path] = "small_class"
    kept = [item for item in stored if reason[item.path] is None]
    classes = sorted({item.class_name for item in kept})

    # The smallest hashes of each class.
    split = {item.path: item.split for item in kept}
    of_class = defaultdict(list)
    for item in kept:
        if item.split == "train":
            text = f"holdout\0{run.seed}\0{item.path}"
            digest = hashlib.sha256(text.encode()).digest()[:8]
            of_class[item.class_name].append((digest, item.path))
    has_splits = any(item.split != "train" for item in inputs)
    for found in of_class.values():
        num = source.val_per_class
        if not num:
            num = 0 if has_splits else int(source.holdout_fraction * len(found) + 0.5)
        for _, path in sorted(found)[: min(num, len(found) - 1)]:
            split[path] = source.holdout_split

    # Keys that a file system without cases takes for one.
    key = {}
    for item in inputs:
        key[item.path] = make_key(item.class_name, item.name, path=item.path)
    counts = Counter(f"{item.split}-{key[item.path]}".lower() for item in inputs)
    for item in inputs:
        if counts[f"{item.split}-{key[item.path]}".lower()] > 1:
            key[item.path] = hashed_key(key[item.path], item.path)

    shards = []
    for name in sorted(set(split.values())):
        of_split = [item for item in kept if split[item.path] == name]
        num = run.shards.min_shards
        sizes = [(len(of_split) + number) // num for number in reversed(range(num))]
        for size in sizes:
            shard = [
                (item.path, key[item.path], classes.index(item.class_name))
                for item in of_split[:size]
            ]
            of_split = of_split[size:]
            shards.append((name, shard))
    rejected = [
        (item.path, item.split, item.class_name, reason[item.path])
        for item in stored
        if reason[item.path] is not None
    ]
    return shards, rejected


@rows("""
- [seed, splits, source]
- [0, [train], {holdout_fraction: 0.2}]
- [1, [train], {val_per_class: 3, min_images_per_class: 25, holdout_split: held}]
- [2, [train, train, val], {holdout_fraction: 0.2, min_images_per_class: 2}]
- [3, [train, train, val, test], {val_per_class: 40}]
""")
def test_plan_is_that_of_plain_python_in_any_parts(
    seed, splits, source, tmp_path, request
):
    inputs = made_up(seed, splits=splits)
    settings = {
        "source": source,
        "shards": {"min_shards": 3},
        "images": {"max_bad_fraction": 1},
    }
    run = run_of(tmp_path / "in", tmp_path / "whole", **settings)
    whole = planned(run, inputs)
    expected_shards, expected_rejected = slow_plan(run, inputs)
    shards = [
        (split, [(row["path"].decode(), row["key"], row["label"]) for row in table])
        for split, table in whole[0]
    ]
    assert shards == expected_shards
    rejected = [
        tuple(row[name] for name in ("path", "split", "class", "reason"))
        for row in whole[1]
    ]
    assert rejected == expected_rejected
    assert {row[3] for row in rejected} >= {"hidden", "duplicate_path"}

    # All columns, whatever the parts.
    request.getfixturevalue("in_small_parts")
    parts = planned(run_of(tmp_path / "in", tmp_path / "parts", **settings), inputs)
    assert parts == whole


def test_buckets_change_no_byte_of_the_output(tmp_path, request):
    images = corpus(tmp_path / "images", num=40)
    os.link(images / "cat/000.jpg", images / "cat/linked.jpg")
    (images / "cat/again.jpg").symlink_to("000.jpg")
    for number in range(40):
        (images / f"dog/{number}.txt").touch()
    settings = {"shards": {"min_shards": 4}, "source": {"holdout_fraction": 0.1}}
    prepared(images, tmp_path / "whole", images={"max_bad_fraction": 1}, **settings)

    request.getfixturevalue("in_small_parts")
    with mock.patch("data_prep.steps.listed_rows.BUCKET_BYTES", 3000):
        prepared(images, tmp_path / "parts", images={"max_bad_fraction": 1}, **settings)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def test_killed_at_any_file_it_resumes_to_the_same_bytes(
    tmp_path, monkeypatch, in_small_parts
):
    images = corpus(tmp_path / "images", num=20)
    settings = {"shards": {"min_shards": 2}, "source": {"holdout_fraction": 0.1}}
    prepared(images, tmp_path / "whole", **settings)

    # Each attempt dies at a file: at each once before it has its name, and once after.
    commit = WorkFolder.commit
    died_at = []

    def die(work, temporary, name):
        num = died_at.count(name)
        if num:
            commit(work, temporary, name)
        if num < 2:
            died_at.append(name)
            raise Killed

    monkeypatch.setattr(WorkFolder, "commit", die)
    while not (tmp_path / "killed").exists():
        with suppress(Killed):
            prepared(images, tmp_path / "killed", **settings)
    assert {"containers.arrow", "list/000000.arrow", REJECTED, ROWS} <= {*died_at}
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("file", ["list", "table"])
def test_a_disk_that_fills_while_rows_are_sorted_is_named(file, tmp_path, monkeypatch):
    images = corpus(tmp_path / "images", num=20)
    prepared(images, tmp_path / "whole")
    full = [True]

    def opened(path, mode="r", **how):
        stream = open(path, mode, **how)
        # The columns of 40 rows, after the header.
        if full and Path(path).name.startswith(f"{file}.") and mode == "wb":
            raw = stream
            stream = mock.Mock(wraps=raw, closed=False)
            stream.__enter__ = lambda self: self
            stream.__exit__ = lambda self, *error: raw.close()
            stream.write = lambda data: fill(raw, data)
        return stream

    def fill(raw, data):
        if raw.tell() > 2000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return raw.write(data)

    for module in ("list_inputs", "work"):
        name = f"data_prep.steps.{module}.open"
        monkeypatch.setattr(name, opened, raising=False)
    with pytest.raises(StorageError) as stopped:
        prepared(images, tmp_path / "full")
    text = stopped.value.text()
    assert "No space left" in text
    assert "free space and rerun" in text

    # With space it goes on.
    full.clear()
    prepared(images, tmp_path / "full")
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_memory_of_a_plan_does_not_grow_with_the_inputs(tmp_path, in_small_parts):
    peaks = []
    sections = {
        "images": {"max_bad_fraction": 1},
        "shards": {"shard_mib": 0.1},
    }
    for num in (1, 4):
        inputs = []
        for part in range(num):
            for item in made_up(part, splits=["train"]):
                item.path = f"{part}/{item.path}"
                item.name = f"{part}-{item.path}"
                item.inode += part * 10_000
                inputs.append(item)
        pool = pa.proxy_memory_pool(pa.system_memory_pool())
        before = pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            planned(run_of(tmp_path / "in", tmp_path / str(num), **sections), inputs)
        finally:
            pa.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert peaks[1] < 1.5 * peaks[0]


def test_values_that_occur_again_are_found_in_passes(in_small_parts):
    rng = random.Random(0)
    values = [rng.randrange(5000) * 64 for _ in range(2000)]
    parts = [
        np.array(values[start : start + 90], np.uint64) for start in range(0, 2000, 90)
    ]
    found = [v for part in repeated(lambda: parts, num=2000) for v in part.tolist()]
    expected = [value for value, num in Counter(values).items() if num > 1]
    assert sorted(found) == sorted(expected)


def test_values_of_two_sets_are_counted_in_passes(in_small_parts):
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 1 << 64, (2, 3000), np.uint64)
    other[:500] = one[rng.integers(0, 3000, 500)]
    expected = sum(value in set(other.tolist()) for value in one.tolist())
    assert 0 < expected <= 500
    assert num_shared(one, other) == expected
    assert num_shared(one, other[:0]) == 0
