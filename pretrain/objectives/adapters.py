"""Linear layers from a student's features to those of its teachers, and how far these are apart.

Source: Ranzinger et al. 2024 (AM-RADIO), section 3. B: images, L: patches, D: width of a teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from vitscale.objectives.teacher import pooled_patches, square_grid

# AM-RADIO: shares of the cosine and of smooth L1 in the loss of patches.
COSINE_SHARE = 0.9
DISTANCE_SHARE = 0.1


class Predicted(NamedTuple):
    """What a student says of a teacher's features; None: not learned."""

    class_BD: torch.Tensor | None
    patches_BLD: torch.Tensor | None


class Adapters(nn.Module):
    """For each teacher a layer on the student's features, and one on its patches."""

    def __init__(
        self,
        teacher_widths: Sequence[int],
        *,
        class_width: int | None,
        patch_width: int | None,
    ) -> None:
        """class_width, patch_width: of the student; None: not learned."""
        super().__init__()
        # An empty list has no parameters, which would never have gradients.
        self.classes = _layers(class_width, teacher_widths)
        self.patches = _layers(patch_width, teacher_widths)

    def forward(
        self,
        model: Any,
        images_B3SS: torch.Tensor,
        *,
        patch_grid: tuple[int, int] | None,
    ) -> list[Predicted]:
        """patch_grid: that the student's patches are pooled to; None: they stay as they are."""
        if not self.patches:
            class_BW = model(images_B3SS, output="features")
            return [Predicted(adapt(class_BW), None) for adapt in self.classes]

        # Both come from one pass.
        class_BW, patches_BLW = model(images_B3SS, output="tokens")
        if patch_grid is not None:
            grid = square_grid(patches_BLW.shape[1])
            assert grid is not None
            patches_BLW = pooled_patches(patches_BLW, grid, patch_grid)
        patches = [adapt(patches_BLW) for adapt in self.patches]
        if not self.classes:
            return [Predicted(None, patches_BLD) for patches_BLD in patches]
        classes = [adapt(class_BW) for adapt in self.classes]
        return [Predicted(*pair) for pair in zip(classes, patches, strict=True)]


def _layers(width: int | None, teacher_widths: Sequence[int]) -> nn.ModuleList:
    if width is None:
        return nn.ModuleList()
    return nn.ModuleList(nn.Linear(width, each) for each in teacher_widths)


def class_loss(student_BD: torch.Tensor, teacher_BD: torch.Tensor) -> torch.Tensor:
    """One minus the cosine, mean over vectors; scalar."""
    cosine_B = F.cosine_similarity(student_BD.float(), teacher_BD, dim=-1)
    return 1 - cosine_B.mean()


def patch_loss(student_BLD: torch.Tensor, teacher_BLD: torch.Tensor) -> torch.Tensor:
    """The same of patches, with their distance by smooth L1."""
    distance = F.smooth_l1_loss(student_BLD.float(), teacher_BLD)
    angle = class_loss(student_BLD, teacher_BLD)
    return COSINE_SHARE * angle + DISTANCE_SHARE * distance
