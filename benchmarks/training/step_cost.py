"""Measure a step of MAE against a supervised step of the same encoder, side by side, on one core.

    python benchmarks/training/step_cost.py --preset B/16 --batch 2 --rounds 2

Forward and backward pass of plain torch modules in fp32, in turn (A B B A). Processor time decides:
it changes less than wall clock on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from pretrain.objectives.mae import Mae
from vitscale.models.objectives.mae import mask_orders, reconstruction_loss, to_patches
from vitscale.models.objectives.mae_costs import num_kept
from vitscale.models.objectives.settings import MaeSettings
from vitscale.models.vit import costs as vit_costs
from vitscale.models.vit.model import build_model
from vitscale.models.vit.settings import ViTSettings


def steps(
    settings: ViTSettings, *, batch: int
) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """Name -> one step; name -> FLOPs of one image."""
    size = settings.image_size
    images = torch.randn(batch, 3, size, size)
    arch = settings.architecture(num_classes=1000)
    supervised = build_model(settings, arch, seed=0)

    def supervised_step() -> None:
        supervised.zero_grad()
        torch.nn.functional.cross_entropy(supervised(images), torch.arange(batch)).backward()

    mae_arch = settings.architecture(num_classes=0)
    objective = Mae(MaeSettings(), seed=0)
    model: Any = build_model(settings, mae_arch, seed=0)
    objective.extend_model(model, mae_arch)
    kept = num_kept(mae_arch.num_patches, mask_ratio=objective.settings.mask_ratio)

    def mae_step() -> None:
        model.zero_grad()
        noise = np.random.default_rng(0).random((batch, mae_arch.num_patches))
        order, places = map(torch.from_numpy, mask_orders(noise))
        predicted = model(images, output="objective", kept_BK=order[:, :kept], places_BL=places)
        patches = to_patches(images, patch_size=mae_arch.patch_size)
        loss = reconstruction_loss(predicted, patches, removed_BR=order[:, kept:], normalized=True)
        loss.backward()

    flops = {
        "supervised": vit_costs.train_flops_per_image(arch),
        "mae": objective.train_flops_per_image(mae_arch),
    }
    return {"supervised": supervised_step, "mae": mae_step}, flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="B/16")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = ViTSettings(preset=options.preset, positions="sincos2d_mae", gelu="erf")
    functions, flops = steps(settings, batch=options.batch)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for name in functions:
        functions[name]()  # warm-up
    for _ in range(options.rounds):
        for name in (*functions, *reversed(functions)):
            start = time.process_time()
            functions[name]()
            seconds[name].append(time.process_time() - start)
    cost = median(seconds["mae"]) / median(seconds["supervised"])
    expected = flops["mae"] / flops["supervised"]
    for name, taken in seconds.items():
        print(
            f"{name:10}  {median(taken):7.2f} s a step, from {min(taken):.2f} to {max(taken):.2f}"
        )
    print(f"cost {cost:.3f}, FLOPs {expected:.3f}: {expected / cost:.2f} of what they promise")


if __name__ == "__main__":
    main()
