"""Recipes equal the published numbers.

Numbers in the table are the papers' and their authors', with the source in each row; none is read
from this project.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from vitscale.config.loader import load_run_file
from vitscale.runs.training import TrainingRun, training_plan

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RUN_TYPES = {"pretrain": PretrainRun, "finetune": FinetuneRun}
# Crop laws and their ratios: tf.image.sample_distorted_bounding_box, and torchvision's defaults.
TENSORFLOW, TORCHVISION = ("inception_tf", 0.75, 1.33), ("inception", 0.75, 1.333)
CLS = ("cls", None, False)
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def recipe(name: str) -> TrainingRun:
    """name: a file below configs/."""
    return load_run_file(RUN_TYPES, CONFIGS / f"{name}.yaml")


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

    return {
        "optimizer": optim.name,
        "betas": optim.momentum if optim.name == "sgd" else optim.betas,
        "adam_eps": None if optim.name == "sgd" else optim.eps,
        "moment": optim.momentum_dtype,
        "layer_decay": optim.layer_decay,
        "batch": data.global_batch,
        "lr": optim.lr,
        "decay": schedule.decay,
        "drops_at": pytest.approx(schedule.drops_at, abs=1e-5),
        "decay_from": schedule.decay_from,
        "final_lr": schedule.final_lr,
        "length": schedule.epochs or schedule.steps,
        "warmup": schedule.warmup_epochs or schedule.warmup_steps,
        "weight_decay": pytest.approx(optim.weight_decay / rate),
        "decay_mode": optim.weight_decay_mode,
        "dropout": of("dropout"),
        "drop_path": of("drop_path") and (model.drop_path, model.drop_path_by_depth),
        "crop": "plain" if data.crop == "plain" else data.crop_area,
        "crop_law": (data.crop, *(round(ratio, 3) for ratio in data.crop_aspect)),
        "resampling": (data.interpolation, data.antialias),
        "flip": data.horizontal_flip,
        "augment": (randaugment.policy, randaugment.num_ops, randaugment.magnitude)
        if randaugment
        else "three" * augment.three_augment,
        "augment_filling": (randaugment.fill, randaugment.interpolation)
        if randaugment and randaugment.policy == "timm"
        else None,
        "erasing": augment.erasing and (augment.erasing.probability, augment.erasing.mode),
        "views": data.views,
        "mixing": mixing and (mixing.mixup_alpha, mixing.cutmix_alpha, mixing.mode),
        "pixels": (data.mean, data.std),
        "clip": optim.clip_norm,
        "loss": getattr(run.objective, "loss", run.objective.name),
        "smoothing": getattr(run.objective, "label_smoothing", 0.0),
        "distilled": run.objective.name == "distillation"
        and (run.objective.kind, run.objective.alpha, run.objective.teacher.model)
        + (run.objective.teacher.image_size, model.distillation_token),
        "mae": run.objective.name == "mae" and tuple(list(run.objective.model_dump().values())[1:]),
        "head_bias": model.head_bias,
        "head_std": model.head_std,
        "classes": model.num_classes,
        "preset": of("preset") or of("model"),
        "px": model.image_size,
        "tanh_layer": of("representation_layer"),
        "pool": (of("pool"), of("class_token"), of("pool_norm")),
        "positions": (of("positions"), of("position_init"), of("class_position")),
        "resized_by": run.position_embedding if isinstance(run, FinetuneRun) else None,
        "gelu": of("gelu"),
        "eps": of("layer_norm_eps"),
        "layer_scale": of("layer_scale"),
        "init": of("weight_init"),
        "evaluation": data.eval_resize
        if data.eval_resize == "squash"
        else (data.eval_resize, data.eval_crop_fraction),
        "eval_filter": (data.eval_interpolation or data.interpolation, data.eval_antialias),
        "ema": optim.ema and not optim.ema.warmup and optim.ema.decay,
        "thousand_steps": round(plan.total_steps / 1000),
    }


# Dosovitskiy et al. 2021, table 3, "ViT-*, ImageNet-21k": Adam .9/.999, batch 4096 (sec. 4.1),
# 1e-3, linear, dropout .1, 90 epochs, 10k warm-up; end 1e-5, decay .03, tanh layer, bias -10:
# authors, vision_transformer issue 2; 12.4 M images: issue 28; sigmoid: issue 34. No clipping:
# appendix B.1. Crop and evaluation: vision_transformer input_pipeline.py.
VIT_21K: dict[str, Any] = {
    "optimizer": "adamw", "betas": (0.9, 0.999), "adam_eps": 1e-8, "moment": "fp32",
    "layer_decay": 1.0, "decay_mode": "coupled", "batch": 4096, "lr": 1e-3, "decay": "linear",
    "final_lr": 1e-5, "length": 90, "warmup": 10_000, "weight_decay": 0.03, "dropout": 0.1,
    "drop_path": 0.0, "crop": (0.05, 1.0), "resampling": ("bilinear", False), "flip": True,
    "augment": "", "erasing": None, "views": 1, "mixing": None, "pixels": HALF,
    "clip": None, "loss": "sigmoid", "distilled": False, "mae": False,
    "smoothing": 0.0, "head_bias": -10.0, "head_std": 0.0, "classes": 21_843, "px": 224,
    "tanh_layer": True, "pool": CLS, "positions": ("learned", "vit", None), "resized_by": None,
    "gelu": "tanh", "eps": 1e-6, "layer_scale": None,
    "init": "vit", "evaluation": "squash", "ema": None, "thousand_steps": 272,
    "crop_law": TENSORFLOW, "eval_filter": ("bilinear", False), "decay_from": "warmup_end",
    "augment_filling": None, "drops_at": (),
}  # fmt: skip
# Table 3, "ViT-*, ImageNet": 3e-3, cosine, decay .3, 300 epochs; clipping at 1: appendix B.1; bias:
# AugReg's, big_vision configs/vit_i1k.py.
VIT_1K = VIT_21K | {
    "lr": 3e-3, "decay": "cosine", "final_lr": 0.0, "length": 300, "weight_decay": 0.3,
    "clip": 1.0, "head_bias": -6.9, "classes": 1000, "thousand_steps": 94,
}  # fmt: skip
# big_vision configs/vit_i21k.py: lr 1e-3, wd 1e-4 of its own scale, clip 1, 300 epochs; RandAugment
# and mixup by size. Momentum in bf16, learned positions of big_vision's own spread, no tanh layer:
# same file and its models/vit.py. Class token: released weights. Evaluation: pp/ops_image.py.
AUGREG = VIT_21K | {
    "decay": "cosine", "final_lr": 0.0, "length": 300, "weight_decay": 0.1, "dropout": 0.0,
    "clip": 1.0, "tanh_layer": False, "evaluation": ("center_crop", 0.875), "thousand_steps": 908,
    "moment": "bf16", "decay_mode": "independent", "positions": ("learned", "big_vision", None),
    "eval_filter": ("area", True),
}  # fmt: skip
LIGHT1 = {"augment": ("augreg", 2, 0.0)}
LIGHT2 = {"augment": ("augreg", 2, 10.0), "mixing": (0.2, None, "batch")}
MEDIUM2 = {"augment": ("augreg", 2, 15.0), "mixing": (0.5, None, "batch")}
# big_vision configs/vit_s16_i1k.py, Beyer et al. 2022; 99 % of 1,281,167 images.
PLAIN = AUGREG | LIGHT2 | {
    "batch": 1024, "length": 90, "loss": "softmax", "head_bias": 0.0, "classes": 1000,
    "tanh_layer": True, "pool": ("gap", None, False), "positions": ("sincos2d", "vit", None),
    "preset": "S/16", "thousand_steps": 111,
}  # fmt: skip
# README_revenge.md of facebookresearch/deit, "Training on ImageNet-21k"; main.py: end 1e-5; apex
# FusedLAMB: clipping at 1; models_v2.py: erf, eps, layer scale, init. 14.2 M images. The cosine
# starts at step 0: timm's CosineLRScheduler.
DEIT3: dict[str, Any] = VIT_21K | {
    "optimizer": "lamb", "batch": 2048, "decay": "cosine", "length": 240, "warmup": 5.0,
    "weight_decay": 0.02, "dropout": 0.0, "crop": "plain", "resampling": ("bicubic", True),
    "augment": "three", "mixing": (None, 1.0, "batch"), "pixels": IMAGENET, "clip": 1.0,
    "loss": "softmax", "smoothing": 0.1, "head_bias": 0.0, "classes": None, "tanh_layer": False,
    "positions": ("learned", "vit", False), "head_std": 0.02,
    "gelu": "erf", "layer_scale": 1e-4, "init": "deit", "evaluation": ("center_crop", 1.0),
    "thousand_steps": 1664, "eval_filter": ("bicubic", True), "decay_from": "start",
    "crop_law": ("plain", *TORCHVISION[1:]),
}  # fmt: skip
# The same README, "finetuning on ImageNet-1k".
DEIT3_1K = DEIT3 | {
    "resized_by": "deit", "lr": 3e-4, "length": 50, "classes": 1000, "thousand_steps": 31,
}  # fmt: skip
# Touvron et al. 2021 (DeiT), table 9; main.py and README_deit.md of facebookresearch/deit. What
# RandAugment fills with, and the cosine's start: timm, transforms_factory.py, cosine_lr.py.
DEIT: dict[str, Any] = VIT_21K | {
    "batch": 1024, "decay": "cosine", "length": 300, "warmup": 5.0, "weight_decay": 0.05,
    "dropout": 0.0, "drop_path": (0.1, "linear"), "crop": (0.08, 1.0),
    "resampling": ("bicubic", True), "augment": ("timm", 2, 9.0), "erasing": (0.25, "pixel"),
    "views": 3, "mixing": (0.8, 1.0, "batch"), "pixels": IMAGENET, "loss": "softmax",
    "smoothing": 0.1, "head_bias": 0.0, "head_std": 0.02, "classes": 1000, "tanh_layer": False,
    "gelu": "erf", "init": "deit", "evaluation": ("center_crop", 0.875), "ema": 0.99996,
    "thousand_steps": 375, "crop_law": TORCHVISION, "augment_filling": ("mean", "bicubic"),
    "eval_filter": ("bicubic", True), "decay_from": "start",
}  # fmt: skip
DEIT_384 = DEIT | {
    "batch": 512, "lr": 5e-6, "final_lr": 5e-6, "length": 30, "weight_decay": 1e-8, "px": 384,
    "resized_by": "deit", "thousand_steps": 75,
}  # fmt: skip
HARD = {"distilled": ("hard", 0.5, "regnety_160", None, True)}
# The same README_revenge.md, "Training on ImageNet-1k", and "finetuning ... at resolution 224x224".
DEIT3_I1K = DEIT3 | {
    "lr": 3e-3, "length": 800, "weight_decay": 0.05, "crop": (0.08, 1.0), "views": 3,
    "mixing": (0.8, 1.0, "batch"), "loss": "bce", "smoothing": 0.0, "classes": 1000, "px": 192,
    "thousand_steps": 500, "crop_law": TORCHVISION,
}  # fmt: skip
DEIT3_I1K_224 = DEIT3_I1K | {
    "optimizer": "adamw", "batch": 512, "lr": 1e-5, "length": 20, "weight_decay": 0.1,
    "augment": ("timm", 2, 9.0), "views": 1, "clip": None, "loss": "softmax", "smoothing": 0.1,
    "px": 224, "resized_by": "deit", "thousand_steps": 50, "augment_filling": ("mean", "bicubic"),
}  # fmt: skip
# Dosovitskiy et al. 2021, table 4: SGD .9, batch 512, cosine, clip 1, no decay, 384 px. Warm-up and
# dropout of L/16: vision_transformer configs/common.py, configs/models.py. Rates: of those listed.
FINETUNE = VIT_21K | {
    "optimizer": "sgd", "betas": 0.9, "adam_eps": None, "resized_by": "google", "batch": 512,
    "lr": 0.03, "decay": "cosine", "final_lr": 0.0, "length": 20_000, "warmup": 500,
    "weight_decay": 0.0, "clip": 1.0,
    "loss": "softmax", "head_bias": 0.0, "classes": 1000, "preset": "L/16", "px": 384,
    "tanh_layer": False, "thousand_steps": 20,
}  # fmt: skip
CIFAR = FINETUNE | {"lr": 0.01, "length": 10_000, "classes": 10, "thousand_steps": 10}
SMALL = FINETUNE | {"lr": 0.01, "length": 500, "warmup": 100, "thousand_steps": 0}
VTAB = SMALL | {"length": 2500, "warmup": 500, "classes": None, "thousand_steps": 2}

# Appendix B.1.2. Decay: section 4.1, dropout: table 3 on JFT; neither is published for it.
MASKED = VIT_21K | {
    "preset": "B/16", "lr": 2e-4, "decay": "cosine", "final_lr": 0.0, "length": 1_000_000,
    "thousand_steps": 1000, "weight_decay": 0.1, "dropout": 0.0, "head_bias": 0.0,
    "loss": "masked_patch_prediction", "classes": None, "tanh_layer": False,
}  # fmt: skip
# Of a model of timm, which has no keys for these.
NO_KEYS: dict[str, Any] = dict.fromkeys(
    ("dropout", "drop_path", "tanh_layer", "gelu", "eps", "layer_scale", "init")
) | {"positions": (None, None, None), "pool": (None, None, None)}  # fmt: skip
TIMM = VIT_21K | NO_KEYS
TIMM_1K = FINETUNE | NO_KEYS | {"preset": "vit_base_r50_s16_224"}
# Kolesnikov et al. 2020, sec. 3.3; loss, bias: big_vision, configs/bit_i21k.py.
BIT = TIMM | {
    "optimizer": "sgd", "betas": 0.9, "adam_eps": None, "lr": 0.03 * 4096 / 256, "decay": "drops",
    "final_lr": 0.0, "warmup": 5000, "weight_decay": 1e-4, "preset": "resnetv2_50x1_bit",
    "drops_at": (30 / 90, 60 / 90, 80 / 90),
}  # fmt: skip
# He et al. 2022, table 8, and PRETRAIN.md of facebookresearch/mae: 1.5e-4 for each 256 images.
MAE: dict[str, Any] = VIT_21K | {
    "preset": "B/16", "betas": (0.9, 0.95), "lr": 1.5e-4 * 16, "decay": "cosine", "final_lr": 0.0,
    "length": 1600, "warmup": 40.0, "weight_decay": 0.05, "dropout": 0.0, "crop": (0.2, 1.0),
    "resampling": ("bicubic", True), "pixels": IMAGENET, "loss": "mae",
    "mae": (0.75, True, 512, 8, 16), "head_bias": 0.0,
    "classes": None, "tanh_layer": False, "positions": ("sincos2d_mae", "vit", None),
    "gelu": "erf", "init": "mae", "evaluation": ("center_crop", 0.875), "thousand_steps": 500,
    "crop_law": TORCHVISION, "eval_filter": ("bicubic", True),
}  # fmt: skip
# Table 9, FINETUNE.md and models_vit.py: 5e-4 for each 256 images; L and H 1e-3.
MAE_1K = MAE | {
    "betas": (0.9, 0.999), "batch": 1024, "lr": 5e-4 * 4, "final_lr": 1e-6, "length": 100,
    "warmup": 5.0, "layer_decay": 0.65, "drop_path": (0.1, "linear"), "crop": (0.08, 1.0),
    "augment": ("timm", 2, 9.0), "augment_filling": ("mean", "bicubic"),
    "erasing": (0.25, "pixel"), "mixing": (0.8, 1.0, "batch"), "loss": "softmax",
    "smoothing": 0.1, "mae": False, "head_std": 2e-5, "classes": 1000,
    "pool": ("gap", True, True), "positions": ("learned", "vit", None), "resized_by": "deit",
    "init": "vit", "thousand_steps": 125,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "masked_patch_prediction/b16": MASKED,
    "mae/b16": MAE,
    "finetune/mae_b16": MAE_1K,
    **{f"vit_{size}": VIT_21K | {"preset": preset} for size, preset in (
        ("b16", "B/16"), ("l16", "L/16"), ("h14", "H/14"))},
    "vit_i1k/b16": VIT_1K | {"preset": "B/16"},
    "augreg_i21k/s16": AUGREG | LIGHT1 | {"preset": "S/16"},
    "augreg_i21k/b16": AUGREG | LIGHT2 | {"preset": "B/16"},
    "augreg_i21k/l16": AUGREG | MEDIUM2 | {"preset": "L/16"},
    "plain_vit/s16_90ep": PLAIN,
    "deit3_i21k/b16": DEIT3 | {"preset": "B/16", "drop_path": (0.1, "constant")},
    # 128 px, of which 9 x 9 patches of 14 px cover 126.
    "deit3_i21k/h14": DEIT3 | {"preset": "H/14", "drop_path": (0.5, "constant"), "px": 126,
                               "length": 90, "thousand_steps": 624},
    "finetune/deit3_b16": DEIT3_1K | {"preset": "B/16", "drop_path": (0.15, "constant")},
    "deit/s16": DEIT | {"preset": "S/16"},
    "deit/b16": DEIT | {"preset": "B/16"},
    "deit/b16_distilled": DEIT | HARD | {"preset": "B/16"},
    "finetune/deit_b16_384": DEIT_384 | {"preset": "B/16"},
    "deit3_i1k/b16": DEIT3_I1K | {"preset": "B/16", "drop_path": (0.2, "constant")},
    "deit3_i1k/l16": DEIT3_I1K | {"preset": "L/16", "drop_path": (0.45, "constant")},
    "finetune/deit3_i1k_b16": DEIT3_I1K_224 | {"preset": "B/16", "drop_path": (0.2, "constant")},
    "timm/r50_b16": TIMM | {"preset": "vit_base_r50_s16_224"},
    "timm/bit_r50x1": BIT,
    "timm/imagenet1k_384": TIMM_1K,
    "finetune/imagenet1k_384": FINETUNE,
    "finetune/cifar10_384": CIFAR,
    "finetune/cifar100_384": CIFAR | {"classes": 100},
    "finetune/pets_384": SMALL | {"classes": 37},
    "finetune/flowers_384": SMALL | {"classes": 102},
    "finetune/vtab_384": VTAB,
}  # fmt: skip
# Ours: no paper trains them.
NO_RECIPE = {
    "cifar10/vit_tiny",
    *(f"{corpus}/{stage}" for corpus in ("demo", "digits") for stage in ("pretrain", "finetune")),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_resolves_to_the_published_numbers(name: str) -> None:
    assert resolved(recipe(name)) == PUBLISHED[name]


def test_every_training_config_is_in_the_table() -> None:
    found = {str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml")}
    others = ("chains/", "data/", "eval/", "studies/")
    listed = PUBLISHED.keys() | NO_RECIPE
    assert {name for name in found if not name.startswith(others)} == listed
