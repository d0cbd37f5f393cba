"""data_prep/verify_shards.py as people run it, and the entry points that it writes."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.corpora.image_corpus import corpus, make_shards, run_script
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.levels import skip_or_fail
from vitscale.data.samples import Augmentation, TrainingSamples
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.images.crops import RegionDecoder, missing


def test_a_sheet_has_a_row_of_images_for_each_class(tmp_path):
    shards = tmp_path / "shards"
    make_shard_folder(shards, classes=("cat", "dog", "eel"))
    path = tmp_path / "new/sheet.png"
    run_script("verify_shards", shards, "--sheet", path)
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet).reshape(3, -1, sheet.width, 3)
    # A class without a picture would have a white row.
    assert all((row < 250).any() for row in pixels)

    # Of damaged shards, too: the sheet helps to see what is wrong.
    tar, *_ = shards.glob("train-*.tar")
    tar.write_bytes(tar.read_bytes().replace(b"PNG", b"..."))
    path = tmp_path / "damaged.png"
    text = run_script("verify_shards", shards, "--sheet", path, rc=2)
    assert "image's bytes differ" in text
    assert f"written: {path}" in text
    assert "SHARDS: s3://b/c is a URL" in run_script("verify_shards", "s3://b/c", rc=2)


# Pixels a side of a crop.
SIZE = 24
# Most of an epoch, in which a third of the images are JPEGs.
NUM_POSITIONS = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same shards, plain and with entry points."""
    if why := missing("region"):
        skip_or_fail(f"the region decoder does not work here: {why}")
    base = tmp_path_factory.mktemp("entry_points")
    plain = base / "plain"
    written = base / "with"
    # Large enough to have any: small images are decoded from their top.
    source = corpus(base / "images", side=300)
    make_shards(source, plain, "images.check=header", "shards.min_shards=2")
    shutil.copytree(plain, written)
    run_script("verify_shards", written, "--entry-points")
    return plain, written


def test_they_change_no_other_file(folders):
    plain, written = folders
    assert not (plain / "entry_points").exists()
    for path in plain.glob("*.*"):
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name
    names = {path.name for path in (written / "entry_points").iterdir()}
    assert names == {path.stem + ".jpt" for path in plain.glob("*.tar")}


def test_the_loader_uses_them_and_gives_the_same_pixels(folders, monkeypatch):
    num_given = 0
    crops = RegionDecoder.crops

    def counted(self, data, requests, outs):  # as replaced
        nonlocal num_given
        num_given += sum(bool(request.entry_points) for request in requests)
        crops(self, data, requests, outs)

    monkeypatch.setattr(RegionDecoder, "crops", counted)
    pixels = []
    counts = []
    for folder in folders:
        num_given = 0
        data = DataSettings(
            path=str(folder),
            global_batch=4,
            val_split="test",
            decoder="region",
        )
        training_set = open_training_set(data, seed=0)
        augmentation = Augmentation(data, image_size=SIZE, seed=0)
        samples = TrainingSamples(training_set, augmentation)
        out = torch.empty(NUM_POSITIONS, 3, SIZE, SIZE, dtype=torch.uint8)
        for position in range(NUM_POSITIONS):
            _, unreadable = samples.fill(position, out[position])
            assert unreadable == []
        pixels.append(out)
        counts.append(num_given)
    assert torch.equal(*pixels)
    # A third of the images are JPEGs, which alone have entry points.
    assert counts[0] == 0
    assert counts[1] > 4
