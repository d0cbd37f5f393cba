"""What `vitscale prepare targets` writes: what timm's models say of each crop of a training."""

import json
import shutil

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file

from pretrain.run import TargetsRun
from pretrain.targets import prepare_targets
from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.tables import refused, rows
from vitscale.data.index import read_split
from vitscale.data.loader import start_loader_server, training_batches
from vitscale.data.training_set import open_training_set
from vitscale.distributed.world import World

pytestmark = pytest.mark.usefixtures("world")

SIZE = 32
SEED = 7
NUM_VIEWS = 2
# Two sets of shards, of 14 samples in tars of 5, 5 and 4, and of 8. Batches end within a tar.
RUN = yaml.safe_load("""
name: x
stage: targets
seed: 7
views: 2
precision: fp32
data: {global_batch: 4, num_workers: 0, crop_area: [0.2, 1.0]}
model: {width: 48, depth: 2, num_heads: 2, mlp_width: 96, patch_size: 8, image_size: 32}
objective: {name: features, patch_grid: [2, 1]}
engine: {device: cpu, max_micro_batch: 3}
optim: {lr: 0.001}
schedule: {steps: 10}
""")
# Both have 2 x 2 patches of these images; what they pool to features differs.
TEACHERS = ("test_vit", "test_vit2")


@pytest.fixture(scope="module")
def networks():
    """Models whose weights are all random: a head starts as zeros, say."""
    made = []
    for seed, name in enumerate(TEACHERS):
        torch.manual_seed(seed)
        network = timm.create_model(name, img_size=SIZE, num_classes=0).eval()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        made.append(network)
    return made


@pytest.fixture(scope="module")
def values(networks, tmp_path_factory):
    """The configuration of a preparation, but its output."""
    folder = tmp_path_factory.mktemp("prepared")
    shards = write_shard_folder(folder / "shards", num_per_class=7, num_shards=3)
    more = write_shard_folder(folder / "more", num_per_class=4, num_shards=1, seed=1)
    teachers = []
    for name, network in zip(TEACHERS, networks, strict=True):
        path = folder / f"{name}.safetensors"
        save_file(network.state_dict(), path)
        teachers.append({"weights": str(path), "model": name, "image_size": SIZE})
    data = {"path": str(shards), "mixture": [{"path": str(more), "share": 0.4}]}
    objective = RUN["objective"] | {"teachers": teachers}
    return RUN | {"data": RUN["data"] | data, "objective": objective}


def prepared(values, folder, world: World, **changed) -> list[str]:
    """The printed lines."""
    run = TargetsRun.model_validate(values | {"output": str(folder)} | changed)
    assert not list(run.problems())
    start_loader_server(0)
    return [*prepare_targets(run, world, is_dry_run=False)]


def crops_of(values):
    """The pixels of a training without targets, uint8, by set of shards, epoch and sample."""
    settings = TargetsRun.model_validate(values | {"output": "x"}).data
    data = open_training_set(settings, seed=SEED)
    loader = training_batches(
        data,
        settings=settings,
        image_size=SIZE,
        seed=SEED,
        start=0,
        stop=60,
        rank=0,
        world_size=1,
        micro_batch=4,
        pin_memory=False,
    )
    crops = {}
    with loader as batches:
        for number, batch in enumerate(batches):
            for row, image in enumerate(batch.images):
                part, epoch, sample, _ = data.order.at(4 * number + row)
                crops[part, epoch, sample] = image.clone()
    return data, crops


def num_compared(folder, values, networks) -> int:
    """Compare each row with what the models say of the crop, by docs/data_format.md."""
    data, crops = crops_of(values)
    num_rows = 0
    for part, index in enumerate(data.parts):
        for view in range(NUM_VIEWS):
            first = 0
            for shard, length in enumerate(index.shard_lengths):
                path = folder / f"view-{view}/{part}-{shard:06d}.bin"
                # A class token and two patches of each teacher, 64 wide, and a hash.
                rows = np.frombuffer(path.read_bytes(), np.uint8)
                rows = rows.reshape(length, 2 * 3 * 64 * 4 + 8)[:, :-8]
                found = rows.copy().view("<f4").reshape(length, 2, 3, 64)
                for row in range(length):
                    image = crops[part, view, first + row]
                    expected = [said(network, image) for network in networks]
                    np.testing.assert_allclose(
                        found[row], torch.stack(expected), rtol=1e-4, atol=1e-4
                    )
                    num_rows += 1
                first += length
    return num_rows


@torch.no_grad()
def said(network, image: torch.Tensor) -> torch.Tensor:
    """Pooled features, then two rows of patches, [3, 64]."""
    # Both have the mean and the deviation 0.5.
    tokens = network.forward_features((image[None] / 255 - 0.5) / 0.5)
    pooled = network.forward_head(tokens, pre_logits=True)
    # The class token is not among the patches.
    grid = tokens[:, 1:].unflatten(1, (2, 2)).permute(0, 3, 1, 2)
    patches = F.avg_pool2d(grid, (1, 2)).flatten(2).transpose(1, 2)
    return torch.cat([pooled, patches[0]])


def test_a_row_is_what_timms_models_say_of_a_crop_of_the_training(
    values, networks, world, tmp_path
):
    """Of each set of shards, view, tar and image."""
    prepared(values, tmp_path / "a", world)
    assert num_compared(tmp_path / "a", values, networks) == NUM_VIEWS * (14 + 8)


def test_an_unreadable_image_has_the_row_of_what_a_training_sees_for_it(
    values, networks, world, tmp_path
):
    shards = shutil.copytree(values["data"]["path"], tmp_path / "shards")
    index = read_split(str(shards), split="train")
    # The second image of the second tar.
    place = index.locate(6)
    with open(place.tar, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    damaged = values | {"data": values["data"] | {"path": str(shards)}}
    lines = prepared(damaged, tmp_path / "a", world)
    assert f"{NUM_VIEWS} crops are of substitutes for unreadable images" in lines[-2]
    assert num_compared(tmp_path / "a", damaged, networks) == NUM_VIEWS * (14 + 8)


def test_a_teacher_that_says_no_numbers_leaves_no_targets(
    values, networks, world, tmp_path
):
    """As int8 they would look like numbers."""
    broken = {key: value.clone() for key, value in networks[1].state_dict().items()}
    next(iter(broken.values()))[:] = np.nan
    save_file(broken, tmp_path / "broken.safetensors")
    good, bad = values["objective"]["teachers"]
    bad = bad | {"weights": str(tmp_path / "broken.safetensors")}
    objective = values["objective"] | {"teachers": [good, bad]}
    with refused("features are not finite"):
        prepared(values, tmp_path / "a", world, objective=objective, precision="int8")
    assert json.loads((tmp_path / "a/targets.json").read_text())["files"] == {}


@rows("""
- [changed, message]
- [{precision: bf16}, "precision: targets 'fp32', this run 'bf16'"]
- [{views: 3}, "views: targets 2, this run 3"]
- [{seed: 8}, "seed: targets 7, this run 8"]
""")
def test_a_folder_takes_no_other_targets(values, world, tmp_path, changed, message):
    """Nor while it is unfinished: its files would be of both."""
    folder = tmp_path / "a"
    prepared(values, folder, world)
    header = folder / "targets.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"files": {}}))
    before = header.read_bytes()
    with refused(f"(?s)other images, views or teachers.*{message}"):
        prepared(values, folder, world, **changed)
    assert header.read_bytes() == before
