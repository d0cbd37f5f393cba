"""Draw the tokens of patches: principal components as colours, and similarity to one patch.

Sources: Oquab et al. 2023 (DINOv2), figure 1, without its masks of the background; Siméoni et al.
2025 (DINOv3), figure 3.

Shapes: B images, L patches, R and C their rows and columns, D width, N points, K components.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from finetune.inspection.below import draw_colors, draw_heat
from finetune.inspection.visualized import Visualized

# Of the values of a component; the few beyond get its darkest or brightest colour.
SHOWN = (0.01, 0.99)


def patch_tokens(subject: Visualized) -> torch.Tensor:
    """Of the drawn images, after the last norm: fp32 [B, L, D], on the CPU."""
    _, images_B3SS, _ = subject.drawn
    tokens = [
        subject.model.forward(batch_B3SS, "tokens")[1].float().cpu()
        for batch_B3SS in images_B3SS.split(subject.attention_batch)
    ]
    return torch.cat(tokens)


def principal_components(points_ND: torch.Tensor, *, count: int) -> torch.Tensor:
    """The points along their first components, about their mean, fp64 [N, K].

    The largest value of each component is positive: PCA leaves the sign open.
    """
    centred_ND = points_ND.double() - points_ND.double().mean(dim=0)
    # Far fewer numbers than the points themselves have; the largest eigenvalues come last.
    _, vectors_DD = torch.linalg.eigh(centred_ND.T @ centred_ND)
    values_NK = centred_ND @ vectors_DD.flip(1)[:, :count]
    largest_1K = values_NK.gather(0, values_NK.abs().argmax(dim=0, keepdim=True))
    return values_NK * largest_1K.sign()


def similarities(tokens_BLD: torch.Tensor, *, patch: int) -> torch.Tensor:
    """Cosine of a patch with all patches of its image: [B, L]."""
    unit_BLD = F.normalize(tokens_BLD, dim=2)
    return torch.einsum("bld,bd->bl", unit_BLD, unit_BLD[:, patch])


def draw_components(subject: Visualized) -> Figure:
    tokens_BLD = patch_tokens(subject)
    # Of all images together, so that one colour means the same in each.
    values_NK = principal_components(tokens_BLD.flatten(0, 1), count=3)
    low_K, high_K = values_NK.quantile(values_NK.new_tensor(SHOWN), dim=0)
    colors_NK = ((values_NK - low_K) / (high_K - low_K)).clamp(0, 1)
    colors_BKL = colors_NK.unflatten(0, tokens_BLD.shape[:2]).transpose(1, 2)

    text = "The first three principal components of the patches as red, green and blue"
    return draw_colors(subject, text, colors_BKL.unflatten(2, subject.grid))


def draw_similarity(subject: Visualized) -> Figure:
    rows, columns = subject.grid
    place = (rows // 2, columns // 2)
    cosines_BL = similarities(
        patch_tokens(subject), patch=place[0] * columns + place[1]
    )
    # Each image to its own scale: all patches of many models are alike.
    least_B1 = cosines_BL.amin(dim=1, keepdim=True)
    values_BL = (cosines_BL - least_B1) / (1 - least_B1)
    return draw_heat(
        subject,
        "Similarity of the marked patch to all others",
        values_BL.unflatten(1, subject.grid),
        label="cosine, from the least of the image to 1",
        marked=place,
    )
