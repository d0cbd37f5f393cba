"""Tables of features equal the model's own library, whoever computes them and however often killed;
what cannot be written is refused before any work."""

import shutil
from collections import Counter, namedtuple
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
import yaml
from PIL import Image

from finetune import embedding, tables
from finetune.embedding import embed_images, feature_table
from finetune.images import Images, images_of_split
from finetune.settings import EmbedRun
from tests.support.corpora.shard_folders import Sample, image_bytes, write_folder
from tests.support.engine.small_models import export, small_model
from tests.support.engine.subjects import index_of
from tests.support.tables import lines, refused, rows
from vitscale.config.loader import load_run
from vitscale.data.index import read_split
from vitscale.evaluation.trained_model import open_model

# What ranks exchange goes through a group; here it has one.
pytestmark = pytest.mark.usefixtures("world")
# Parts of 4 rows: the last of 11 is not full.
NUM = 11
CLASSES = ("cat", "dog", "eel")


def make_shards(folder, *, side=16, classes=CLASSES):
    """PNGs of the model's size, so that any decoder has the same pixels."""
    samples = [
        Sample(
            f"k{i}",
            "png",
            image_bytes("png", seed=i, side=(side, side)),
            i % 3 if classes else None,
            side,
            side,
        )
        for i in range(NUM)
    ]
    write_folder(folder, {"train": [samples[:6], samples[6:]]}, classes=classes)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards") / "animals")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Without a head."""
    folder = tmp_path_factory.mktemp("models") / "vit"
    return export(small_model(num_classes=0), "timm", folder)


def run_of(init, shards, output, **values):
    given = {
        "init": str(init),
        "output": str(output),
        "compute": {"device": "cpu", "batch": 4},
        **values,
    }
    data = {"path": str(shards), "num_workers": 0, **values.get("data", {})}
    return EmbedRun.model_validate({**given, "data": data})


def embedded(init, shards, output, world, *, is_dry_run=False, **values):
    """The printed lines; the last one may be an error."""
    run = run_of(init, shards, output, **values)
    images = images_of_split(
        run.data.path, split=run.data.split, remote=run.data.remote, key="data.split"
    )
    model = open_model(**run.source())
    return [*embed_images(run, model, images, world, is_dry_run=is_dry_run)]


# Models with and without heads, class tokens and patches, at their own and at another size; what
# timm takes for its features or its class token.
MODELS = """
family | settings | size | tokens
vit | {num_classes: 0} | 16 | pooled
vit | {num_classes: 5, num_registers: 2} | 16 | class
vit | {num_classes: 0, pool: gap} | 32 | pooled
vit | {num_classes: 0, pool: gap, pool_norm: true, class_token: true} | 16 | class
timm | {num_classes: 0} | 32 | pooled
timm | {num_classes: 0, model: vit_tiny_patch16_dinov3_qkvb} | 32 | class
"""


@lines(MODELS)
def test_features_are_those_of_timm(tmp_path, world, family, settings, size, tokens):
    size = int(size)
    model = small_model(family, **yaml.safe_load(settings))
    folder = export(model, "timm", tmp_path / "model")
    shards = make_shards(tmp_path / "shards", side=size)
    output = tmp_path / "x.parquet"
    printed = embedded(folder, shards, output, world, tokens=tokens, image_size=size)
    assert printed == [f"{output}: {NUM} images, 0 of them unreadable"]

    # Pillow's pixels through timm's model; another size changes its positions.
    own = {"img_size": size} if family == "vit" else {}
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True, **own).eval()
    index = read_split(str(shards), split="train")
    pixels = []
    for number in range(NUM):
        (tmp_path / "image").write_bytes(index.read(number))
        with Image.open(tmp_path / "image") as image:
            pixels.append(np.asarray(image.convert("RGB")))
    images = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = theirs.forward_features(images)
        if tokens == "class":
            expected = expected[:, 0]
        else:
            expected = theirs.forward_head(expected, pre_logits=True)

    table = pq.read_table(output)
    assert table.column_names == ["key", "label", "features", "error"]
    assert table["key"].to_pylist() == [f"k{i}" for i in range(NUM)]
    assert table["label"].to_pylist() == [CLASSES[i % 3] for i in range(NUM)]
    found = np.array(table["features"].to_pylist(), np.float32)
    # Weights that nobody trained have features of several units.
    largest = max(1.0, float(expected.abs().max()))
    assert np.abs(found - expected.numpy()).max() < 1e-5 * largest


def test_halves_and_images_without_labels(tmp_path, world, vit):
    shards = make_shards(tmp_path / "shards", classes=())
    for dtype in ("float32", "float16"):
        embedded(vit, shards, tmp_path / f"{dtype}.parquet", world, dtype=dtype)
    full, half = (
        pq.read_table(tmp_path / f"{dtype}.parquet") for dtype in ("float32", "float16")
    )
    assert half["label"].null_count == NUM
    values = half["features"].combine_chunks()
    assert str(values.type) == "fixed_size_list<element: halffloat>[24]"
    rounded = np.array(full["features"].to_pylist(), np.float16)
    assert np.array_equal(np.array(values.to_pylist(), np.float16), rounded)


def test_features_are_computed_in_the_precision_that_is_asked_for(
    tmp_path, world, shards, vit
):
    found = {}
    for precision in ("fp32", "bf16"):
        compute = {"device": "cpu", "batch": 4, "precision": precision}
        output = tmp_path / f"{precision}.parquet"
        embedded(vit, shards, output, world, compute=compute)
        features = pq.read_table(output)["features"].to_pylist()
        found[precision] = np.array(features, np.float32)

    # The lower half of an fp32 number is what bf16 does not have.
    lower = {name: values.view(np.uint32) & 0xFFFF for name, values in found.items()}
    assert not lower["bf16"].any()
    assert (lower["fp32"] != 0).mean() > 0.9
    # A few dozen roundings of 8 bits.
    largest = np.abs(found["fp32"]).max()
    assert np.abs(found["bf16"] - found["fp32"]).max() < largest * 2**-4


def test_an_unreadable_image_has_a_row_of_zeros_and_its_reason(
    tmp_path, world, shards, vit
):
    damaged = shutil.copytree(shards, tmp_path / "damaged")
    index = read_split(str(damaged), split="train")
    place = index.locate(8)
    with open(place.tar, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))

    output = tmp_path / "x.parquet"
    with refused("1 of 11 could not be read"):
        embedded(vit, damaged, output, world)
    table = pq.read_table(output)
    assert [i for i, error in enumerate(table["error"].to_pylist()) if error] == [8]
    is_zero = ~np.array(table["features"].to_pylist()).any(axis=1)
    assert np.flatnonzero(is_zero).tolist() == [8]


# ---- parts ---------------------------------------------------------------------------------------


def table_of(total, *, batch, **values):
    return tables.Table(
        model=None,
        images=Images(paths=range(total)),
        data=small_model().preprocessing.settings(batch=batch),
        precision="fp32",
        fields=(),
        compute=None,
        columns=None,
        **values,
    )


def test_parts_are_whole_batches_of_any_table():
    """A small table has parts for many ranks, a large one parts of a bounded size."""
    for total, batch, expected in (
        (11, 4, 4),
        (100, 64, 64),
        (4096 * 2, 64, 128),
        (14_200_000, 64, 4096),
        (14_200_000, 100, 4000),
        (14_200_000, 9000, 9000),
    ):
        parts = table_of(total, batch=batch).parts()
        assert len(parts[0]) == min(total, expected)
        # Each image once.
        assert parts[0].start == 0
        assert parts[-1].stop == total
        assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))


def test_parts_are_joined_in_the_memory_of_one(tmp_path):
    used = []
    before = pa.total_allocated_bytes()
    table = table_of(
        9 * 4096,
        batch=4096,
        count=lambda _: used.append(pa.total_allocated_bytes() - before),
    )
    nulls = pa.nulls(4096, pa.string())
    names = [f"{number:0900}" for number in range(4096)]
    part = pa.table([names, nulls, nulls], schema=table.schema)
    for number in range(9):
        pq.write_table(part, tmp_path / f"{number:08}")
    size = part.nbytes
    del part
    tables._join(table, tmp_path, tmp_path / "x.parquet", Counter(), [])
    assert pq.read_metadata(tmp_path / "x.parquet").num_rows == 9 * 4096
    # A part takes 1.5 tables. Arrow's threads may hold the one before for a moment; all nine would
    # be 13 tables.
    assert len(used) == 9
    assert max(used) < 4 * size


def test_a_killed_command_is_resumed_with_the_same_bytes(
    tmp_path, world, shards, vit, monkeypatch
):
    whole = tmp_path / "whole.parquet"
    embedded(vit, shards, whole, world)

    # Another command in the same place has parts of its own.
    output = tmp_path / "x.parquet"
    opened = open_model(str(vit))
    images = images_of_split(
        str(shards), split="train", remote=run_of("", "", "").data.remote
    )
    run = run_of(vit, shards, output)
    table = feature_table(run, opened, images)
    other = feature_table(run_of(vit, shards, output, dtype="float16"), opened, images)
    folders = [tables.parts_folder(str(output), each) for each in (table, other)]
    assert folders[0] != folders[1]
    passed = []

    def killed(part, file):
        if passed:
            raise KeyboardInterrupt
        passed.append(part)
        write(part, file)

    write = pq.write_table
    monkeypatch.setattr(tables.pq, "write_table", killed)
    second = replace(world, rank=1, world_size=2)
    with pytest.raises(KeyboardInterrupt):
        list(embed_images(run, opened, images, second, is_dry_run=False))
    monkeypatch.undo()
    assert not output.exists()
    # The first of the second rank's two parts; half a file has another name.
    assert [path.name for path in folders[0].iterdir()] == ["00000001"]

    printed = embedded(vit, shards, output, world)
    assert printed[0] == "resumed: 2 of 3 parts are missing"
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [whole, output]

    # Once more: as a job that was requeued after its end.
    assert embedded(vit, shards, output, world) == [
        f"{output}: has these features already"
    ]


# ---- before any work -----------------------------------------------------------------------------

OTHERS = """
- [values, what]
- [{dtype: float16}, dtype]
- [{tokens: class}, tokens]
- [{image_size: 32}, "model, weights"]
- [{preprocessing: {mean: [0.4, 0.5, 0.5]}}, preprocessing]
- [{compute: {device: cpu, batch: 8}}, compute]
- [{init: other}, weights]
- [{data: other}, images]
"""


@rows(OTHERS)
def test_an_output_of_others_is_refused(tmp_path, world, shards, vit, values, what):
    output = tmp_path / "x.parquet"
    embedded(vit, shards, output, world)
    before = output.read_bytes()
    init = vit
    if values.pop("init", None):
        weights = small_model(num_classes=0)
        weights.network.cls_token.data += 1
        init = export(weights, "timm", tmp_path / "other")
    # As many images, of the same names.
    if values.pop("data", None):
        shards = make_shards(tmp_path / "shards", side=24)
    with refused(f"exists, with features of other {what}\n.*remove the file"):
        embedded(init, shards, output, world, **values)
    assert output.read_bytes() == before

    # A file of somebody else.
    output.write_bytes(b"notes")
    with refused("exists, with features of other compute, dtype, images, model"):
        embedded(vit, shards, output, world)


def test_what_cannot_work_is_refused(tmp_path, world, shards, vit, monkeypatch):
    output = tmp_path / "x.parquet"
    with refused("no split 'dev'\n.*train\n.*set data.split"):
        embedded(vit, shards, output, world, data={"split": "dev"})
    convnext = export(small_model("timm", num_classes=0), "timm", tmp_path / "model")
    with refused("tokens: this model has no class token"):
        embedded(convnext, shards, output, world, tokens="class")
    words = ["init=x", "data.path=x"]
    for word, message in (
        (
            "tokens=all output=x.parquet",
            "tokens: 'all' is not allowed.*\n.*pooled, class",
        ),
        ("output=x.csv", "output: 'x.csv' does not end in .parquet"),
    ):
        with refused(message):
            load_run(EmbedRun, None, overrides=[*words, *word.split()])

    # Rows of 24 values and their parts, of which nothing is there yet.
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(embedding.shutil, "disk_usage", lambda _: usage(0, 0, 2000))
    with refused("(?s)GB needed, for the table and the parts.*dtype=float16"):
        embedded(vit, shards, output, world)
    embedded(vit, shards, tmp_path / "half.parquet", world, dtype="float16")
    assert not output.exists()


def test_weights_that_are_no_numbers_leave_no_table(tmp_path, world, shards):
    model = small_model(num_classes=0)
    model.network.get_parameter("blocks.1.mlp.fc1.weight").data[0, 0] = np.nan
    run = run_of("x", shards, tmp_path / "x.parquet")
    images = images_of_split(str(shards), split="train", remote=run.data.remote)
    with refused("features are not finite"):
        list(embed_images(run, model, images, world, is_dry_run=False))
    assert not (tmp_path / "x.parquet").exists()


def test_features_that_halves_cannot_hold_are_refused(tmp_path, world, shards):
    """They are beyond 65,504, and would be infinite."""
    model = small_model(num_classes=0)
    model.network.norm.weight.data[:] = 1e6
    images = images_of_split(
        str(shards), split="train", remote=run_of("", "", "").data.remote
    )
    half = run_of("x", shards, tmp_path / "half.parquet", dtype="float16")
    with refused("(?s)features are not finite in float16.*dtype=float32"):
        list(embed_images(half, model, images, world, is_dry_run=False))
    full = run_of("x", shards, tmp_path / "full.parquet")
    list(embed_images(full, model, images, world, is_dry_run=False))
    values = np.array(pq.read_table(tmp_path / "full.parquet")["features"].to_pylist())
    assert np.abs(values).max() > 65_504


def test_a_dry_run_plans_a_whole_corpus(tmp_path, world, vit, monkeypatch):
    images = Images(index=index_of(np.zeros(14_200_000, np.int32), ("a",)))
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(embedding.shutil, "disk_usage", lambda _: usage(0, 0, 10**10))
    run = run_of(vit, "x", tmp_path / "x.parquet", dtype="float16")
    model = open_model(**run.source())
    printed = list(embed_images(run, model, images, world, is_dry_run=True))

    # 24 halves a row. Multiply-adds by hand: 17 tokens, width 24, MLP 40, two blocks.
    a_block = 17 * (4 * 24 * 24 + 2 * 24 * 40) + 2 * 17 * 17 * 24
    flops = 2 * (2 * a_block + 16 * 48 * 24)
    assert "14,200,000 rows with 24 features of float16, 0.682 GB" in printed[0]
    assert f"{14_200_000 * flops:.3g} FLOPs" in printed[1]
    assert printed[2].startswith("1.363 GB needed")
    assert not any(tmp_path.iterdir())
