"""data_prep/find_duplicates.py, and shards made again without the copies that it found."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from tests.support.corpora.image_corpus import ledger, make_shards, run_script
from tests.support.corpora.image_samples import encoded, rotated
from tests.support.corpora.shard_folders import photo
from tests.support.tables import Values, every
from vitscale.data.index import read_manifest, sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

NUM_PICTURES = 12
SPLITS = "source.splits={train: train, val: val}"
CHECKS = ("images.check=header", "source.holdout_fraction=0")


def picture(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(photo(seed, width=160, height=120))).convert("RGB")


TURN = Image.Transpose.ROTATE_90
COPIES = {
    "webp.webp": lambda image: encoded(image, "WEBP", quality=50),
    "png.png": lambda image: encoded(image, "PNG", compress_level=1),
    "turned.jpg": lambda i: encoded(
        i.transpose(TURN), "JPEG", quality=90, exif=rotated(6)
    ),
    "all.jpg": lambda image: encoded(
        ImageOps.mirror(image.reduce(2)), "JPEG", quality=40
    ),
}


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def find(*arguments, rc: int = 0) -> str:
    return run_script("find_duplicates", *arguments, rc=rc)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """(source, shards): different pictures in `train`, and copies of those in `val` beside them."""
    base = tmp_path_factory.mktemp("duplicates")
    source = base / "images"
    for seed in range(NUM_PICTURES):
        write(source / f"train/cat/{seed:02d}.png", encoded(picture(seed), "PNG"))
    for number, (name, copy) in enumerate(COPIES.items()):
        original = picture(100 + number)
        write(source / f"val/cat/{number}.png", encoded(original, "PNG"))
        write(source / f"train/cat/copy_{number}_{name}", copy(original))
    twin = encoded(picture(0), "PNG")
    write(source / "train/cat/twin.png", twin)
    make_shards(source, base / "shards", SPLITS, *CHECKS)
    return source, base / "shards"


def rows_of(folder: Path) -> dict[str, Values]:
    table = pq.read_table(folder / "duplicates.parquet").to_pylist()
    rows = {row["path"]: row for row in table}
    assert len(rows) == len(table)
    return rows


def test_every_promised_copy_is_found(made, tmp_path):
    _, shards = made
    text = find(shards, "--similar", "--output", tmp_path / "found")
    rows = rows_of(tmp_path / "found")
    key_of = {path: row["key"] for path, row in rows.items()}
    for number, name in enumerate(COPIES):
        row = rows[f"train/cat/copy_{number}_{name}"]
        assert not row["keep"]
        assert row["copy_of"] == key_of[f"val/cat/{number}.png"]
        assert 0.99 <= row["similarity"] <= 1
    twins = [rows[f"train/cat/{name}.png"] for name in ("00", "twin")]
    assert sorted(row["keep"] for row in twins) == [False, True]
    (lost,) = (row for row in twins if not row["keep"])
    assert lost["similarity"] == 1
    assert lost["copy_of"] in {row["key"] for row in twins}
    kept = [row for row in rows.values() if row["keep"]]
    assert len(kept) == NUM_PICTURES + len(COPIES)
    assert all(row["copy_of"] is None and row["similarity"] is None for row in kept)
    assert (tmp_path / "found/keep.txt").read_text().split() == [
        row["key"] for row in kept
    ]
    sheet = np.asarray(Image.open(tmp_path / "found/pairs.png"))
    assert (sheet.reshape(-1, 3) != 255).any(axis=1).mean() > 0.3
    num = NUM_PICTURES + 2 * len(COPIES) + 1
    assert f"{num} images, 5 of them copies: 1 with equal bytes, 4 similar" in text
    assert "cannot be decoded" not in text


def test_without_similar_only_equal_bytes_are_copies(made):
    _, shards = made
    find(shards)
    rows = rows_of(shards.with_name("shards-duplicates"))
    find(shards, "--output", shards / "manifest.json/found", rc=2)

    # The copy saved as PNG has other bytes.
    assert sum(not row["keep"] for row in rows.values()) == 1
    assert not shards.with_name("shards-duplicates").joinpath("pairs.png").exists()


@every(as_shards="false, true")
def test_images_of_an_evaluation_set_are_found(as_shards, made, tmp_path):
    source, shards = made
    seen = tmp_path / "evaluation/x"
    write(seen / "seen.jpg", encoded(ImageOps.mirror(picture(3)), "JPEG", quality=85))
    write(seen / "equal.png", encoded(picture(4), "PNG"))
    write(seen / "new.jpg", photo(5000))
    (seen / "notes.txt").write_text("no image")
    other = seen.parent
    name = f"{seen}/{{}}"
    if as_shards:
        other = tmp_path / "other"
        name = f"{tmp_path}/other/train-x-{{}}"
        make_shards(tmp_path / "evaluation", other, *CHECKS)
        find(
            other,
            "--similar",
            "--against",
            source / "train",
            "--output",
            tmp_path / "one",
        )
        assert (tmp_path / "one/pairs.png").exists()
    else:
        write(seen / "broken.gif", b"no picture")
        for link in ("up", "again"):  # 40 levels of each in all of the others
            (seen / link).symlink_to(seen.parent)
    text = find(shards, "--similar", "--against", other, "--output", tmp_path / "found")
    assert ("1 images cannot be decoded" in text) != as_shards
    assert "2 of an image of --against" in text
    rows = rows_of(tmp_path / "found")
    for path, copy_of in (("03", "seen.jpg"), ("04", "equal.png")):
        row = rows[f"train/cat/{path}.png"]
        copy_of = copy_of.partition(".")[0] if as_shards else copy_of
        assert not row["keep"]
        assert row["copy_of"] == name.format(copy_of)
    assert "no such folder" in find(shards, "--against", tmp_path / "missing", rc=2)


def test_converted_originals_and_other_classes_are_found(tmp_path):
    original = encoded(picture(1).convert("CMYK"), "JPEG", quality=90)
    for name in ("cat/a.jpg", "dog/b.jpg", "dog/c.jpg"):
        write(tmp_path / "images" / name, original)
    write(tmp_path / "images/cat/other.png", encoded(picture(2), "PNG"))
    write(tmp_path / "seen/original.jpg", original)
    make_shards(tmp_path / "images", tmp_path / "shards", *CHECKS)
    assert {row["status"] for row in ledger(tmp_path / "shards").values()} == {
        "repaired",
        "kept",
    }

    text = find(tmp_path / "shards")
    rows = rows_of(tmp_path / "shards-duplicates").values()
    pairs = [(row["class"], row["class_of_copied"]) for row in rows if not row["keep"]]
    num_mixed = sum(one != other for one, other in pairs)
    assert len(pairs) == 2
    assert num_mixed in (1, 2)
    assert f"note: {num_mixed} copies have another class" in text

    # The shards have none of the bytes of the evaluation set.
    text = find(tmp_path / "shards", "--against", tmp_path / "seen")
    assert "3 of an image of --against" in text
    assert "another class" not in text


def test_a_full_disk_is_an_error_of_storage(made, small_disk):
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    assert "No space left" in find(made[1], "--output", small_disk / "found", rc=74)
    words = (made[1], "--sheet", small_disk / "sheet.png")
    assert "No space left" in run_script("verify_shards", *words, rc=74)


def test_shards_are_made_and_trained_on_without_copies(made, tmp_path):
    source, shards = made
    find(shards, "--similar", "--output", tmp_path / "found")
    table = tmp_path / "found/duplicates.parquet"
    keys = tmp_path / "found/keep.txt"
    text = make_shards(
        source, tmp_path / "again", SPLITS, *CHECKS, f"source.leave_out={table}"
    )
    found = rows_of(tmp_path / "found")
    rows = ledger(tmp_path / "again")
    reasons = {path: row["reason"] for path, row in rows.items()}
    assert reasons == {
        path: None if row["keep"] else "left_out" for path, row in found.items()
    }
    assert {path: row["detail"] for path, row in rows.items()} == {
        path: row["copy_of"] for path, row in found.items()
    }
    num = len(rows)
    kept = NUM_PICTURES + len(COPIES)
    assert f"{num} inputs = {kept} kept + {num - kept} rejected" in text
    samples = {
        name: e.num_samples
        for name, e in read_manifest(tmp_path / "again").splits.items()
    }
    assert samples == {"train": NUM_PICTURES, "val": len(COPIES)}
    data = {"path": str(shards), "global_batch": 2, "only_keys": str(keys)}
    (part,) = open_training_set(DataSettings.model_validate(data), seed=0).parts
    left = set(sample_keys(part, range(part.num_samples)))
    assert left == {row["key"] for row in found.values() if row["keep"]} - {
        f"val-cat-{number}" for number in range(len(COPIES))
    }


def test_a_folder_without_shards_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        assert "correct the path" in find(place, rc=2)


def test_a_list_of_other_images_is_refused(made, tmp_path):
    source, shards = made
    find(shards, "--output", tmp_path / "found")
    write(tmp_path / "others/cat/a.png", encoded(picture(7), "PNG"))
    (copy,) = (
        path for path, row in rows_of(tmp_path / "found").items() if not row["keep"]
    )

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
