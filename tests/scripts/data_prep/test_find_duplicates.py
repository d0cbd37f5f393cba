"""data_prep/find_duplicates.py, and shards made again without the copies that it found."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from tests.support.corpora.image_corpus import ledger, make_shards, run_script
from tests.support.corpora.image_samples import encoded, rotated
from tests.support.corpora.shard_folders import photo
from tests.support.corpora.sources import written
from tests.support.tables import every
from vitscale.data.index import read_manifest, sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

NUM_PICTURES = 12
SPLITS = "source.splits={train: train, val: val}"
# Copies must reach the shards as they are, and all of them must be in the named splits.
CHECKS = ("images.check=header", "source.holdout_fraction=0")


def picture(seed):
    content = photo(seed, width=160, height=120)
    return Image.open(io.BytesIO(content)).convert("RGB")


def turned(image):
    """As a camera stores it: turned pixels, which its EXIF turns back."""
    pixels = image.transpose(Image.Transpose.ROTATE_90)
    return encoded(pixels, "JPEG", quality=90, exif=rotated(6))


def hardest(image):
    """Half the size, mirrored and of low quality: near every limit of what is promised."""
    return encoded(ImageOps.mirror(image.reduce(2)), "JPEG", quality=40)


COPIES = {
    "webp.webp": lambda image: encoded(image, "WEBP", quality=50),
    "png.png": lambda image: encoded(image, "PNG", compress_level=1),
    "turned.jpg": turned,
    "all.jpg": hardest,
}


def find(*arguments, rc=0):
    return run_script("find_duplicates", *arguments, rc=rc)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(source, shards): different pictures in `train`, and copies of those in `val` beside them."""
    base = tmp_path_factory.mktemp("duplicates")
    source = base / "images"
    for seed in range(NUM_PICTURES):
        written(source / f"train/cat/{seed:02d}.png", encoded(picture(seed), "PNG"))
    for number, (name, copy) in enumerate(COPIES.items()):
        original = picture(100 + number)
        written(source / f"val/cat/{number}.png", encoded(original, "PNG"))
        written(source / f"train/cat/copy_{number}_{name}", copy(original))
    # The one copy with equal bytes, under another name.
    written(source / "train/cat/twin.png", encoded(picture(0), "PNG"))
    make_shards(source, base / "shards", SPLITS, *CHECKS)
    return source, base / "shards"


def rows_of(folder):
    table = pq.read_table(folder / "duplicates.parquet").to_pylist()
    rows = {row["path"]: row for row in table}
    # An image with two rows would hide one of them here.
    assert len(rows) == len(table)
    return rows


def test_every_promised_copy_is_found(made, tmp_path):
    _, shards = made
    text = find(shards, "--similar", "--output", tmp_path / "found")
    rows = rows_of(tmp_path / "found")
    # The image of `val` stays: otherwise a model would be evaluated on what it has seen.
    for number, name in enumerate(COPIES):
        row = rows[f"train/cat/copy_{number}_{name}"]
        assert not row["keep"]
        assert row["copy_of"] == rows[f"val/cat/{number}.png"]["key"]
        assert 0.99 <= row["similarity"] <= 1

    # Which of both is first depends on the shuffle; one of them stays.
    twins = [rows[f"train/cat/{name}.png"] for name in ("00", "twin")]
    assert sorted(row["keep"] for row in twins) == [False, True]
    (lost,) = (row for row in twins if not row["keep"])
    assert lost["similarity"] == 1
    assert lost["copy_of"] in {row["key"] for row in twins}

    kept = [row for row in rows.values() if row["keep"]]
    assert len(kept) == NUM_PICTURES + len(COPIES)
    assert all(row["copy_of"] is None and row["similarity"] is None for row in kept)
    keys = (tmp_path / "found/keep.txt").read_text().split()
    assert keys == [row["key"] for row in kept]

    # A sheet without pictures would be white.
    sheet = np.asarray(Image.open(tmp_path / "found/pairs.png"))
    assert (sheet.reshape(-1, 3) != 255).any(axis=1).mean() > 0.3
    num = NUM_PICTURES + 2 * len(COPIES) + 1
    assert f"{num} images, 5 of them copies: 1 with equal bytes, 4 similar" in text
    assert "cannot be decoded" not in text


def test_without_similar_only_equal_bytes_are_copies(made):
    _, shards = made
    find(shards)
    output = shards.with_name("shards-duplicates")
    rows = rows_of(output)
    # A folder inside a file cannot be made: a mistake of the user, not of the storage.
    find(shards, "--output", shards / "manifest.json/found", rc=2)

    # The copy saved as PNG has other bytes.
    assert sum(not row["keep"] for row in rows.values()) == 1
    assert not (output / "pairs.png").exists()


def test_copies_are_the_same_in_any_parts(made, tmp_path, monkeypatch):
    source, shards = made
    against = ("--against", source / "val")
    find(shards, *against, "--output", tmp_path / "whole")

    # What a billion images need: lists in many batches, hashes in many passes.
    monkeypatch.setattr("data_prep.duplicates.reading.NUM_ROWS", 2)
    monkeypatch.setattr("data_prep.duplicates.equal.PASS_ROWS", 3)
    lists = tmp_path / "parts/.lists"
    written(lists / "0", b"of a command that was killed")
    find(shards, *against, "--output", tmp_path / "parts")
    rows = rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "parts") == rows
    assert {row["keep"] for row in rows.values()} == {True, False}
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == ["duplicates.parquet", "keep.txt"]


@every(as_shards="false, true")
def test_images_of_an_evaluation_set_are_found(as_shards, made, tmp_path):
    source, shards = made
    seen = tmp_path / "evaluation/x"
    # A similar copy, one with equal bytes, a new picture, and no picture.
    written(seen / "seen.jpg", encoded(ImageOps.mirror(picture(3)), "JPEG", quality=85))
    written(seen / "equal.png", encoded(picture(4), "PNG"))
    written(seen / "new.jpg", photo(5000))
    (seen / "notes.txt").write_text("no image")
    copied = {"03": "seen.jpg", "04": "equal.png"}
    other = seen.parent
    prefix = f"{seen}/"
    if as_shards:
        other = tmp_path / "other"
        make_shards(seen.parent, other, *CHECKS)
        # Samples of shards are named by their keys, which have no suffix.
        prefix = f"{other}/train-x-"
        copied = {"03": "seen", "04": "equal"}
        # The other way round, too: shards against a folder of this corpus.
        against = ("--against", source / "train")
        find(other, "--similar", *against, "--output", tmp_path / "one")
        assert (tmp_path / "one/pairs.png").exists()
    else:
        written(seen / "broken.gif", b"no picture")
        for link in ("up", "again"):  # 40 levels of each in all of the others
            (seen / link).symlink_to(seen.parent)
    text = find(shards, "--similar", "--against", other, "--output", tmp_path / "found")
    # make_shards has rejected what cannot be decoded.
    assert ("1 images cannot be decoded" in text) != as_shards
    assert "2 of an image of --against" in text
    rows = rows_of(tmp_path / "found")
    for name, copy_of in copied.items():
        row = rows[f"train/cat/{name}.png"]
        assert not row["keep"]
        assert row["copy_of"] == prefix + copy_of
    assert "no such folder" in find(shards, "--against", tmp_path / "missing", rc=2)


def test_converted_originals_and_other_classes_are_found(tmp_path):
    # CMYK is converted when shards are made, so the shards have other bytes than the source.
    original = encoded(picture(1).convert("CMYK"), "JPEG", quality=90)
    images = tmp_path / "images"
    for name in ("cat/a.jpg", "dog/b.jpg", "dog/c.jpg"):
        written(images / name, original)
    written(images / "cat/other.png", encoded(picture(2), "PNG"))
    written(tmp_path / "seen/original.jpg", original)
    make_shards(images, tmp_path / "shards", *CHECKS)
    statuses = {row["status"] for row in ledger(tmp_path / "shards").values()}
    assert statuses == {"repaired", "kept"}

    text = find(tmp_path / "shards")
    rows = rows_of(tmp_path / "shards-duplicates").values()
    copies = [row for row in rows if not row["keep"]]
    num_mixed = sum(row["class"] != row["class_of_copied"] for row in copies)
    assert len(copies) == 2
    # 2 if the cat is first after the shuffle, 1 if a dog is.
    assert num_mixed in (1, 2)
    assert f"note: {num_mixed} copies have another class" in text

    # The shards have none of the bytes of the evaluation set.
    text = find(tmp_path / "shards", "--against", tmp_path / "seen")
    assert "3 of an image of --against" in text
    assert "another class" not in text


def test_a_full_disk_is_an_error_of_storage(made, small_disk):
    _, shards = made
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    assert "No space left" in find(shards, "--output", small_disk / "found", rc=74)
    # The other script that writes a picture, which Pillow does.
    words = (shards, "--sheet", small_disk / "sheet.png")
    assert "No space left" in run_script("verify_shards", *words, rc=74)


def test_shards_are_made_and_trained_on_without_copies(made, tmp_path):
    source, shards = made
    find(shards, "--similar", "--output", tmp_path / "found")
    table = tmp_path / "found/duplicates.parquet"
    keys = tmp_path / "found/keep.txt"
    again = tmp_path / "again"
    text = make_shards(source, again, SPLITS, *CHECKS, f"source.leave_out={table}")

    # The ledger says why each is missing, and of which image it is a copy.
    duplicates = rows_of(tmp_path / "found")
    rows = ledger(again)
    assert rows.keys() == duplicates.keys()
    for path, row in rows.items():
        assert row["reason"] == (None if duplicates[path]["keep"] else "left_out"), path
        assert row["detail"] == duplicates[path]["copy_of"], path
    num = len(rows)
    num_kept = NUM_PICTURES + len(COPIES)
    assert f"{num} inputs = {num_kept} kept + {num - num_kept} rejected" in text
    splits = read_manifest(again).splits
    samples = {name: entry.num_samples for name, entry in splits.items()}
    assert samples == {"train": NUM_PICTURES, "val": len(COPIES)}

    # The other way: the old shards, trained on without the copies.
    data = {"path": str(shards), "global_batch": 2, "only_keys": str(keys)}
    (part,) = open_training_set(DataSettings.model_validate(data), seed=0).parts
    left = set(sample_keys(part, range(part.num_samples)))
    kept = {row["key"] for row in duplicates.values() if row["keep"]}
    assert left == kept - {f"val-cat-{number}" for number in range(len(COPIES))}


def test_a_folder_without_shards_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        assert "correct the path" in find(place, rc=2)


def test_a_list_of_other_images_is_refused(made, tmp_path):
    source, shards = made
    find(shards, "--output", tmp_path / "found")
    written(tmp_path / "others/cat/a.png", encoded(picture(7), "PNG"))
    rows = rows_of(tmp_path / "found")
    (copy,) = (path for path, row in rows.items() if not row["keep"])

    # Another corpus, and another layout of the same one.
    options = (f"source.leave_out={tmp_path}/found/duplicates.parquet", *CHECKS)
    for other in (tmp_path / "others", source / "train"):
        text = make_shards(other, tmp_path / "again", *options, rc=2)
        assert "1 of the 1 copies in" in text
        assert repr(copy) in text
    options = (SPLITS, *CHECKS, "source.leave_out=missing")
    text = make_shards(source, tmp_path / "again", *options, rc=2)
    assert "source.leave_out" in text
    assert "cannot be read" in text
