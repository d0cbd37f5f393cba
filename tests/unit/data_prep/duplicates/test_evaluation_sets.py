"""Images of evaluation sets are found in the corpus, for every form of set."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from data_prep.duplicates import evaluation_sets
from data_prep.duplicates.descriptors import are_duplicates, image_descriptors
from data_prep.duplicates.evaluation_sets import (
    EvaluationIndex,
    build_evaluation_index,
    evaluation_listing,
)
from data_prep.sources.outages import Interrupted
from data_prep.sources.protocol import read_exactly
from tests.support.corpora.small_shards import make_shard_folder
from vitscale.config.errors import UserError


def picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((120, 90), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def copy_of(seed: int) -> bytes:
    file = io.BytesIO()
    ImageOps.mirror(picture(seed)).resize((70, 50)).save(file, "JPEG", quality=60)
    return file.getvalue()


def write_folder(folder: Path, seeds: range) -> Path:
    for seed in seeds:
        path = folder / f"class{seed % 2}" / "deeper" / f"{seed:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(picture(seed)))
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(png(picture(0)))
    return folder


def write_shards(folder: Path, seeds: range, *, shard: str = "val-000000.tar") -> Path:
    folder.mkdir()
    content, rows = b"", []
    for seed in seeds:
        image = png(picture(seed))
        rows.append({"key": f"k{seed}", "shard": shard, "offset": len(content) + 512})
        rows[-1]["length"] = len(image)
        content += bytes(512) + image
    (folder / "val-000000.tar").write_bytes(content)
    pq.write_table(pa.Table.from_pylist(rows), folder / "index.parquet")
    return folder


def built(folder: Path, *paths: Path) -> EvaluationIndex:
    build_evaluation_index([str(path) for path in paths], output=folder / "index.npz")
    return EvaluationIndex.load(folder / "index.npz")


def test_copies_of_folder_and_shard_images_are_found_and_named(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", range(30))
    shards = write_shards(tmp_path / "shards", range(30, 50))
    index = built(tmp_path, images, shards)
    assert len(index.names) == 50
    found = index.match(image_descriptors([copy_of(seed) for seed in range(100)]))
    assert (found[50:] == -1).all()
    names = [index.names[position] for position in found[:50]]
    assert names[:30] == [str(images / f"class{s % 2}/deeper/{s:03d}.png") for s in range(30)]
    assert names[30:] == [f"{shards}/val-000000.tar/k{seed}" for seed in range(30, 50)]


def test_match_equals_comparing_all_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several matches counts; batch sizes do not matter."""
    chance = np.random.default_rng(0)
    pixels = [np.asarray(picture(seed)).astype(int) for seed in range(6)]
    pixels[5] = pixels[5] // 64 + 100
    contents = []
    for number in range(120):
        noise = chance.integers(-1, 2, pixels[0].shape) * chance.choice([0, 5, 40, 80])
        noisy = Image.fromarray((pixels[number % 6] + noise).clip(0, 255).astype(np.uint8))
        contents.append(png(ImageOps.mirror(noisy) if number % 5 == 0 else noisy))
    folder = tmp_path / "set"
    folder.mkdir()
    for number, content in enumerate(contents[:60]):
        (folder / f"{number:03d}.png").write_bytes(content)
    index = built(tmp_path, folder)
    queries = image_descriptors(contents[60:])
    alike = np.stack(
        [are_duplicates(queries, index.descriptors[[i]].repeat(60)) for i in range(60)]
    )
    expected = np.where(alike.any(axis=0), alike.argmax(axis=0), -1)
    assert 10 < (expected >= 0).sum() < 60
    assert np.array_equal(index.match(queries), expected)
    monkeypatch.setattr(evaluation_sets, "QUERY_ROWS", 7)
    monkeypatch.setattr(evaluation_sets, "MAX_PAIRS", 3)
    assert np.array_equal(index.match(queries), expected)


def test_the_index_is_deterministic_without_objects(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", range(20))
    for name in ("a", "b"):
        build_evaluation_index([str(images)], output=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with np.load(tmp_path / "a", allow_pickle=False) as stored:
        assert {stored[name].dtype.kind for name in stored.files} <= {"u", "i", "b"}


def test_links_are_followed_once(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", range(4))
    (images / "class0" / "loop").symlink_to(images)
    outside = write_folder(tmp_path / "outside", range(4, 6))
    (images / "linked").symlink_to(outside)
    assert len(built(tmp_path, images).names) == 6


def test_broken_images_are_named(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", range(5))
    (images / "class0" / "broken.jpg").write_bytes(b"\xff\xd8 no more")
    index = built(tmp_path, images)
    assert index.unreadable == (str(images / "class0" / "broken.jpg"),)
    assert (index.match(index.descriptors) >= 0).sum() == 5


def test_images_of_other_formats_are_named(tmp_path: Path) -> None:
    formats = {"jpg": "JPEG", "JPEG": "JPEG", "png": "PNG", "webp": "WEBP"}
    others = {"bmp": "BMP", "tif": "TIFF", "gif": "GIF", "ppm": "PPM"}
    images = tmp_path / "images"
    images.mkdir()
    for seed, (suffix, format) in enumerate((formats | others).items()):
        picture(seed).save(images / f"{seed}.{suffix}", format)
    index = built(tmp_path, images)
    assert index.unreadable == tuple(str(images / f"{4 + i}.{s}") for i, s in enumerate(others))
    assert (index.match(image_descriptors([copy_of(seed) for seed in range(8)])) >= 0).sum() == 4


def test_external_tars_are_read_in_place(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "tars/deeper")
    whole = built(tmp_path, tmp_path / "tars/deeper")
    assert len(whole.names) == 7 and not whole.unreadable
    index = tmp_path / "index"
    index.mkdir()
    rows = pq.read_table(tmp_path / "tars/deeper/index.parquet").to_pylist()
    for row in rows:
        row["shard"] = f"deeper/{row['shard']}"
    pq.write_table(pa.Table.from_pylist(rows), index / "index.parquet")
    manifest = json.loads((tmp_path / "tars/deeper/manifest.json").read_text())
    for root in ("../tars", str(tmp_path / "tars")):
        (index / "manifest.json").write_text(json.dumps(manifest | {"shards_root": root}))
        found = built(tmp_path, index)
        assert np.array_equal(found.descriptors, whole.descriptors) and not found.unreadable
    (index / "manifest.json").write_text(json.dumps(manifest | {"shards_root": "s3://a/b"}))
    with pytest.raises(UserError, match="at a URL.*s3://a/b"):
        built(tmp_path, index)


def test_an_image_of_too_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_folder(tmp_path / "images", range(3))
    Image.new("L", (200, 200)).save(images / "large.png")
    monkeypatch.setattr(evaluation_sets, "MAX_PIXELS", 150 * 150)
    assert built(tmp_path, images).unreadable == (str(images / "large.png"),)


def test_sets_without_readable_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.jpg").write_bytes(b"no image")
    for name, message in (
        ("missing", "no such folder"),
        ("empty", "contains no images"),
        ("broken", "1 of 1 images cannot be decoded"),
    ):
        with pytest.raises(UserError, match=message):
            build_evaluation_index([str(tmp_path / name)], output=tmp_path / "index.npz")
    assert not (tmp_path / "index.npz").exists()


def test_each_set_must_be_readable(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", range(9))
    (tmp_path / "pictures").mkdir()
    picture(9).save(tmp_path / "pictures/a.bmp")
    with pytest.raises(UserError, match="pictures: 1 of 1.*a.bmp'\n.*JPEG, PNG, WEBP"):
        built(tmp_path, images, tmp_path / "pictures")


@pytest.mark.parametrize("shard", ["../secret.tar", "a/../../secret.tar", "/secret.tar", "."])
def test_a_shard_outside_its_folder_is_refused(shard: str, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", range(2), shard=shard)
    with pytest.raises(UserError, match="as a shard"):
        build_evaluation_index([str(shards)], output=tmp_path / "index.npz")


def test_files_other_than_an_index_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.npz"
    index = built(tmp_path, write_folder(tmp_path / "images", range(3)))
    whole = path.read_bytes()
    np.savez(path, version=1, names=np.array([{"an": "object"}], dtype=object))
    objects = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], objects):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not an index of evaluation sets"):
            EvaluationIndex.load(path)
    path.write_bytes(whole)
    assert EvaluationIndex.load(path).names == index.names


@pytest.mark.parametrize("number, ends", [(errno.ESTALE, True), (errno.EIO, False)])
def test_outages_lose_no_evaluation_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, ends: bool
) -> None:
    images = write_folder(tmp_path / "images", range(4))
    lost = images / "class0/deeper/000.png"

    def fail(descriptor: int, *, offset: int, num_bytes: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), lost.stat()):
            raise OSError(number, os.strerror(number))
        return read_exactly(descriptor, offset=offset, num_bytes=num_bytes)

    monkeypatch.setattr(evaluation_sets, "read_exactly", fail)
    if ends:
        with pytest.raises(Interrupted, match="the work done so far is kept"):
            built(tmp_path, images)
    else:
        assert built(tmp_path, images).unreadable == (str(lost),)


def test_unlistable_folders_are_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_folder(tmp_path / "images", range(4))
    own = os.scandir

    def fail(path: str) -> Iterator[os.DirEntry[str]]:
        if os.path.basename(path) == "class1":
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return own(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(Interrupted, match="Stale file handle"):
        built(tmp_path, images)
    with pytest.raises(Interrupted, match="Stale file handle"):
        evaluation_listing(str(images))


def test_sets_in_the_home_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_folder(tmp_path / "images", range(2))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert evaluation_listing("~/images") == evaluation_listing(str(images))
    assert len(built(tmp_path, Path("~/images")).names) == 2


def test_an_empty_set_is_an_outage(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="contains no images"):
        evaluation_listing(str(tmp_path))
