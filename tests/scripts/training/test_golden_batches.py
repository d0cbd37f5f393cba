"""The first global batches of training and evaluation are those of the golden files."""

import hashlib
from functools import partial
from typing import Any

import pytest
import yaml

from tests.support.engine.subjects import WORLD
from tests.support.loader_runs import SEED, rank_batches_of
from tests.support.runs import OTHER_SHARDS, SHARDS, TINY, make_shards
from vitscale.data.loader import Batch
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_val_split
from vitscale.evaluation.samples import evaluation_batches
from vitscale.objectives.mixing import mix_batch

BATCH = 8
NUM_BATCHES = 3
SIZE = 8
# Settings of the papers' recipes, and what two sets of shards have; each with its own draws.
TRAINING: dict[str, dict[str, Any]] = yaml.safe_load(f"""
plain: {{crop: plain, interpolation: bicubic, antialias: true}}
augreg: {{augment: {{randaugment: {{num_ops: 2, magnitude: 15}}}}, mixing: {{mixup_alpha: 0.5}}}}
deit:
  repeats: 2
  interpolation: bicubic
  augment:
    randaugment: {{policy: timm, magnitude: 9, magnitude_std: 0.5}}
    erasing: {{probability: 0.5, mode: pixel}}
  mixing: {{mixup_alpha: 0.8, cutmix_alpha: 1.0, mode: pair}}
two_sets:
  mixture: [{{path: {OTHER_SHARDS}, share: 0.3}}]
  augment: {{three_augment: true}}
  first_percent: 80.0
""")
EVALUATION: dict[str, dict[str, Any]] = yaml.safe_load("""
squash: {}
center_crop: {eval_resize: center_crop, eval_interpolation: bicubic}
""")


def settings(changes: dict[str, Any]) -> DataSettings:
    return DataSettings.model_validate(TINY["data"] | changes)


def rows(batch: Batch) -> list[str]:
    """Each image as its label and the hash of its pixels."""
    lines = []
    for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
        digest = hashlib.sha256(image.numpy()).hexdigest()
        # Half of it is enough to see a change, and keeps the file small.
        lines.append(f"{label} {digest[:32]}")
    return lines


@pytest.fixture(scope="module", autouse=True)
def stored_shards(golden, tmp_path_factory):
    """Write the shards of all golden trainings anew, first of all with --renew-golden."""
    for shards, how in (
        (SHARDS, {"per_class": 20, "seed": 100}),
        (OTHER_SHARDS, {"per_class": 5, "seed": 200}),
    ):
        make = partial(make_shards, images=tmp_path_factory.mktemp("images"), **how)
        golden.folder(f"training/{shards.name}", make)


@pytest.mark.parametrize("name", TRAINING)
def test_training(golden, name):
    data = settings(TRAINING[name])
    batches = rank_batches_of(data, stop=NUM_BATCHES * BATCH, image_size=SIZE)
    entries = []
    for step, batch in enumerate(batches):
        entry = {"images": rows(batch)}
        entries.append(entry)
        # Mixing is not the loader's: the training does it, on the device.
        if data.mixing is not None:
            mixed = mix_batch(
                batch,
                data.mixing,
                seed=SEED,
                step=step,
                first_position=step * BATCH,
            )
            entry["mixed_labels"] = mixed.mixed_labels.tolist()
            entry["mix_lambda"] = mixed.mix_lambda.tolist()
            # Mixed pixels are not whole numbers, and processors round them differently.
            entry["mixed_mean"] = mixed.images.mean(dim=(1, 2, 3)).tolist()
    golden.json(f"training/batches/{name}.json", entries, rel=1e-5)


@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation(golden, name):
    data = settings(EVALUATION[name])
    index = open_val_split(data)
    assert index is not None
    batches = evaluation_batches(
        index,
        settings=data,
        image_size=SIZE,
        micro_batch=BATCH,
        world=WORLD,
    )
    entries = []
    for batch in batches:
        # Weight 0 is what pads the last batch.
        weights = batch.weights.tolist()
        entries.append({"images": rows(batch), "weights": weights})
    golden.json(f"training/batches/{name}.json", entries)
