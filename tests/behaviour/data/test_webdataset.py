"""Tars without an index: all samples, the right labels, damage, and no commands."""

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from webdataset import tariterators

from tests.support.corpora.external_tars import tar_bytes, write_tars
from tests.support.corpora.shard_folders import photo, write_shard_folder
from tests.support.loader_runs import GLOBAL_BATCH, SEED, rank_batches_of
from tests.support.tables import every, refused, rows
from vitscale.config.errors import UserError
from vitscale.data import webdataset
from vitscale.data.index import read_split, sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.data.webdataset import check_shares, tar_samples, tars_of_split

NUM = 24
TARS = 6


@pytest.fixture(autouse=True)
def unshuffled(monkeypatch) -> None:
    """Samples come in the order of the tars."""
    monkeypatch.setattr(webdataset, "SHUFFLE", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tars") / "a"
    return write_shard_folder(made, num_per_class=NUM // 2, num_shards=TARS)


def settings(path: Path | str, **more) -> DataSettings:
    tars = {"num_samples": NUM, "num_classes": 2} | more.pop("webdataset", {})
    values = {"path": str(path), "global_batch": GLOBAL_BATCH, "reader": "webdataset"}
    values |= {"webdataset": tars, "val_split": None, "num_workers": 0}
    return DataSettings.model_validate(values | more)


def taken(
    folder: Path, num_samples: int, *, start: int = 0, process: int = 0, num: int = 1
) -> list[Any]:
    tars = open_training_set(settings(folder), seed=SEED).tars
    more = {"process": process, "num_processes": num, "num_classes": 2}
    return list(islice(tar_samples(tars, seed=SEED, start=start, **more), num_samples))


def test_an_epoch_has_every_sample_once(folder, monkeypatch):
    # The library's own way to open tars runs commands: for `pipe:`, http and rewritten names.
    monkeypatch.delattr(tariterators.gopen, "gopen")
    index = read_split(folder, split="train")
    stored = {key: number for number, key in enumerate(sample_keys(index, range(NUM)))}
    found = taken(folder, 3 * NUM)
    for _, key, image, label in found:
        assert label == index.label[stored[key]]
        assert len(image) == index.length[stored[key]]
    epochs = [
        [key for _, key, _, _ in found[i * NUM : (i + 1) * NUM]] for i in range(3)
    ]
    assert [set(epoch) for epoch in epochs] == [set(stored)] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [key for _, key, _, _ in taken(folder, NUM, start=NUM)] not in epochs
    shared = [
        each[1] for n in range(3) for each in taken(folder, NUM // 3, process=n, num=3)
    ]
    assert set(shared) == set(stored)


@every(num_workers="0, 1, 2, 8", num_ranks="1, 2, 3, 256")
def test_every_loader_process_needs_a_tar(num_ranks, num_workers):
    """One without would look for one for ever: its share of every epoch is empty."""
    num_processes = num_ranks * max(num_workers, 1)
    for num_tars in {1, num_processes - 1, num_processes, num_processes + 1, 1024} - {
        0
    }:
        shares = [
            range(num_tars)[process::num_processes] for process in range(num_processes)
        ]
        is_refused = pytest.raises(UserError) if not all(shares) else nullcontext()
        with is_refused as caught:
            check_shares(num_tars, num_ranks=num_ranks, num_workers=num_workers)
        if caught is not None:
            numbers = rf"fewer tars \({num_tars:,}\) than loader processes \({num_processes:,} = "
            assert caught.match(f"^data.reader=webdataset: there are {numbers}")


def batches(data: DataSettings, *, ranks: int = 1) -> list[Any]:
    more = {"start": 0, "stop": 2 * GLOBAL_BATCH, "ranks": ranks}
    return [
        batch
        for rank in range(ranks)
        for batch in rank_batches_of(data, rank=rank, **more)
    ]


@pytest.mark.parametrize(
    ("workers", "num_classes", "labels"), [(0, 4, {3}), (2, 4, {3}), (2, None, {-1})]
)
def test_labels_are_numbers_or_absent(tmp_path, workers, num_classes, labels):
    tars = {
        f"train-{n}.tar": {"a.JPG": photo(1), "a.cls": b" 3\n".rjust(50)}
        for n in range(4)
    }
    write_tars(tmp_path, tars)
    data = settings(
        tmp_path, num_workers=workers, webdataset={"num_classes": num_classes}
    )
    found = batches(data, ranks=2)
    assert [len(batch.labels) for batch in found] == [GLOBAL_BATCH // 2] * 4
    assert all(batch.images.float().std() > 0 for batch in found)
    assert {label for batch in found for label in batch.labels.tolist()} == labels


def test_images_that_cannot_be_decoded_are_counted(tmp_path):
    members = {f"{n}.{kind}": b"1" for n in range(30) for kind in ("jpg", "cls")}
    good = {f"{n}.jpg": photo(n) for n in range(0, 30, 2)}
    write_tars(tmp_path, {"train-0.tar": members | good | {"no_image.cls": b"1"}})
    lost = {
        each.key for batch in batches(settings(tmp_path)) for each in batch.unreadable
    }
    assert {"1", "29", "no_image"} < lost
    assert "2" not in lost
    write_tars(tmp_path, {"train-0.tar": members})
    with refused("9 samples in a row cannot be read, the last: "):
        batches(settings(tmp_path))


WHOLE = tar_bytes({"a.jpg": photo(1), "a.cls": b"1", "b.jpg": photo(2), "b.cls": b"2"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE, "sample 'b' has label '2', not 0 to 1"),
        (tar_bytes({"a.jpg": photo(1)}), "sample 'a' has label ''"),
        (b"not a tar" * 100, "cannot be read"),
        (tar_bytes({"a.txt": b"no sample"}), r"no members \.jpg"),
        (None, "cannot be read .No such file"),
    ],
)
def test_a_tar_that_cannot_be_used_is_named(tmp_path, content, message):
    tar = tmp_path / "train-0.tar"
    if content is not None:
        tar.write_bytes(content)
    with refused(rf"train-0\.tar: .*{message}"):
        more = {"seed": 0, "start": 0, "process": 0, "num_processes": 1}
        list(islice(tar_samples([tar], num_classes=2, **more), 3))


# The numbers of its tars, or why it is refused.
@rows("""
- [split, numbers]
- [train, [0, 1, 2, 3, 4, 5]]
- ["train-{000000..000001}.tar", [0, 1]]
- ["train-{000000,000003}.tar", [0, 3]]
- ["train-00000?.tar", [0, 1, 2, 3, 4, 5]]
- ["a{.tar", "'a{.tar' is not a pattern"]
- ["{0..9999}-{0..9999}.tar", "is not a pattern of at most 1,000,000 names"]
- ["{1000001..0}.tar", "is not a pattern of at most 1,000,000 names"]
- ["train-{000000..000009}.tar", "4 of 10 tars are missing.*train-000006.tar"]
- [dev, no tars 'dev']
- [x.tar | touch FOLDER/canary, 1 of 1 tars are missing]
""")
def test_a_split_is_a_name_or_a_pattern(folder, split, numbers):
    split = split.replace("FOLDER", str(folder))
    if not isinstance(numbers, str):
        names = [
            tar.name for tar in tars_of_split(folder, split, where="data.train_split")
        ]
        assert names == [f"train-{number:06d}.tar" for number in numbers]
        return
    with refused(f"data.train_split: .*{numbers}"):
        tars_of_split(folder, split, where="data.train_split")
    with refused("no such folder"):
        tars_of_split(folder / "missing", split, where="data.train_split")
    assert not (folder / "canary").exists()
