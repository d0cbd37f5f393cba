"""Sizes and results file of gpu_training.

Owns: sizes on a GPU and toy sizes for a CPU, the results file, and the context of a section.
Leaves out: the sections (`speed`, `checks`). Does not import torch.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One model as it is timed."""

    model: dict[str, Any]
    """Settings of the `model` group."""
    batch: int
    timm_name: str
    timm_sizes: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None
    """Model FLOP/s over the rate of the matrix product."""
    stretch_goal: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scale:
    models: dict[str, Trained]
    checked: Trained
    """Small, and compared with the bare loop at every stage and precision."""
    checked_steps: int
    compared_batch: int
    """Images per step when several loops of the first model are in memory at once."""
    warmup: int
    timed: int
    blocks: int
    compiler: str
    precision: str
    matmul_side: int
    shape_seconds: float
    copy_mib: int
    photos: tuple[dict[str, int], ...]
    photo_mib: float
    shard_mib: int
    data_steps: int
    profile_steps: int


GPU = Scale(
    models={
        "L16": Trained(
            model={"preset": "L/16", "image_size": 224},
            batch=256,
            timm_name="vit_large_patch16_224",
            goal=0.60,
            stretch_goal=0.70,
        ),
        "H14": Trained(
            model={"preset": "H/14", "image_size": 224},
            batch=128,
            timm_name="vit_huge_patch14_224",
            goal=0.62,
            stretch_goal=0.72,
        ),
        "B16": Trained(
            model={"preset": "B/16", "image_size": 224},
            batch=512,
            timm_name="vit_base_patch16_224",
            goal=0.50,
            stretch_goal=0.62,
        ),
    },
    checked=Trained(
        model={
            **{"image_size": 224, "patch_size": 16, "width": 384},
            **{"depth": 4, "num_heads": 6, "mlp_width": 1536},
        },
        batch=32,
        timm_name="vit_small_patch16_224",
    ),
    checked_steps=100,
    compared_batch=128,
    warmup=50,
    timed=100,
    blocks=5,
    compiler="inductor",
    precision="bf16",
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
_TINY = Trained(
    model={
        **{"image_size": 32, "patch_size": 8, "width": 48},
        **{"depth": 2, "num_heads": 2, "mlp_width": 96},
    },
    batch=4,
    timm_name="vit_tiny_patch16_224",
    timm_sizes={"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2},
    goal=0.5,
    stretch_goal=0.6,
)
TOY = Scale(
    models={"L16": _TINY, "H14": _TINY, "B16": _TINY},
    checked=_TINY,
    checked_steps=6,
    compared_batch=4,
    warmup=2,
    timed=4,
    blocks=2,
    compiler="eager",  # traces, but generates no code
    precision="fp32",
    matmul_side=64,
    shape_seconds=0.01,
    copy_mib=1,
    photos=({"width": 64, "height": 48, "num": 8},),
    photo_mib=0.1,
    shard_mib=1,
    data_steps=4,
    profile_steps=1,
)


class Results:
    """OUT/results.json, always complete: a killed command keeps what it measured."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS
        self.values: dict[str, Any] = {"sections": {}}
        if self.path.exists():
            self.values = json.loads(self.path.read_text())

    def record(self, section: str, values: dict[str, Any]) -> None:
        self.values["sections"].setdefault(section, {}).update(values)
        self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.values, indent=1) + "\n")
        os.replace(temporary, self.path)


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
    results: Results

    def record(self, **values: Any) -> None:
        self.results.record(self.section, values)

    def expect(self, holds: bool, what: str) -> None:
        """Record a failed check; the section continues, the command will fail."""
        if not holds:
            wrong = self.results.values["sections"].get(self.section, {}).get("wrong", [])
            self.record(wrong=[*wrong, what])

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()
