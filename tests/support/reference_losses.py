"""The losses of the objectives, written out from their papers: what `reference_training` minimises.

Each returns a function of the model's forward pass, normalised pixels in fp32 and a micro-batch.
B: images, C: classes, L: patches, K: some patches, P: values of a patch.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.reference_training import Loss, Sample


def supervised(kind: str = "softmax", smoothing: float = 0.0, share_of=None) -> Loss:
    """share_of: of a pair of neighbours, what each keeps of itself (Mixup, Zhang et al. 2018)."""

    def loss_of(
        run: Callable[..., Any], pixels: torch.Tensor, sample: Sample
    ) -> torch.Tensor:
        shares = torch.ones(len(pixels))
        if share_of is not None:
            shares = torch.tensor(
                [share_of(int(p) // 2) for p in sample.positions]
            ).float()
            mixed = shares[:, None, None, None]
            pixels = mixed * pixels + (1 - mixed) * _partner(pixels)
        logits_BC = run(pixels).float()
        own, other = (F.one_hot(each, logits_BC.shape[1]).float() for each in
                      (sample.labels, _partner(sample.labels)))  # fmt: skip
        target_BC = shares[:, None] * own + (1 - shares[:, None]) * other
        if kind == "bce":  # DeiT-III: each label counts in full, mean over classes
            return F.binary_cross_entropy_with_logits(
                logits_BC, (target_BC > 0).float()
            )
        target_BC = (1 - smoothing) * target_BC + smoothing / logits_BC.shape[1]
        if kind == "softmax":
            return -(target_BC * logits_BC.log_softmax(dim=1)).sum(dim=1).mean()
        wrong = F.binary_cross_entropy_with_logits(
            logits_BC, target_BC, reduction="none"
        )
        return wrong.sum(dim=1).mean()  # ViT on ImageNet-21k: summed over classes

    return loss_of


def _partner(values: torch.Tensor) -> torch.Tensor:
    return (
        values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        if len(values) % 2 == 0
        else values
    )


def distillation(teacher: nn.Module, *, kind: str, alpha: float, tau: float) -> Loss:
    """Touvron et al. 2021, equations 2 and 3."""

    def loss_of(
        run: Callable[..., Any], pixels: torch.Tensor, sample: Sample
    ) -> torch.Tensor:
        logits_BC = run(pixels).float()
        with torch.no_grad():
            teacher_BC = teacher(pixels).float()
        labelled = F.cross_entropy(logits_BC, sample.labels)
        if kind == "hard":
            return (1 - alpha) * labelled + alpha * F.cross_entropy(
                logits_BC, teacher_BC.argmax(1)
            )
        p_BC = (teacher_BC / tau).softmax(dim=1)
        gap_BC = p_BC.log() - (logits_BC / tau).log_softmax(dim=1)
        return (1 - alpha) * labelled + alpha * tau**2 * (p_BC * gap_BC).sum(
            dim=1
        ).mean()

    return loss_of


def masked_autoencoder(
    order_of: Callable[[np.ndarray], np.ndarray], *, kept: int, normalized: bool = True
) -> Loss:
    """He et al. 2022, section 4.1. order_of: patches, the kept ones first."""

    def loss_of(
        run: Callable[..., Any], pixels: torch.Tensor, sample: Sample
    ) -> torch.Tensor:
        order_BL = torch.from_numpy(order_of(sample.positions))
        predicted_BLP = run(pixels, output="objective", kept_BK=order_BL[:, :kept],
                            restore_BL=order_BL.argsort(dim=1)).float()  # fmt: skip
        patch = pixels.shape[-1] // math.isqrt(order_BL.shape[1])
        patches_BPL = F.unfold(pixels, patch, stride=patch)  # channel, row, column
        patches_BLP = patches_BPL.unflatten(1, (3, -1)).permute(0, 3, 2, 1).flatten(2)
        mean = patches_BLP.mean(dim=2, keepdim=True)
        deviation = (patches_BLP.var(dim=2, keepdim=True) + 1e-6).sqrt()
        target_BLP = (patches_BLP - mean) / deviation if normalized else patches_BLP
        error_BL = ((predicted_BLP - target_BLP) ** 2).mean(dim=2)
        return error_BL.gather(1, order_BL[:, kept:]).mean()

    return loss_of


def masked_patches(
    corruption_of: Callable[[np.ndarray], dict[str, torch.Tensor]],
) -> Loss:
    """Dosovitskiy et al. 2021, appendix B.1.2: the 3-bit mean colour of each corrupted patch."""

    def loss_of(
        run: Callable[..., Any], pixels: torch.Tensor, sample: Sample
    ) -> torch.Tensor:
        inputs = corruption_of(sample.positions)
        logits_BKC = run(pixels, output="objective", **inputs).float()
        patch = sample.images.shape[-1] // math.isqrt(inputs["sources_BN"].shape[1])

        # [B, 3, L].
        means = F.avg_pool2d(sample.images.double() / 255, patch).flatten(2)
        level_B3L = (means * 8 + 1e-9).floor().clamp(max=7).long()
        color_BL = level_B3L[:, 0] * 64 + level_B3L[:, 1] * 8 + level_B3L[:, 2]
        return F.cross_entropy(logits_BKC.flatten(0, 1),
                               color_BL.gather(1, inputs["predicted_BK"]).flatten())  # fmt: skip

    return loss_of
