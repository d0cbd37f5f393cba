"""The training recipes of configs/, and how each is shrunk to run anywhere. Needs no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from vitscale.config.loader import load_run_file

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RUN_TYPES = {"pretrain": PretrainRun, "finetune": FinetuneRun}
NOT_TRAINING = ("chains", "data", "eval", "studies")
# A small model of timm that takes the arguments of the recipe's.
SMALL_IN_TIMM = {
    "vit_base_r50_s16_224": "vit_tiny_r_s16_p8_224",
    "resnetv2_50x1_bit": "test_convnext",
}


@cache
def recipes() -> dict[str, PretrainRun | FinetuneRun]:
    """Every run of configs/ that trains, by its path without the suffix."""
    paths = {path.relative_to(CONFIGS): path for path in sorted(CONFIGS.rglob("*.yaml"))}
    return {
        str(name.with_suffix("")): load_run_file(RUN_TYPES, path)
        for name, path in paths.items()
        if name.parts[0] not in NOT_TRAINING
    }


def shrunk(run: PretrainRun | FinetuneRun) -> list[str]:
    """Overrides that make the model tiny, at twice or thrice its patch a side."""
    if run.model.name == "timm":
        return [f"model.model={SMALL_IN_TIMM[run.model.model]}", "model.image_size=32"]
    arch: Any = run.model.resolved(num_classes=10)
    side = 2 if run.stage == "pretrain" else 3
    sizes = ["model.width=32", "model.depth=2", "model.num_heads=2", "model.mlp_width=32"]
    return [*sizes, f"model.image_size={side * arch.patch_size}"]
