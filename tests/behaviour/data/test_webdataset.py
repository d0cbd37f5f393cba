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

# Four samples in each tar: several tars for each process of the layouts below.
NUM = 24
TARS = 6


@pytest.fixture(autouse=True)
def unshuffled(monkeypatch):
    """Samples come in the order of the tars."""
    monkeypatch.setattr(webdataset, "SHUFFLE", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tars") / "a"
    return write_shard_folder(made, num_per_class=NUM // 2, num_shards=TARS)


def settings(path: Path | str, **more) -> DataSettings:
    """Settings of a stream. more: those that differ; its `webdataset` are merged."""
    tars = {"num_samples": NUM, "num_classes": 2} | more.pop("webdataset", {})
    values = {
        "path": str(path),
        "global_batch": GLOBAL_BATCH,
        "reader": "webdataset",
        "webdataset": tars,
        "val_split": None,
        "num_workers": 0,
    }
    return DataSettings.model_validate(values | more)


def streamed(
    folder: Path, num_samples: int, *, start: int = 0, process: int = 0, num: int = 1
) -> list[Any]:
    """The next samples of one of `num` processes: (tar, key, image, label) of each."""
    samples = tar_samples(
        open_training_set(settings(folder), seed=SEED).tars,
        seed=SEED,
        start=start,
        process=process,
        num_processes=num,
        num_classes=2,
    )
    return list(islice(samples, num_samples))


def keys_of(*args, **more) -> list[str]:
    return [key for _, key, _, _ in streamed(*args, **more)]


def test_an_epoch_has_every_sample_once(folder, monkeypatch):
    # The library's own way to open tars runs commands: for `pipe:`, http and rewritten names.
    monkeypatch.delattr(tariterators.gopen, "gopen")
    index = read_split(folder, split="train")
    stored = {key: number for number, key in enumerate(sample_keys(index, range(NUM)))}

    # The index of the same tars tells what belongs to a key.
    samples = streamed(folder, 3 * NUM)
    for _, key, image, label in samples:
        number = stored[key]
        place = index.locate(number)
        assert label == place.label
        assert len(image) == place.length

    # Each epoch is whole, and in an order of its own.
    keys = [key for _, key, _, _ in samples]
    epochs = [keys[start : start + NUM] for start in range(0, 3 * NUM, NUM)]
    assert [set(epoch) for epoch in epochs] == [set(stored)] * 3
    assert epochs[0] != epochs[1] != epochs[2]

    # After a resume the tars come in a fresh order.
    assert keys_of(folder, NUM, start=NUM) not in epochs

    # The shares of three processes are an epoch together.
    shared = set[str]()
    for process in range(3):
        shared.update(keys_of(folder, NUM // 3, process=process, num=3))
    assert shared == set(stored)


@every(num_workers="0, 1, 2, 8", num_ranks="1, 2, 3, 256")
def test_every_loader_process_needs_a_tar(num_ranks, num_workers):
    """One without would look for one for ever: its share of every epoch is empty."""
    num_processes = num_ranks * max(num_workers, 1)

    # About the limit, and far below and above it.
    nums = {1, num_processes - 1, num_processes, num_processes + 1, 1024}
    for num_tars in nums - {0}:
        # Process p reads the tars p, p + n, p + 2 n and so on.
        tars = range(num_tars)
        shares = [tars[process::num_processes] for process in range(num_processes)]

        is_refused = pytest.raises(UserError) if not all(shares) else nullcontext()
        with is_refused as caught:
            check_shares(num_tars, num_ranks=num_ranks, num_workers=num_workers)
        if caught is not None:
            numbers = rf"fewer tars \({num_tars:,}\) than loader processes \({num_processes:,} = "
            assert caught.match(f"^data.reader=webdataset: there are {numbers}")


def batches(data: DataSettings, *, ranks: int = 1) -> list[Any]:
    """Two global batches, those of the first rank first."""
    span = {
        "start": 0,
        "stop": 2 * GLOBAL_BATCH,
        "ranks": ranks,
    }
    of_ranks = [rank_batches_of(data, rank=rank, **span) for rank in range(ranks)]
    return [batch for of_rank in of_ranks for batch in of_rank]


# With workers and without; without a number of classes the members `cls` are not read.
@rows("""
- [workers, num_classes, label]
- [0, 4, 3]
- [2, 4, 3]
- [2, null, -1]
""")
def test_labels_are_numbers_or_absent(tmp_path, workers, num_classes, label):
    # Spaces and line ends, as editors and scripts leave them.
    members = {"a.JPG": photo(1), "a.cls": b" 3\n".rjust(50)}
    write_tars(tmp_path, {f"train-{number}.tar": members for number in range(4)})

    tars = {"num_classes": num_classes}
    data = settings(tmp_path, num_workers=workers, webdataset=tars)
    found = batches(data, ranks=2)
    assert [len(batch.labels) for batch in found] == [GLOBAL_BATCH // 2] * 4
    for batch in found:
        # Not left empty: a picture varies.
        assert batch.images.float().std() > 0
        assert set(batch.labels.tolist()) == {label}


def test_images_that_cannot_be_decoded_are_counted(tmp_path):
    # Every second image is sound; one sample has a label alone.
    members = {f"{n}.{kind}": b"1" for n in range(30) for kind in ("jpg", "cls")}
    good = {f"{n}.jpg": photo(n) for n in range(0, 30, 2)}
    write_tars(tmp_path, {"train-0.tar": members | good | {"no_image.cls": b"1"}})
    lost = set[str]()
    for batch in batches(settings(tmp_path)):
        lost.update(sample.key for sample in batch.unreadable)
    assert {"1", "29", "no_image"} < lost
    assert "2" not in lost

    # Without any sound one the search for a substitute must end.
    assert "2" not in lost
    write_tars(tmp_path, {"train-0.tar": members})
    with refused("9 samples in a row cannot be read, the last: "):
        batches(settings(tmp_path))


# Two samples with labels 1 and 2, of which two classes allow the first.
WHOLE = tar_bytes(
    {
        "a.jpg": photo(1),
        "a.cls": b"1",
        "b.jpg": photo(2),
        "b.cls": b"2",
    }
)


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
    samples = tar_samples(
        [tar],
        num_classes=2,
        seed=0,
        start=0,
        process=0,
        num_processes=1,
    )

    # Three of a tar of two: the stream goes round, so nothing is passed over.
    with refused(rf"train-0\.tar: .*{message}"):
        list(islice(samples, 3))


# The numbers of its tars, or why it is refused: too many names, missing tars, and a command.
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
        tars = tars_of_split(folder, split, where="data.train_split")
        expected = [f"train-{number:06d}.tar" for number in numbers]
        assert [tar.name for tar in tars] == expected
        return
    with refused(f"data.train_split: .*{numbers}"):
        tars_of_split(folder, split, where="data.train_split")
    with refused("no such folder"):
        tars_of_split(folder / "missing", split, where="data.train_split")

    # What the last row would run through a shell.
    assert not (folder / "canary").exists()
