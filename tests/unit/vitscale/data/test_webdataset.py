"""Tars without an index: all samples, the right labels, damage, and no commands."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from webdataset import tariterators

from tests.support.corpora.shard_folders import photo, write_shard_folder
from tests.support.loader_runs import GLOBAL_BATCH, SEED
from vitscale.config.errors import UserError
from vitscale.data.index import read_split
from vitscale.data.loader import training_batches
from vitscale.data.settings import DataSettings, data_problems
from vitscale.data.training_set import open_training_set
from vitscale.data.webdataset import MAX_TARS, TarSample, expanded, tar_samples, tars_of_split

NUM, TARS = 24, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tars") / "a"
    return write_shard_folder(made, num_per_class=NUM // 2, num_shards=TARS)


def settings(path: Path | str, **more: Any) -> DataSettings:
    tars = {"num_samples": NUM, "num_classes": 2} | more.pop("webdataset", {})
    values = {"path": str(path), "global_batch": GLOBAL_BATCH, "reader": "webdataset"}
    values |= {"webdataset": tars, "val_split": None, "num_workers": 0}
    return DataSettings.model_validate(values | more)


def taken(
    folder: Path, num_samples: int, *, start: int = 0, process: int = 0, num: int = 1
) -> list[TarSample]:
    """In the order of the tars."""
    tars = open_training_set(settings(folder), seed=SEED).tars
    more = {"process": process, "num_processes": num, "num_classes": 2, "shuffle": 0}
    return list(islice(tar_samples(tars, seed=SEED, start=start, **more), num_samples))


def test_an_epoch_has_every_sample_once(folder: Path) -> None:
    index = read_split(folder, split="train")
    epochs = taken(folder, 3 * NUM)
    for epoch in range(3):
        part = epochs[epoch * NUM : (epoch + 1) * NUM]
        assert len({sample.key for sample in part}) == NUM
        for sample in part:
            number = int(sample.key.rpartition("-")[2])
            assert sample.label == index.label[number]
            assert len(sample.image) == index.length[number]
    orders = [[each.key for each in epochs[i * NUM : (i + 1) * NUM]] for i in range(3)]
    assert orders[0] != orders[1] != orders[2]
    resumed = [each.key for each in taken(folder, NUM, start=NUM)]
    assert resumed not in orders
    shared = [each.key for n in range(3) for each in taken(folder, NUM // 3, process=n, num=3)]
    assert len(set(shared)) == NUM


def test_tars_are_not_opened_by_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own way runs commands: for `pipe:`, for http, and for rewritten names."""

    def opened(*arguments: object, **more: object) -> None:
        raise AssertionError("gopen")

    monkeypatch.setattr(tariterators.gopen, "gopen", opened)
    assert len(taken(folder, NUM)) == NUM


def batches(data: DataSettings, *, ranks: int = 1, steps: int = 2) -> list[Any]:
    found = []
    for rank in range(ranks):
        loader = training_batches(
            open_training_set(data, seed=SEED),
            settings=data,
            image_size=16,
            seed=SEED,
            start=0,
            stop=steps * GLOBAL_BATCH,
            rank=rank,
            world_size=ranks,
            micro_batch=GLOBAL_BATCH // ranks,
            pin_memory=False,
        )
        with loader as own:
            found += list(own)
    return found


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("num_classes", "labels"), [(4, {3}), (None, {-1})])
def test_labels_are_numbers_or_absent(
    tmp_path: Path, workers: int, num_classes: int | None, labels: set[int]
) -> None:
    for tar in range(4):
        write_tar(tmp_path / f"train-{tar}.tar", {"a.JPG": photo(1), "a.cls": b" 3\n"})
    data = settings(tmp_path, num_workers=workers, webdataset={"num_classes": num_classes})
    found = batches(data, ranks=2)
    assert [len(batch.labels) for batch in found] == [GLOBAL_BATCH // 2] * 4
    assert all(batch.images.float().std() > 0 for batch in found)
    assert {label for batch in found for label in batch.labels.tolist()} == labels


def test_damaged_samples_and_tars_are_counted(tmp_path: Path) -> None:
    good = {
        f"{n:02d}.{kind}": data
        for n in range(30)
        for kind, data in (("jpg", photo(n)), ("cls", b"1"))
    }
    write_tar(tmp_path / "train-0.tar", good)
    write_tar(tmp_path / "train-1.tar", {"a.jpg": b"no image", "a.cls": b"0", "b.jpg": photo(1)})
    (tmp_path / "train-2.tar").write_bytes((tmp_path / "train-0.tar").read_bytes()[:4000])
    (tmp_path / "train-3.tar").write_bytes(b"not a tar" * 100)
    write_tar(tmp_path / "train-4.tar", {"a.txt": b"no sample"})
    found = batches(settings(tmp_path), steps=4)
    unreadable = Counter(each.error for batch in found for each in batch.unreadable)
    for text in ("damaged: ", "no member .cls", "no members .jpg"):
        assert any(text in error for error in unreadable)
    assert {"a", "b"} < {each.key for batch in found for each in batch.unreadable}
    for name in ("train-0.tar", "train-1.tar", "train-2.tar"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="9 samples in a row cannot be read, the last: "):
        batches(settings(tmp_path))


def test_what_is_no_damage_ends_the_run(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has label '1'.*\n.*0 to 0"):
        batches(settings(folder, webdataset={"num_classes": 1}))
    none = tar_samples(
        [folder / "no.tar"], num_classes=0, seed=0, start=0, process=0, num_processes=1
    )
    with pytest.raises(UserError, match=r"no\.tar: cannot be read \(No such file"):
        next(none)


NAMES = [f"train-{number:06d}.tar" for number in range(TARS)]


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", NAMES),
        ("train-{000000..000001}.tar", NAMES[:2]),
        ("train-{000000,000003}.tar", [NAMES[0], NAMES[3]]),
        ("train-00000?.tar", NAMES),
        (NAMES[2], NAMES[2:3]),
    ],
)
def test_a_split_is_a_name_or_a_pattern(folder: Path, split: str, names: list[str]) -> None:
    assert [tar.name for tar in tars_of_split(folder, split, where="data.train_split")] == names


def test_wrong_patterns_are_one_error(folder: Path) -> None:
    for split in ("a{.tar", "a}.tar", "{0..999999999}.tar", "{0..9999}-{0..9999}.tar"):
        with pytest.raises(UserError, match=f"not a pattern of at most {MAX_TARS:,} names"):
            expanded(split, where="data.train_split")
    for split, text in (
        ("train-{000000..000009}.tar", "4 of 10 tars are missing, such as .*train-000006.tar"),
        ("dev", "no tars 'dev'"),
        (f"x.tar | touch {folder}/canary", "1 of 1 tars are missing"),
    ):
        with pytest.raises(UserError, match=text):
            tars_of_split(folder, split, where="data.train_split")
    with pytest.raises(UserError, match="no such folder"):
        tars_of_split(folder / "missing", "train", where="data.train_split")
    assert not (folder / "canary").exists()


def test_what_needs_an_index_is_refused() -> None:
    assert not list(data_problems(settings("x")))
    for key, more in (
        ("data.first_percent", {"first_percent": 10}),
        ("data.only_keys", {"only_keys": "a"}),
        ("data.val_split", {"val_split": "val"}),
        ("data.path", {"path": "s3://bucket/tars"}),
        ("data.webdataset.num_samples", {"webdataset": {"num_samples": None}}),
        ("data.webdataset", {"reader": "index"}),
    ):
        data = settings(**({"path": "x"} | more))
        assert [each for each, _ in data_problems(data)] == [key]
