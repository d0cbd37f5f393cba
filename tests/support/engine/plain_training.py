"""Recipes for small ViTs, and a plain torch loop that trains them: one process, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from vitscale.models.settings import ViTSettings

# Beside this file, which is run as a script.
from vitscale.models.vit import (
    build_model,
    decayed,
    layers_above,
)
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.optim.schedules import learning_rate
from vitscale.optim.settings import EmaSettings, OptimSettings

STEPS, BATCH, ACCUMULATION, CLIP = 50, 16, 2, 0.5

SIZES = {"image_size": 8, "patch_size": 4, "width": 30, "depth": 2, "num_heads": 2}

MODEL = ViTSettings(**SIZES, mlp_width=44, num_classes=7)  # type: ignore[arg-type]  # all ints

# Every option of the model that has no randomness of its own.
OPTIONS = ViTSettings(
    **{**SIZES, "width": 32},  # type: ignore[arg-type]  # all ints
    mlp_width=44,
    num_classes=7,
    pool="gap",
    num_registers=2,
    positions="sincos2d",
    layer_scale=0.1,
    representation_layer=True,
    gelu="erf",
    head_bias=-1.0,
)

EMA = EmaSettings(decay=0.9, warmup=False)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    optim: OptimSettings
    model: ViTSettings = MODEL
    decay: str = "cosine"

    def rate(self, step: int) -> float:
        return learning_rate(
            step, peak=1e-3, final=0.0, warmup_steps=5, total_steps=STEPS, decay=self.decay
        )


ADAMW = Recipe(optim=OptimSettings(lr=1e-3, weight_decay=0.1, ema=EMA))

SGD = Recipe(optim=OptimSettings(name="sgd", lr=1e-3))

LAMB = Recipe(optim=OptimSettings(name="lamb", lr=1e-3, weight_decay=0.05), decay="constant")

HALF = Recipe(optim=OptimSettings(lr=1e-3, weight_decay=0.1, ema=EMA, momentum_dtype="bf16"))

LAYERED = Recipe(
    optim=OptimSettings(
        lr=1e-3, weight_decay=1e-4, weight_decay_mode="independent", layer_decay=0.75
    ),
    model=OPTIONS,
    decay="linear",
)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step % 25)
    images = torch.randint(0, 256, (BATCH, 3, 8, 8), generator=random, dtype=torch.uint8)
    return images, torch.randint(0, 7, (BATCH,), generator=random)


def new_model(recipe: Recipe) -> torch.nn.Module:
    vit = build_model(recipe.model.resolved(num_classes=7), seed=0)
    head = vit.head[-1] if recipe.model.representation_layer else vit.head
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return vit


def new_optimizer(vit: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    arch = recipe.model.resolved(num_classes=7)
    groups = optimizer_groups(
        vit.named_parameters(),
        settings=recipe.optim,
        decayed=decayed,
        layers_above=lambda name: layers_above(name, arch),
    )
    return build_optimizer(groups, settings=recipe.optim, device=torch.device("cpu"))


@dataclass(kw_only=True)
class Plain:
    """One process, no DeepSpeed: the slow, independent version."""

    losses: list[float]
    norms: list[float]
    average: dict[str, torch.Tensor]
    logits: torch.Tensor
    """Of the averaged weights, on the images of step 0."""
    features: torch.Tensor
    """Likewise."""


def pixels(images: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - 0.5) / 0.5


def train_plain(recipe: Recipe, *, steps: int = STEPS, left_out: Collection[int] = ()) -> Plain:
    vit = new_model(recipe)
    optimizer = new_optimizer(vit, recipe)
    named = dict(vit.named_parameters())
    average = {name: value.detach().clone() for name, value in named.items()}
    losses, norms = [], []
    for step in range(steps):
        images, labels = data(step)
        loss = torch.nn.functional.cross_entropy(vit(pixels(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(vit.parameters(), CLIP).item())
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step) * group["lr_scale"]
        if step not in left_out:
            optimizer.step()
        for name, value in named.items():
            average[name] = EMA.decay * average[name] + (1 - EMA.decay) * value.detach()
        losses.append(loss.item())
    with torch.no_grad():
        vit.load_state_dict(average, strict=False)
        images = pixels(data(0)[0])
        logits = vit(images)
        features = vit.forward_head(vit.forward_features(images), pre_logits=True)
    return Plain(losses=losses, norms=norms, average=average, logits=logits, features=features)
