"""Streams of tars: all samples, the right labels, damage, and no commands."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from webdataset import tariterators

from tests.support.corpora.shard_folders import photo, write_shard_folder
from tests.support.loader_runs import GLOBAL_BATCH, SEED
from tests.support.range_server import served
from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.loader import evaluation_batches, open_loader, training_batches
from vitscale.data.settings import DataSettings, reader_problems
from vitscale.data.tars.stream import TarSample, TarStream
from vitscale.data.training_set import open_training_set, open_val_split

NUM, TARS = 24, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tars") / "a"
    return write_shard_folder(made, num_per_class=NUM // 2, num_shards=TARS)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def settings(path: Path | str, **more: Any) -> DataSettings:
    tars = {"num_samples": NUM, "num_classes": 2} | more.pop("webdataset", {})
    values = {"path": str(path), "global_batch": GLOBAL_BATCH, "reader": "webdataset"}
    values |= {"webdataset": tars, "val_split": "train", "num_workers": 0}
    return DataSettings.model_validate(values | more)


def stream(data: DataSettings, *, start: int = 0, process: int = 0, num: int = 1) -> TarStream:
    """In the order of the tars."""
    tars = open_training_set(data, seed=SEED).streamed
    assert tars is not None
    tars = replace(tars, shuffle=0)
    return TarStream(tars, seed=SEED, start=start, process=process, num_processes=num)


def val_split(data: DataSettings) -> SplitIndex:
    index = open_val_split(data)
    assert index is not None
    return index


def taken(found: TarStream, num: int) -> list[TarSample]:
    return list(islice(found, num))


def test_an_epoch_has_every_sample_once(folder: Path) -> None:
    index = read_split(folder, split="train")
    data = settings(folder)
    epochs = taken(stream(data), 3 * NUM)
    for epoch in range(3):
        part = epochs[epoch * NUM : (epoch + 1) * NUM]
        assert len({sample.key for sample in part}) == NUM
        for sample in part:
            number = int(sample.key.rpartition("-")[2])
            assert sample.label == index.label[number]
            assert len(sample.image) == index.length[number]
    orders = [[each.key for each in epochs[i * NUM : (i + 1) * NUM]] for i in range(3)]
    assert orders[0] != orders[1] != orders[2]
    resumed = [each.key for each in taken(stream(data, start=NUM), NUM)]
    assert resumed not in orders
    shared = [
        each.key for n in range(3) for each in taken(stream(data, process=n, num=3), NUM // 3)
    ]
    assert len(set(shared)) == NUM


def test_web_servers_give_what_local_tars_give(folder: Path) -> None:
    local = taken(stream(settings(folder)), 2 * NUM)
    names = "train-{000000..000005}.tar"
    with served(folder) as server:
        remote = taken(stream(settings(server.url, train_split=names)), 2 * NUM)
        assert [each.image for each in remote] == [each.image for each in local]
        server.fault = lambda path, number: "error"
        broken = stream(settings(server.url, train_split=names, remote={"patience_s": 0.3}))
        with pytest.raises(UserError, match="cannot be read"):
            taken(broken, 1)


def test_tars_are_not_opened_by_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own way runs commands: for `pipe:`, for http, and for rewritten names."""

    def opened(*arguments: object, **more: object) -> None:
        raise AssertionError("gopen")

    monkeypatch.setenv("GOPEN_REWRITE", f"{folder}=pipe:touch {folder}/canary ;")
    monkeypatch.setattr(tariterators.gopen, "gopen", opened)
    assert len(taken(stream(settings(folder)), NUM)) == NUM
    for path in (f"pipe:touch {folder}/canary", f"pipe:cat {folder}/train-000000.tar"):
        with pytest.raises(UserError, match="scheme 'pipe:' is not supported"):
            stream(settings(path))
    assert not (folder / "canary").exists()


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
        with open_loader(loader) as own:
            found += list(own)
    return found


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_labels_of_their_images(folder: Path, workers: int) -> None:
    found = batches(settings(folder, num_workers=workers, horizontal_flip=False), ranks=2)
    assert [len(batch.labels) for batch in found] == [GLOBAL_BATCH // 2] * 4
    assert all(batch.images.float().std() > 0 for batch in found)
    assert {label for batch in found for label in batch.labels.tolist()} == {0, 1}


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
    found = batches(settings(tmp_path, val_split=None), steps=4)
    unreadable = Counter(each.error for batch in found for each in batch.unreadable)
    assert any("the tar ends early" in error for error in unreadable)
    assert any("no member .cls" in error for error in unreadable)
    keys = {each.key for batch in found for each in batch.unreadable}
    assert {"a", "b"} < keys
    for name in ("train-0.tar", "train-1.tar", "train-2.tar"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="8 tars in a row have no image"):
        batches(settings(tmp_path, val_split=None))


@pytest.mark.parametrize("num_classes, label", [(4, 3), (None, None)])
def test_labels_are_numbers_or_absent(
    tmp_path: Path, num_classes: int | None, label: int | None
) -> None:
    write_tar(tmp_path / "train-0.tar", {"a.JPG": photo(1), "a.cls": b" 3\n"})
    data = settings(tmp_path, webdataset={"num_classes": num_classes})
    (sample,) = taken(stream(data), 1)
    assert (sample.label, sample.image) == (label, photo(1))


def test_a_label_outside_the_classes_ends_the_run(folder: Path) -> None:
    with pytest.raises(UserError, match="has label '1'.*\n.*0 to 0"):
        batches(settings(folder, webdataset={"num_classes": 1}))


def test_an_evaluation_has_exactly_all_samples(folder: Path) -> None:
    index = read_split(folder, split="train")
    with served(folder) as server:
        names = "train-{000000..000005}.tar"
        places = [settings(folder), settings(server.url, val_split=names)]
        found = [val_split(data) for data in places]
        assert found[0].fingerprint == found[1].fingerprint != index.fingerprint
        results = []
        for data, each in zip([*places, settings(folder)], [*found, index], strict=True):
            for name in ("shard_of", "offset", "length", "label"):
                np.testing.assert_array_equal(getattr(each, name), getattr(index, name))
            batches = evaluation_batches(
                each,
                settings=data,
                image_size=16,
                rank=0,
                world_size=1,
                micro_batch=10,
                pin_memory=False,
            )
            results.append([batch.images.numpy().tobytes() for batch in batches])
        assert results[0] == results[1] == results[2]
    with pytest.raises(UserError, match="is not a readable tar"):
        (folder / "broken.tar").write_bytes((folder / "train-000000.tar").read_bytes()[:2000])
        val_split(settings(folder, val_split="broken.tar"))


@pytest.mark.parametrize("place", ["cut at a header", "damaged header"])
def test_a_tar_without_its_end_is_named(tmp_path: Path, place: str) -> None:
    """Python takes both for the end; the samples before it are used, but not for evaluation."""
    photos = {
        f"{n}.{kind}": data for n in range(4) for kind, data in (("jpg", photo(n)), ("cls", b"1"))
    }
    path = tmp_path / "train-0.tar"
    write_tar(path, photos)
    with tarfile.open(path) as tar:
        header = tar.getmember("2.jpg").offset
    data = bytearray(path.read_bytes())
    if place == "cut at a header":
        path.write_bytes(data[:header])
    else:
        data[header + 150] ^= 1  # in its checksum
        path.write_bytes(data)
    found = taken(stream(settings(tmp_path)), 3)
    assert [each.key for each in found if each.error is None][:2] == ["0", "1"]
    (broken,) = [each for each in found if each.error is not None]
    assert broken.tar == str(path) and "the tar ends early: no end mark" in broken.error
    with pytest.raises(UserError, match="train-0.tar: is not a readable tar .no end mark after"):
        val_split(settings(tmp_path))
    with served(tmp_path) as server, pytest.raises(UserError, match="no end mark after"):
        val_split(settings(server.url, val_split="train-0.tar"))
    with gzip.open(tmp_path / "train-0.tar", "wb") as packed:
        write_tar(tmp_path / "whole.tar", photos)
        packed.write((tmp_path / "whole.tar").read_bytes())
    names = "train-0.tar"
    found = taken(stream(settings(tmp_path, train_split=names)), 8)
    assert all(each.error is None for each in found)


@pytest.mark.parametrize("num_bytes, requests, read", [(3000, 8, 1.1), (300_000, 25, 0.03)])
def test_listing_a_split_takes_few_requests_or_few_bytes(
    tmp_path: Path, num_bytes: int, requests: int, read: float
) -> None:
    """Small members are read with their headers, large ones are skipped."""
    num = 200 if num_bytes < 10_000 else 20
    image = photo(1).ljust(num_bytes, b"x")
    members = {f"{n}.{kind}": d for n in range(num) for kind, d in (("jpg", image), ("cls", b"1"))}
    write_tar(tmp_path / "val-0.tar", members)
    with served(tmp_path) as server:
        found = val_split(settings(server.url, val_split="val-0.tar"))
        assert len(found.label) == num and set(found.label.tolist()) == {1}
        assert server.requests["val-0.tar"] <= requests
        assert server.sent["val-0.tar"] <= read * (tmp_path / "val-0.tar").stat().st_size


def test_what_needs_an_index_is_refused() -> None:
    def problems(**more: Any) -> dict[str, str]:
        return dict(reader_problems(settings("x", **more)))

    assert not problems()
    assert "data.first_percent" in problems(first_percent=10)
    assert "data.only_keys" in problems(only_keys="a")
    assert "data.views" in problems(views=3)
    assert "data.webdataset.num_samples" in problems(webdataset={"num_samples": None})
    assert "data.webdataset" in problems(reader="index")
