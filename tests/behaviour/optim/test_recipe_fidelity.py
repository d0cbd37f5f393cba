"""Recipes equal the published numbers: published_recipes.yaml, beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from vitscale.config.loader import load_run_file, read_yaml
from vitscale.runs.training import TrainingRun, training_plan

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RUN_TYPES = {"pretrain": PretrainRun, "finetune": FinetuneRun}


def recipe(name: str) -> TrainingRun:
    """name: a file below configs/."""
    return load_run_file(RUN_TYPES, CONFIGS / f"{name}.yaml")


# Terms of the papers' tables that are one setting each.
PLAIN = dict(
    word.split("=")
    for word in """
    optimizer=optim.name moment=optim.momentum_dtype layer_decay=optim.layer_decay
    batch=data.global_batch lr=optim.lr decay=schedule.decay decay_from=schedule.decay_from
    final_lr=schedule.final_lr decay_mode=optim.weight_decay_mode dropout=model.dropout
    flip=data.horizontal_flip views=data.views clip=optim.clip_norm head_bias=model.head_bias
    head_std=model.head_std classes=model.num_classes px=model.image_size
    tanh_layer=model.representation_layer gelu=model.gelu eps=model.layer_norm_eps
    layer_scale=model.layer_scale init=model.weight_init
    """.split()
)


def resolved(run: TrainingRun) -> dict[str, Any]:
    """A recipe's values in the terms of the papers' tables."""
    data, model, optim, schedule = run.data, run.model, run.optim, run.schedule
    plan = training_plan(run, world_size=1, num_samples=data.planned_num_samples or 0)
    # AdamW scale: an independent decay is the coupled one times the peak.
    rate = optim.lr if optim.weight_decay_mode == "independent" else 1.0
    augment, mixing = data.augment, data.mixing
    randaugment = augment.randaugment

    def of(key: str) -> Any:
        """None for what a model of timm has no key for."""
        return getattr(model, key, None)

    plain = {}
    for key, path in PLAIN.items():
        section, name = path.split(".")
        plain[key] = getattr(getattr(run, section), name, None)
    return plain | {
        "betas": optim.momentum if optim.name == "sgd" else optim.betas,
        "adam_eps": None if optim.name == "sgd" else optim.eps,
        "drops_at": [round(share, 5) for share in schedule.drops_at],
        "length": schedule.epochs or schedule.steps,
        "warmup": schedule.warmup_epochs or schedule.warmup_steps,
        "weight_decay": round(optim.weight_decay / rate, 9),
        "drop_path": of("drop_path") and (model.drop_path, model.drop_path_by_depth),
        "crop": "plain" if data.crop == "plain" else data.crop_area,
        "crop_law": (data.crop, *(round(ratio, 3) for ratio in data.crop_aspect)),
        "resampling": (data.interpolation, data.antialias),
        "augment": (randaugment.policy, randaugment.num_ops, randaugment.magnitude)
        if randaugment
        else "three" * augment.three_augment,
        "augment_filling": (randaugment.fill, randaugment.interpolation)
        if randaugment and randaugment.policy == "timm"
        else None,
        "erasing": augment.erasing
        and (augment.erasing.probability, augment.erasing.mode),
        "mixing": mixing and (mixing.mixup_alpha, mixing.cutmix_alpha, mixing.mode),
        "pixels": (data.mean, data.std),
        "loss": getattr(run.objective, "loss", run.objective.name),
        "smoothing": getattr(run.objective, "label_smoothing", 0.0),
        "distilled": run.objective.name == "distillation"
        and (run.objective.kind, run.objective.alpha, run.objective.teacher.model)
        + (run.objective.teacher.image_size, model.distillation_token),
        "mae": run.objective.name == "mae"
        and tuple(list(run.objective.model_dump().values())[1:]),
        "preset": of("preset") or of("model"),
        "pool": (of("pool"), of("class_token"), of("pool_norm")),
        "positions": (of("positions"), of("position_init"), of("class_position")),
        "resized_by": run.position_embedding if isinstance(run, FinetuneRun) else None,
        "evaluation": data.eval_resize
        if data.eval_resize == "squash"
        else (data.eval_resize, data.eval_crop_fraction),
        "eval_filter": (
            data.eval_interpolation or data.interpolation,
            data.eval_antialias,
        ),
        "ema": optim.ema and not optim.ema.warmup and optim.ema.decay,
        "thousand_steps": round(plan.total_steps / 1000),
    }


def published(entry: dict[str, Any]) -> dict[str, Any]:
    """All keys of an entry of published_recipes.yaml."""
    found: dict[str, Any] = {}
    for base in entry.get("base", ()):
        found |= published(TABLE["papers"][base])
    return found | {key: value for key, value in entry.items() if key != "base"}


TABLE = read_yaml(
    Path(__file__).with_name("published_recipes.yaml").read_text(), name=""
).values
# Ours: no paper trains them.
NO_RECIPE = {
    "cifar10/vit_tiny",
    *(
        f"{corpus}/{stage}"
        for corpus in ("demo", "digits")
        for stage in ("pretrain", "finetune")
    ),
}


@pytest.mark.parametrize("name", TABLE["recipes"])
def test_recipe_resolves_to_the_published_numbers(name: str) -> None:
    found = json.loads(json.dumps(resolved(recipe(name))))
    assert found == published(TABLE["recipes"][name])


def test_every_training_config_is_in_the_table() -> None:
    found = {
        str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml")
    }
    others = ("chains/", "data/", "eval/", "studies/")
    listed = TABLE["recipes"].keys() | NO_RECIPE
    assert {name for name in found if not name.startswith(others)} == listed
