"""Sizes and results of gpu_training.

Owns: sizes on a GPU and toy sizes for a CPU, the results of a section, and its context.
Leaves out: the sections and their seconds (`plan`). Does not import torch.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitscale.distributed.atomic_files import write_json

# Of the recipes in configs/: no regularisation, 1,000 classes, softmax, clipping, a short schedule.
PLAIN = (
    *("model.num_classes=1000", "model.representation_layer=false", "model.dropout=0.0"),
    *("model.head_bias=0.0", "objective.loss=softmax", "optim.clip_norm=1.0", "optim.lr=3e-4"),
    *("optim.weight_decay=0.1", "schedule.epochs=null", "schedule.steps=1000"),
    *("schedule.warmup_steps=10", "schedule.final_lr=0.0", "schedule.decay=cosine"),
    *("checkpoint.every_steps=1000", "evaluate=[]", "tracking.uri=null"),
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One model as it is timed: a recipe of configs/, made plain."""

    config: str
    batch: int
    overrides: tuple[str, ...] = ()
    timm_name: str = ""
    timm_sizes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scale:
    device: str
    precision: str
    models: dict[str, Trained]
    checked: Trained
    """Small, and compared with the bare loop at every stage and precision."""
    recipe_overrides: tuple[str, ...]
    """Of the rows that follow a recipe."""
    compared_steps: int
    """Losses that are compared."""
    waiting_steps: int
    """Steps in which no wait for the device is allowed, over all kinds of step."""
    compared_batch: int
    """Images per step when several loops of the first model are in memory at once."""
    warmup: int
    timed: int
    blocks: int
    matmul_side: int
    shape_seconds: float
    copy_mib: int
    photos: tuple[dict[str, int], ...]
    photo_mib: float
    shard_mib: int
    data_steps: int
    profile_steps: int


GPU = Scale(
    device="cuda",
    precision="bf16",
    models={
        "L16": Trained(config="vit_l16", batch=256, timm_name="vit_large_patch16_224"),
        "H14": Trained(config="vit_h14", batch=128, timm_name="vit_huge_patch14_224"),
        "B16": Trained(config="vit_b16", batch=512, timm_name="vit_base_patch16_224"),
    },
    checked=Trained(
        config="vit_b16",
        batch=32,
        overrides=("model.width=384", "model.depth=4", "model.num_heads=6", "model.mlp_width=1536"),
    ),
    recipe_overrides=(),
    compared_steps=20,
    waiting_steps=100,
    compared_batch=128,
    warmup=30,
    timed=100,
    blocks=5,
    matmul_side=8192,
    shape_seconds=1.5,
    copy_mib=4096,
    # Sizes as they come in ImageNet; every file differs.
    photos=(
        {"width": 500, "height": 375, "num": 32},
        {"width": 375, "height": 500, "num": 16},
        {"width": 640, "height": 480, "num": 8},
        {"width": 400, "height": 300, "num": 8},
    ),
    photo_mib=700,
    shard_mib=32,
    data_steps=60,
    profile_steps=3,
)
_TINY = (
    *("model.width=48", "model.depth=2", "model.num_heads=2", "model.mlp_width=96"),
    *("model.image_size=32", "engine.device=cpu", "engine.precision=fp32"),
)
_TOYS = {
    name: Trained(
        config=config,
        batch=4,
        overrides=(*_TINY, "model.patch_size=8"),
        timm_name="vit_tiny_patch16_224",
        timm_sizes={"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2},
    )
    for name, config in (("L16", "vit_l16"), ("H14", "vit_h14"), ("B16", "vit_b16"))
}
TOY = Scale(
    device="cpu",
    precision="fp32",
    models=_TOYS,
    checked=_TOYS["B16"],
    recipe_overrides=(*_TINY, "model.patch_size=8", "engine.max_micro_batch=4"),
    compared_steps=6,
    waiting_steps=8,
    compared_batch=4,
    warmup=2,
    timed=4,
    blocks=2,
    matmul_side=64,
    shape_seconds=0.01,
    copy_mib=1,
    photos=({"width": 64, "height": 48, "num": 8},),
    photo_mib=0.1,
    shard_mib=1,
    data_steps=4,
    profile_steps=1,
)


class OutOfTime(Exception):
    """A section has no time for what is left of it."""


class Results:
    """OUT/SECTION.json, always whole: a killed process keeps what it measured."""

    def __init__(self, folder: Path, section: str) -> None:
        self.path = folder / f"{section}.json"
        self.values: dict[str, Any] = {}

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Of another process; empty if it wrote nothing."""
        values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return values

    def record(self, values: dict[str, Any]) -> None:
        self.values |= values
        write_json(self.path, self.values)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The values of every section that has run into the folder."""
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
        if path.stem != "results"
    }


@dataclass(kw_only=True)
class Context:
    """What a section works with."""

    world: Any
    scale: Scale
    work: Path
    """Shards, checkpoints and caches; removed at the end."""
    out: Path
    section: str
    deadline: float
    """time.monotonic() at which the section should end."""
    section_seconds: float
    """From its start to the deadline."""
    results: Results

    @property
    def on_gpu(self) -> bool:
        return self.scale.device == "cuda"

    def record(self, **values: Any) -> None:
        self.results.record(values)

    def expect(self, holds: bool, what: str) -> None:
        """Record a failed check; the section continues, the command will fail."""
        if not holds:
            self.record(wrong=[*self.results.values.get("wrong", []), what])

    def leave_out(self, what: str, why: str) -> None:
        self.record(left_out=self.results.values.get("left_out", {}) | {what: why})

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def check_time(self, what: str) -> None:
        """Raises OutOfTime before `what`, if the section should have ended."""
        if self.seconds_left() < 0:
            raise OutOfTime(f"no time left for {what}")
