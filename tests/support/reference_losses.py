"""The losses of the objectives, written out from their papers: what `reference_training` minimises.

Each returns a function of the model's forward pass, normalised pixels in fp32 and a micro-batch.
B: images, C: classes, L: patches, K: some patches, P: values of a patch.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.reference_training import Loss, Run, Sample


def supervised(kind: str = "softmax", smoothing: float = 0.0, share_of=None) -> Loss:
    """share_of: of a pair of neighbours, what each keeps of itself (Mixup, Zhang et al. 2018)."""

    def loss_of(run: Run, pixels: torch.Tensor, sample: Sample) -> torch.Tensor:
        shares_B = torch.ones(len(pixels))
        if share_of is not None:
            # A pair has one share, drawn by its number.
            drawn = [share_of(int(position) // 2) for position in sample.positions]
            shares_B = torch.tensor(drawn).float()
            mixed = shares_B[:, None, None, None]
            pixels = mixed * pixels + (1 - mixed) * _partner(pixels)
        logits_BC = run(pixels).float()
        num_classes = logits_BC.shape[1]

        # Mixed as the pixels are; without mixing the share is 1.
        label_BC = F.one_hot(sample.labels, num_classes).float()
        share_B1 = shares_B[:, None]
        target_BC = share_B1 * label_BC + (1 - share_B1) * _partner(label_BC)
        if kind == "bce":  # DeiT-III: each label counts in full, mean over classes
            target_BC = (target_BC > 0).float()
            return F.binary_cross_entropy_with_logits(logits_BC, target_BC)

        target_BC = (1 - smoothing) * target_BC + smoothing / num_classes
        if kind == "softmax":
            wrong_BC = -target_BC * logits_BC.log_softmax(dim=1)
            return wrong_BC.sum(dim=1).mean()
        # ViT on ImageNet-21k: summed over classes, where torch's own mean would divide by them.
        wrong_BC = F.binary_cross_entropy_with_logits(
            logits_BC, target_BC, reduction="none"
        )
        return wrong_BC.sum(dim=1).mean()

    return loss_of


def _partner(values: torch.Tensor) -> torch.Tensor:
    """The other one of each pair of neighbours; a batch that has no pairs is not mixed."""
    if len(values) % 2:
        return values
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def distillation(teacher: nn.Module, *, kind: str, alpha: float, tau: float) -> Loss:
    """Touvron et al. 2021, equations 2 and 3."""

    def loss_of(run: Run, pixels: torch.Tensor, sample: Sample) -> torch.Tensor:
        logits_BC = run(pixels).float()
        with torch.no_grad():
            teacher_BC = teacher(pixels).float()
        labelled = F.cross_entropy(logits_BC, sample.labels)
        if kind == "hard":
            taught = F.cross_entropy(logits_BC, teacher_BC.argmax(1))
        else:
            # The divergence of both, written out; tau^2 keeps its gradients as large as without.
            p_BC = (teacher_BC / tau).softmax(dim=1)
            log_q_BC = (logits_BC / tau).log_softmax(dim=1)
            divergence_B = (p_BC * (p_BC.log() - log_q_BC)).sum(dim=1)
            taught = tau**2 * divergence_B.mean()
        return (1 - alpha) * labelled + alpha * taught

    return loss_of


def contrastive(temperature: float) -> Loss:
    """Chen et al. 2020, equation 1, of each image and its mirror image."""

    def loss_of(run: Run, pixels: torch.Tensor, sample: Sample) -> torch.Tensor:
        # All first views, then all second ones, as the paper does not order them.
        views = torch.cat([pixels, pixels.flip(-1)])
        projected_NE = run(views, output="objective").float()
        unit_NE = projected_NE / projected_NE.norm(dim=1, keepdim=True)
        similarity_NN = unit_NE @ unit_NE.T / temperature

        num_views = len(views)
        losses = []
        for number, row_N in enumerate(similarity_NN):
            partner = (number + len(pixels)) % num_views
            others = torch.arange(num_views) != number
            losses.append(row_N[others].logsumexp(0) - row_N[partner])
        return torch.stack(losses).mean()

    return loss_of


def masked_autoencoder(
    order_of: Callable[[np.ndarray], np.ndarray], *, kept: int, normalized: bool = True
) -> Loss:
    """He et al. 2022, section 4.1. order_of: patches, the kept ones first."""

    def loss_of(run: Run, pixels: torch.Tensor, sample: Sample) -> torch.Tensor:
        order_BL = torch.from_numpy(order_of(sample.positions))
        predicted_BLP = run(
            pixels,
            output="objective",
            kept_BK=order_BL[:, :kept],
            restore_BL=order_BL.argsort(dim=1),
        ).float()

        num_patches = order_BL.shape[1]
        patch = pixels.shape[-1] // math.isqrt(num_patches)
        target_BPL = F.unfold(pixels, patch, stride=patch)  # channel, row, column
        # The authors' patchify: row, column, channel.
        target_B3PL = target_BPL.unflatten(1, (3, -1))
        target_BLP = target_B3PL.permute(0, 3, 2, 1).flatten(2)
        if normalized:
            mean = target_BLP.mean(dim=2, keepdim=True)
            # Of a sample: torch's var divides by P - 1, as the authors' code does.
            variance = target_BLP.var(dim=2, keepdim=True)
            target_BLP = (target_BLP - mean) / (variance + 1e-6).sqrt()
        error_BL = (predicted_BLP - target_BLP).square().mean(dim=2)
        # Of the patches that the encoder did not see.
        hidden_BK = order_BL[:, kept:]
        return error_BL.gather(1, hidden_BK).mean()

    return loss_of


def masked_patches(
    corruption_of: Callable[[np.ndarray], dict[str, torch.Tensor]],
) -> Loss:
    """Dosovitskiy et al. 2021, appendix B.1.2: the 3-bit mean colour of each corrupted patch."""

    def loss_of(run: Run, pixels: torch.Tensor, sample: Sample) -> torch.Tensor:
        inputs = corruption_of(sample.positions)
        logits_BKC = run(pixels, output="objective", **inputs).float()
        num_patches = inputs["sources_BN"].shape[1]
        patch = sample.images.shape[-1] // math.isqrt(num_patches)

        images = sample.images.double() / 255
        mean_B3L = F.avg_pool2d(images, patch).flatten(2)
        # A mean that is exactly on a border belongs to the upper level, however it was rounded.
        level_B3L = (mean_B3L * 8 + 1e-9).floor()
        red_BL, green_BL, blue_BL = level_B3L.clamp(max=7).long().unbind(dim=1)
        color_BL = red_BL * 64 + green_BL * 8 + blue_BL
        color_BK = color_BL.gather(1, inputs["predicted_BK"])
        return F.cross_entropy(logits_BKC.flatten(0, 1), color_BK.flatten())

    return loss_of
