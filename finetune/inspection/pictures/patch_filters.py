"""Principal components of the filters that see the pixels: patches, or the root convolution.

Source: Dosovitskiy et al. 2021, figure 7 (left), 28 components.

Shapes: D filters, p pixels a side, K components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from finetune.inspection.subject import Inspected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, COLUMNS = 4, 7
GREY = 0.5


def missing(subject: Inspected) -> str | None:
    return None


def principal_components(
    filters_D3pp: torch.Tensor, *, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Components [K, 3, p, p] of unit norm and their shares of the variance [K], largest first.

    PCA over the D filters as points of 3 p^2 dimensions, about their mean. K is `count`, or the
    rank where that is less. The largest value of each component is positive: PCA leaves the sign
    open.
    """
    points_DX = filters_D3pp.double().flatten(1)
    _, singular_K, components_KX = torch.linalg.svd(
        points_DX - points_DX.mean(dim=0), full_matrices=False
    )
    variances_K = singular_K.square()
    noise = torch.finfo(torch.float32).eps * singular_K.max()
    count = min(count, max(1, int((singular_K > noise).sum())))
    components_KX = components_KX[:count]
    largest_K1 = components_KX.gather(1, components_KX.abs().argmax(dim=1, keepdim=True))
    components_KX = components_KX * largest_K1.sign()
    shares_K = variances_K[:count] / variances_K.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return components_KX.unflatten(1, filters_D3pp.shape[1:]), shares_K


def first_filters(network: nn.Module) -> torch.Tensor:
    """Filters of the first convolution on colours [D, 3, p, p], on the CPU as they are used."""
    first = next(
        each for each in network.modules() if isinstance(each, nn.Conv2d) and each.in_channels == 3
    )
    filters_D3pp = first.weight.detach().cpu().double()
    if type(first).__name__.startswith("StdConv2d"):  # of timm: uses standardised kernels
        std, mean = torch.std_mean(filters_D3pp, dim=(1, 2, 3), keepdim=True, correction=0)
        filters_D3pp = (filters_D3pp - mean) / std.clamp(min=torch.finfo(torch.float32).tiny)
    return filters_D3pp


def draw(subject: Inspected) -> Figure:
    from matplotlib.figure import Figure

    filters_D3pp = first_filters(subject.loaded.network)
    components_K3pp, shares_K = principal_components(filters_D3pp, count=ROWS * COLUMNS)
    figure = Figure(figsize=(6.2, 4.3), layout="constrained")
    for number, component_3pp in enumerate(components_K3pp):
        axes = figure.add_subplot(ROWS, COLUMNS, number + 1)
        shown_3pp = GREY + GREY * component_3pp / component_3pp.abs().max()
        axes.imshow(shown_3pp.permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_axis_off()
    side = filters_D3pp.shape[-1]
    is_vit = subject.loaded.arch.name == "vit"
    what = "Patch filters" if is_vit else "First convolution"
    text = (
        f"{what}: {len(components_K3pp)} principal components of {len(filters_D3pp)} filters of "
        f"{side} × {side} px\n{100 * float(shares_K.sum()):.0f} % of the variance, largest first; "
        "grey is 0, each to its own scale"
    )
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure
