"""External readers on our shards and indexes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from blake3 import blake3

from tests.support.corpora.external_tars import imagenet_22k_layout
from tests.support.corpora.image_samples import decoded
from tests.support.corpora.indexing import index
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.levels import by_level
from tests.support.tables import every
from tests.support.waiting import run_python
from vitscale.data.index import read_manifest, read_split

# In a process of its own: `datasets` reads the variables of its caches when it is imported.
HUGGING_FACE = """
import json, sys
from blake3 import blake3
from datasets import Image, load_dataset
folder, split, suffix, cache, streaming = sys.argv[1:]
data = load_dataset(folder, split=split, cache_dir=cache, streaming=streaming == "True")
print(json.dumps(data.features["cls"].names))
data = data.cast_column(suffix, Image(decode=False))
for row in data:
    image = blake3(row[suffix]["bytes"]).hexdigest()
    print(json.dumps([row["__key__"], row["cls"], image]))
"""


@dataclass
class Shards:
    folder: Path
    suffix: str

    @property
    def splits(self):
        return sorted(read_manifest(self.folder).splits)

    def indexed(self, split):
        """Key, label and BLAKE3 of the image's bytes, equal for all readers."""
        samples = []
        for row in pq.read_table(self.folder / "index.parquet").to_pylist():
            if row["split"] == split:
                samples.append((row["key"], row["label"], row["blake3"].hex()))
        return samples

    def pixels(self, split):
        """Label and decoded image of every sample."""
        index = read_split(self.folder, split=split)
        samples = []
        for i in range(index.num_samples):
            pixels = decoded(index.read(i), "RGB")
            samples.append((index.locate(i).label, pixels.tobytes()))
        return samples


@pytest.fixture(scope="module")
def digits(digits_shards) -> Shards:
    # Of one format, so that Hugging Face's reader, which needs a column for images, can read them.
    table = pq.read_table(digits_shards / "index.parquet")
    (suffix,) = {*table.column("format").to_pylist()}
    return Shards(digits_shards, suffix)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Shards:
    """JPEG, PNG and WebP mixed, as in a web crawl."""
    folder = tmp_path_factory.mktemp("mixed") / "shards"
    make_shard_folder(folder, lengths={"train": (7, 6), "val": (4,)})
    return Shards(folder, "")


@pytest.fixture(params=["digits", "mixed"])
def shards(request) -> Shards:
    return request.getfixturevalue(request.param)


def test_webdataset_reads_the_indexed_samples(shards):
    for split in shards.splits:
        entry = read_manifest(shards.folder).splits[split]
        last = entry.num_tars - 1
        # Its own notation for several tars, which our names are made for.
        url = f"{shards.folder}/{split}-{{000000..{last:06d}}}.tar"
        read = []
        for row in webdataset.WebDataset(url, shardshuffle=False):
            (suffix,) = {"jpg", "png", "webp"} & row.keys()
            image = blake3(row[suffix]).hexdigest()
            read.append((row["__key__"], int(row["cls"]), image))
        # In the order of the index, too.
        assert read == shards.indexed(split)


@every(streaming=by_level([False, True], fast=[True], slow=[False]))
def test_hugging_face_datasets_reads_the_indexed_samples(digits, streaming, tmp_path):
    # Without a network, and without the caches of the user.
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }
    split = "test"
    arguments = [digits.folder, split, digits.suffix, tmp_path / "cache", streaming]
    finished = run_python("-c", HUGGING_FACE, *arguments, env=os.environ | offline)
    assert finished.returncode == 0, finished.stderr
    names, *rows = map(json.loads, finished.stdout.splitlines())
    # Names of classes, not numbers alone: they come from the card that lies beside the tars.
    assert tuple(names) == read_manifest(digits.folder).classes
    assert [tuple(row) for row in rows] == digits.indexed(split)


def timm_pixels(folder, split):
    from timm.data.readers.reader_wds import ReaderWds

    reader = ReaderWds(str(folder), split=split)
    # From `_info.json`; timm's schedules count steps by it.
    assert len(reader) == read_manifest(folder).splits[split].num_samples
    samples = []
    for image, target in reader:
        pixels = np.asarray(image.convert("RGB"))
        samples.append((target, pixels.tobytes()))
    return samples


def test_timm_reads_the_indexed_samples(shards):
    for split in shards.splits:
        assert timm_pixels(shards.folder, split) == shards.pixels(split)


def test_timm_reads_external_tars_through_our_index(tmp_path):
    tars = tmp_path / "tars"
    # It writes the tars while it yields what they hold.
    list(imagenet_22k_layout(tars, splits={"train": 2}, samples=5))
    settings = ["labels.space=imagenet_22k", "labels.values=index"]
    folder = tmp_path / "index"
    index(tars, folder, *settings)
    # timm follows the paths in our `_info.json`, which lead out of its folder.
    ours = Shards(folder, "jpg")
    assert timm_pixels(folder, "train") == ours.pixels("train")
