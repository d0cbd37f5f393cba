"""The published numbers of BiT's recipes against what the files resolve to.

Kolesnikov et al. 2020, section 3.3; big_transfer, bit_hyperrule.py; losses and head biases:
big_vision, configs/bit_i21k.py and configs/bit_i1k.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.vitscale.optim.test_recipe_fidelity import CONFIGS, recipe
from vitscale.optim.schedules import learning_rate
from vitscale.runs.training import TrainingRun, training_plan


def resolved(run: TrainingRun) -> dict[str, Any]:
    data, model, optim, schedule = run.data, run.model, run.optim, run.schedule
    return {
        "optimizer": (optim.name, optim.momentum, optim.lr, optim.weight_decay, optim.clip_norm),
        "batch": data.global_batch,
        "length": schedule.epochs or schedule.steps,
        "warmup": schedule.warmup_steps,
        "crop": (data.crop, data.crop_area, data.crop_share, data.horizontal_flip),
        "resampling": (data.interpolation, data.antialias, data.eval_antialias, data.eval_resize),
        "mixing": data.mixing and (data.mixing.mixup_alpha, data.mixing.mode),
        "pixels": data.mean,
        "loss": run.objective.loss,
        "head": (model.head_bias, model.head_std),
        "classes": model.num_classes,
        "preset": model.preset,
        "px": model.image_size,
    }


BIT_M = {
    "optimizer": ("sgd", 0.9, 0.03 * 4096 / 256, 1e-4, None),
    "batch": 4096,
    "length": 90,
    "warmup": 5000,
    "crop": ("inception_tf", (0.05, 1.0), 1.0, True),
    "resampling": ("bilinear", False, False, "squash"),
    "mixing": None,
    "pixels": (0.5, 0.5, 0.5),
    "loss": "sigmoid",
    "head": (-10.0, 0.0),
    "classes": 21843,
    "preset": "R50x1",
    "px": 224,
}
HYPERRULE = BIT_M | {
    "optimizer": ("sgd", 0.9, 0.003, 0.0, None),
    "batch": 512,
    "length": 10_000,
    "warmup": 500,
    "crop": ("squash", (0.05, 1.0), 128 / 160, True),
    "mixing": (0.1, "batch"),
    "loss": "softmax",
    "head": (0.0, 0.0),
    "classes": 10,
    "px": 128,
}
PUBLISHED = {
    "bit/m_r50x1": BIT_M,
    "bit/m_r152x4": BIT_M | {"preset": "R152x4"},
    "bit/s_r50x1": BIT_M | {"loss": "softmax", "head": (0.0, 0.0), "classes": 1000},
    "bit/hyperrule_cifar10": HYPERRULE,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_resolve_to_the_published_numbers(name: str) -> None:
    assert resolved(recipe(name)) == PUBLISHED[name]


def test_every_bit_file_is_in_the_table() -> None:
    assert {f"bit/{path.stem}" for path in (CONFIGS / "bit").iterdir()} == set(PUBLISHED)


def test_rate_falls_after_30_60_and_80_epochs() -> None:
    run = recipe("bit/m_r50x1")
    plan = training_plan(run, world_size=1, num_samples=12_400_000)
    per_epoch = 12_400_000 / 4096

    def rate(epoch: float) -> float:
        return learning_rate(
            int(epoch * per_epoch), peak=run.optim.lr, final=0.0, total_steps=plan.total_steps,
            warmup_steps=plan.warmup_steps, decay=run.schedule.decay,
            drops_at=run.schedule.drops_at,
        )  # fmt: skip

    for epoch, power in ((29.9, 0), (30.1, 1), (59.9, 1), (60.1, 2), (79.9, 2), (80.1, 3)):
        assert rate(epoch) == pytest.approx(0.48 * 0.1**power)
