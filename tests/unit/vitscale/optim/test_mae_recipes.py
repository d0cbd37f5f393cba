"""MAE's recipes equal the published numbers: He et al. 2022, tables 8 to 10, and its repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from vitscale.config.loader import load_run_file
from vitscale.runs.training import training_plan

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PRESETS = {"b16": "B/16", "l16": "L/16", "h14": "H/14"}


def recipe(name: str) -> Any:
    path = CONFIGS / f"{name}.yaml"
    return load_run_file({"pretrain": PretrainRun, "finetune": FinetuneRun}, path)


def shared(run: Any) -> dict[str, Any]:
    data, model, schedule = run.data, run.model, run.schedule
    plan = training_plan(run, world_size=1, num_samples=1_281_167)
    return {
        "preset": model.preset,
        "px": model.image_size,
        "gelu": model.gelu,
        "optimizer": run.optim.name,
        "batch": data.global_batch,
        # Per 256 images, as MAE gives it.
        "base_lr": pytest.approx(run.optim.lr * 256 / data.global_batch),
        "weight_decay": run.optim.weight_decay,
        "clip": run.optim.clip_norm,
        "epochs": (schedule.epochs, schedule.warmup_epochs),
        "rate": (schedule.decay, schedule.decay_from, schedule.final_lr),
        "crop": (data.crop, data.crop_area, data.interpolation, data.antialias),
        "flip": data.horizontal_flip,
        "pixels": (data.mean, data.std),
        "evaluation": (data.eval_resize, data.eval_crop_fraction),
        "steps": plan.total_steps,
    }


COMMON: dict[str, Any] = {
    "px": 224, "gelu": "erf", "clip": None, "flip": True, "pixels": IMAGENET,
    "evaluation": ("center_crop", 0.875),
}  # fmt: skip


@pytest.mark.parametrize("size", PRESETS)
def test_pretraining_is_the_published_one(size: str) -> None:
    run = recipe(f"mae/{size}")
    assert shared(run) == COMMON | {
        "preset": PRESETS[size], "optimizer": "adamw", "batch": 4096, "base_lr": 1.5e-4,
        "weight_decay": 0.05, "epochs": (1600, 40), "rate": ("cosine", "warmup_end", 0.0),
        "crop": ("inception", (0.2, 1.0), "bicubic", True), "steps": 500_455,
    }  # fmt: skip
    assert run.optim.betas == (0.9, 0.95) and run.model.positions == "sincos2d_mae"
    assert run.model.weight_init == "mae" and run.model.drop_path == 0
    settings = run.objective
    assert (settings.mask_ratio, settings.normalized_pixels) == (0.75, True)
    assert (settings.decoder_width, settings.decoder_depth, settings.decoder_heads) == (512, 8, 16)
    assert run.data.mixing is None and run.data.augment.randaugment is None


# FINETUNE.md: epochs, base rate, layer decay, drop path, steps of 1024 images.
TUNED = {
    "b16": (100, 5e-4, 0.65, 0.1, 125_113),
    "l16": (50, 1e-3, 0.75, 0.2, 62_556),
    "h14": (50, 1e-3, 0.75, 0.3, 62_556),
}


@pytest.mark.parametrize("size", PRESETS)
def test_fine_tuning_is_the_published_one(size: str) -> None:
    run = recipe(f"finetune/mae_{size}")
    epochs, rate, layer_decay, drop_path, steps = TUNED[size]
    assert shared(run) == COMMON | {
        "preset": PRESETS[size], "optimizer": "adamw", "batch": 1024, "base_lr": rate,
        "weight_decay": 0.05, "epochs": (epochs, 5), "rate": ("cosine", "warmup_end", 1e-6),
        "crop": ("inception", (0.08, 1.0), "bicubic", True), "steps": steps,
    }  # fmt: skip
    model, data = run.model, run.data
    assert (model.pool, model.class_token, model.pool_norm) == ("gap", True, True)
    assert (model.positions, model.drop_path, model.head_std) == ("learned", drop_path, 2e-5)
    assert (run.optim.layer_decay, run.optim.betas) == (layer_decay, (0.9, 0.999))
    policy, mixing, erasing = data.augment.randaugment, data.mixing, data.augment.erasing
    assert (policy.policy, policy.num_ops, policy.magnitude, policy.magnitude_std) == (
        "timm", 2, 9.0, 0.5,
    )  # fmt: skip
    assert (mixing.mixup_alpha, mixing.cutmix_alpha, mixing.mode) == (0.8, 1.0, "batch")
    assert (erasing.probability, erasing.mode, run.objective.label_smoothing) == (
        0.25,
        "pixel",
        0.1,
    )
