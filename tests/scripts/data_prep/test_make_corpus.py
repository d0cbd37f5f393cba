"""data_prep/make_corpus.py, run as people run it."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.corpora.image_corpus import run_script

SPLITS = ("train", "test")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*.png")
    }


def split_sizes(corpus: str, images: Path, shards: Path, *more: str) -> list[int]:
    """Numbers of training and test images in shards made with the corpus's configuration."""
    options = (f"source.path={images}", f"output={shards}", *more)
    run_script("make_shards", "--config", f"configs/data/{corpus}.yaml", *options)
    splits = json.loads((shards / "_info.json").read_text())["splits"]
    return [splits[split]["num_samples"] for split in SPLITS]


def test_digits_are_1437_and_360_images_and_the_same_each_time(tmp_path):
    for name in ("a", "b"):
        run_script("make_corpus", "digits", tmp_path / name)
    files = files_of(tmp_path / "a")
    assert files == files_of(tmp_path / "b")
    counts = [sum(path.startswith(split) for path in files) for split in SPLITS]
    assert counts == [1437, 360]
    per_class = [
        sum(path.startswith(f"test/{d}/") for path in files) for d in range(10)
    ]
    assert min(per_class) >= 34
    assert max(per_class) <= 37
    with Image.open(io.BytesIO(files["train/0/0000.png"])) as image:
        assert image.size == (32, 32)
        assert image.mode == "RGB"
    assert split_sizes("digits", tmp_path / "a", tmp_path / "shards") == [1437, 360]


def test_a_full_disk_is_an_error_of_storage(small_disk):
    assert "No space left" in run_script(
        "make_corpus", "digits", small_disk / "images", rc=74
    )
    assert list(small_disk.iterdir()) == []


def test_characters_become_shards_and_stay_the_same(tmp_path):
    images = tmp_path / "images"
    options = ("--num-train", "3", "--num-test", "1")
    text = run_script("make_corpus", "characters", images, *options)
    num_letters = len(list((images / "train").iterdir()))
    fonts = {
        split: {p.stem[:-4] for p in (images / split).rglob("*.png")}
        for split in SPLITS
    }
    assert len(fonts["train"]) == 3
    assert fonts["train"].isdisjoint(fonts["test"])
    for png in files_of(images).values():  # letters lie inside, and stand out
        pixels = np.asarray(Image.open(io.BytesIO(png)))
        assert pixels.shape == (48, 48, 3)
        assert pixels.max() >= 240 > 64 >= pixels[0].max()
    assert f"{3 * num_letters} training and {num_letters} test images" in text
    assert "already there" in run_script("make_corpus", "characters", images, *options)
    text = run_script("make_corpus", "characters", images, "--num-train", "4", rc=2)
    assert "exists already and holds other files" in text
    assert split_sizes("characters", images, tmp_path / "shards") == [
        3 * num_letters,
        num_letters,
    ]
