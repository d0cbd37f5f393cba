"""data_prep/make_corpus.py, run as people run it."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.corpora.image_corpus import run_script

SPLITS = ("train", "test")


def files_of(folder):
    files = {}
    for path in folder.rglob("*.png"):
        files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def split_sizes(corpus, images, shards, *more):
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

    # Of scikit-learn's 1,797 images 360 are the test split, about as many of each class.
    counts = Counter(path.partition("/")[0] for path in files)
    assert counts == {"train": 1437, "test": 360}
    per_class = Counter(str(Path(path).parent) for path in files)
    tests = [per_class[f"test/{digit}"] for digit in range(10)]
    assert min(tests) >= 34
    assert max(tests) <= 37
    with Image.open(io.BytesIO(files["train/0/0000.png"])) as image:
        assert image.size == (32, 32)
        assert image.mode == "RGB"
    # The corpus's own configuration finds all of them, and rejects none.
    assert split_sizes("digits", tmp_path / "a", tmp_path / "shards") == [1437, 360]


def test_a_full_disk_is_an_error_of_storage(small_disk):
    text = run_script("make_corpus", "digits", small_disk / "images", rc=74)
    assert "No space left" in text
    # Half a corpus would be taken for a whole one.
    assert list(small_disk.iterdir()) == []


def test_characters_become_shards_and_stay_the_same(tmp_path):
    images = tmp_path / "images"
    options = ("--num-train", "3", "--num-test", "1")
    text = run_script("make_corpus", "characters", images, *options)
    num_letters = len([*(images / "train").iterdir()])
    num_train = 3 * num_letters
    # Other fonts for the test, or a model could learn each picture by heart.
    train_fonts, test_fonts = (
        {path.stem[:-4] for path in (images / split).rglob("*.png")} for split in SPLITS
    )
    assert len(train_fonts) == 3
    assert train_fonts.isdisjoint(test_fonts)
    # Letters stand out, and lie inside: a missing glyph, or a cut one, would not.
    for png in files_of(images).values():
        pixels = np.asarray(Image.open(io.BytesIO(png)))
        assert pixels.shape == (48, 48, 3)
        assert pixels.max() >= 240
        assert pixels[0].max() <= 64
    assert f"{num_train} training and {num_letters} test images" in text

    # Again the same: nothing to do. Another number: other files, which must not be mixed in.
    assert "already there" in run_script("make_corpus", "characters", images, *options)
    text = run_script("make_corpus", "characters", images, "--num-train", "4", rc=2)
    assert "exists already and holds other files" in text
    sizes = split_sizes("characters", images, tmp_path / "shards")
    assert sizes == [num_train, num_letters]
