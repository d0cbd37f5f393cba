"""data_prep/verify_shards.py as people run it, and the entry points that it writes."""

import shutil
from pathlib import Path

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
    make_shard_folder(tmp_path / "shards", classes=("cat", "dog", "eel"))
    run_script(
        "verify_shards", tmp_path / "shards", "--sheet", tmp_path / "new/sheet.png"
    )
    with Image.open(tmp_path / "new/sheet.png") as sheet:
        pixels = np.asarray(sheet).reshape(3, -1, sheet.width, 3)
    assert all((row < 250).any() for row in pixels)
    tar, *_ = (tmp_path / "shards").glob("train-*.tar")
    tar.write_bytes(tar.read_bytes().replace(b"PNG", b"..."))
    text = run_script(
        "verify_shards", tmp_path / "shards", "--sheet", tmp_path / "s.png", rc=2
    )
    assert "image's bytes differ" in text
    assert f"written: {tmp_path}/s.png" in text
    assert "SHARDS: s3://b/c is a URL" in run_script("verify_shards", "s3://b/c", rc=2)


SIZE = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The same shards, plain and with entry points."""
    if why := missing("region"):
        skip_or_fail(f"the region decoder does not work here: {why}")
    base = tmp_path_factory.mktemp("entry_points")
    source = corpus(base / "images", side=300)
    make_shards(source, base / "plain", "images.check=header", "shards.min_shards=2")
    shutil.copytree(base / "plain", base / "with")
    run_script("verify_shards", base / "with", "--entry-points")
    return base / "plain", base / "with"


def test_they_change_no_other_file(folders):
    plain, written = folders
    assert not (plain / "entry_points").exists()
    for path in plain.glob("*.*"):
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name
    names = {path.name for path in (written / "entry_points").iterdir()}
    assert names == {path.stem + ".jpt" for path in plain.glob("*.tar")}


def test_the_loader_uses_them_and_gives_the_same_pixels(folders, monkeypatch):
    given = []
    crop = RegionDecoder.crop

    def counted(self, data, request, *, out=None):  # as replaced
        given.append(len(request.entry_points))
        return crop(self, data, request, out=out)

    monkeypatch.setattr(RegionDecoder, "crop", counted)
    pixels = []
    num_given = []
    for folder in folders:
        given.clear()
        data = DataSettings(
            path=str(folder), global_batch=4, val_split="test", decoder="region"
        )
        training_set = open_training_set(data, seed=0)
        samples = TrainingSamples(
            training_set, Augmentation(data, image_size=SIZE, seed=0)
        )
        out = torch.empty(20, 3, SIZE, SIZE, dtype=torch.uint8)
        assert [samples.fill(position, out[position])[1] for position in range(20)] == [
            []
        ] * 20
        pixels.append(out)
        num_given.append(sum(map(bool, given)))
    assert torch.equal(*pixels)
    assert num_given[0] == 0
    assert num_given[1] > 4
