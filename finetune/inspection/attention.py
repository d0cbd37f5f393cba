"""Read the attention of every layer and head; draw its mean distance and its rollout.

Attention is computed again from the input of each attention module, since fused attention never
materialises it. A head is reduced before the next one is computed, so that a layer takes the memory
of one head.

Distance: Dosovitskiy et al. 2021, figure 7 (right) and appendix D.7. The paper leaves the class
token open: here attention of and to prefix tokens is left out, and rows are divided by their sums.
Rollout: Abnar and Zuidema 2020; Dosovitskiy et al. 2021, figure 6 and appendix D.8.

Shapes: B images, T tokens (prefix tokens first), L patches, R and C rows and columns of patches, N
layers, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn

from finetune.inspection.visualized import Visualized
from vitscale.evaluation.sheet import sheet, titled_figure
from vitscale.evaluation.trained_model import InferenceModel

Consume = Callable[[int, Iterator[torch.Tensor]], None]
# The attention distance is averaged over so many, as in the ViT paper.
MEASURED_IMAGES = 128
RESIDUAL = 0.5  # weight of the identity, which stands for the residual connection
OPACITY = 0.55
# Of a photograph in the picture of rollout.
SHOWN_PX = 320
SIDE = 3.1  # inches
COLUMNS = 4
COLORS = "inferno"


def attention_modules(network: nn.Module) -> list[Any]:
    """timm's attention of each block, first layer first."""
    blocks: Any = network.blocks
    return [block.attn for block in blocks]


def attention_by_head(attention: Any, x_BTD: torch.Tensor) -> Iterator[torch.Tensor]:
    """softmax(q k / sqrt(E)) of each head in turn, fp32 [B, T, T]; rows are queries.

    attention: timm's `Attention`. x: its input.
    """
    qkv_BT3HE = attention.qkv(x_BTD).unflatten(
        -1, (3, attention.num_heads, attention.head_dim)
    )
    q_BTHE, k_BTHE, _ = qkv_BT3HE.unbind(2)

    # The weights of a row would not sum to 1 in half precision.
    q_BTHE = attention.q_norm(q_BTHE).float()
    k_BTHE = attention.k_norm(k_BTHE).float()
    for head in range(attention.num_heads):
        k_BET = k_BTHE[:, :, head].transpose(1, 2)
        scores_BTT = torch.bmm(q_BTHE[:, :, head] * attention.scale, k_BET)
        yield scores_BTT.softmax(dim=-1)


@torch.no_grad()
def read_attention(
    model: InferenceModel, images_B3SS: torch.Tensor, consume: Consume
) -> None:
    """One forward pass; `consume(layer, attention of its heads)` is called layer by layer.

    images: uint8. Each head's attention [B, T, T] is computed when it is
    taken, and not used again: `consume` may overwrite it.
    """

    def read(layer: int, attention: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        consume(layer, attention_by_head(attention, inputs[0]))

    # A hook that stays would read the attention of every later forward pass.
    with ExitStack() as hooks:
        for layer, attention in enumerate(attention_modules(model.network)):
            hook = attention.register_forward_pre_hook(partial(read, layer))
            hooks.enter_context(hook)
        model.forward(images_B3SS, "features")


def patch_attention(p_BTT: torch.Tensor, *, num_prefix_tokens: int) -> torch.Tensor:
    """Attention among patches [B, L, L]: without rows and columns of prefix tokens, rows of sum 1.

    A row that attends to no patch becomes uniform.
    """
    p_BLL = p_BTT[:, num_prefix_tokens:, num_prefix_tokens:]
    sums_BL1 = p_BLL.sum(dim=-1, keepdim=True)
    # 0 / 0 is no number.
    return (p_BLL / sums_BL1).nan_to_num(1 / p_BLL.shape[-1])


# ---- distance -----------------------------------------------------------------------------------


def patch_distances(grid: tuple[int, int], *, stride: int) -> torch.Tensor:
    """Distances between the centres of all patches in pixels, fp32 [L, L]."""
    rows = torch.arange(grid[0], dtype=torch.float32) * stride
    columns = torch.arange(grid[1], dtype=torch.float32) * stride
    # The distances depend on the grid alone, and are the same for every head and image.
    centres_L2 = torch.cartesian_prod(rows, columns)
    # A matrix product would lose digits of small distances.
    return torch.cdist(
        centres_L2, centres_L2, compute_mode="donot_use_mm_for_euclid_dist"
    )


def mean_distance(p_BLL: torch.Tensor, distances_LL: torch.Tensor) -> torch.Tensor:
    """Mean over the queries of the distances weighted by attention, fp64 [B]."""
    return torch.einsum("bqk,qk->bq", p_BLL, distances_LL).double().mean(dim=1)


def head_distances(
    model: InferenceModel,
    batches: Iterable[torch.Tensor],
    *,
    grid: tuple[int, int],
    stride: int,
    num_prefix_tokens: int,
) -> torch.Tensor:
    """Mean distance of each head over all images, in pixels: fp64 [N, H], on the CPU.

    batches: uint8 images [B, 3, S, S].
    """
    modules = attention_modules(model.network)
    distances_LL = patch_distances(grid, stride=stride).to(model.world.device)
    # A sum over many images in fp32 loses the digits of each.
    sums_NH = torch.zeros(len(modules), modules[0].num_heads, dtype=torch.float64)
    num_images = 0

    def add(layer: int, heads: Iterator[torch.Tensor]) -> None:
        for head, p_BTT in enumerate(heads):
            p_BLL = patch_attention(p_BTT, num_prefix_tokens=num_prefix_tokens)
            sums_NH[layer, head] += float(mean_distance(p_BLL, distances_LL).sum())

    # Only sums are kept: the matrices of all images would not fit into memory.
    for images_B3SS in batches:
        read_attention(model, images_B3SS, add)
        num_images += len(images_B3SS)
    return sums_NH / max(1, num_images)


def draw_distance(subject: Visualized) -> Figure:
    arch = subject.vit
    _, images_B3SS = subject.sheet(MEASURED_IMAGES)
    distances_NH = head_distances(
        subject.model,
        images_B3SS.split(subject.attention_batch),
        grid=arch.grid,
        stride=arch.patch_size,
        num_prefix_tokens=arch.num_prefix_tokens,
    )
    depth, num_heads = distances_NH.shape

    text = (
        f"Attention distance of {num_heads} heads in each layer; mean over {len(images_B3SS)} "
        f"images of {arch.image_size} px"
    )
    figure = titled_figure(f"{subject.name}\n{text}", size=(6.4, 4.4))
    axes = figure.add_subplot()
    layers = range(1, depth + 1)
    lines = axes.plot(
        layers, distances_NH, "o", color="C0", markersize=6, alpha=0.6, zorder=2
    )
    lines[0].set_label("a head")

    # A head that looks everywhere alike is at this line, so heads below it look near by.
    uniform = float(patch_distances(arch.grid, stride=arch.patch_size).mean())
    axes.axhline(
        uniform,
        color="grey",
        linewidth=1,
        linestyle=(0, (4, 3)),
        zorder=1,
        label=f"uniform attention: {uniform:.1f} px",
    )
    axes.legend(frameon=False, fontsize=8)

    axes.margins(y=0.15)
    axes.set_xlim(0.5, depth + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Layer, from the image to the output")
    axes.set_ylabel("Mean attention distance (pixels)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# ---- rollout ------------------------------------------------------------------------------------


def rolled_out(
    product_BTT: torch.Tensor | None, mean_BTT: torch.Tensor
) -> torch.Tensor:
    """Multiply the next layer, averaged over its heads, onto the product of those before it.

    Half of a layer is the identity. Overwrites `mean_BTT`.
    """
    # Overwritten in place, as a second matrix of all tokens may not fit.
    mixed_BTT = mean_BTT.mul_(1 - RESIDUAL)
    mixed_BTT.diagonal(dim1=1, dim2=2).add_(RESIDUAL)
    mixed_BTT /= mixed_BTT.sum(dim=-1, keepdim=True)
    if product_BTT is None:
        return mixed_BTT
    return torch.bmm(mixed_BTT, product_BTT)


@torch.no_grad()
def attention_rollout(model: InferenceModel, images_B3SS: torch.Tensor) -> torch.Tensor:
    """Return the attention of each output token to each input token: fp32 [B, T, T], rows sum to 1.

    images: uint8. Layer by layer: no other matrix is kept.
    """
    num_heads = attention_modules(model.network)[0].num_heads
    product: torch.Tensor | None = None

    def add(layer: int, heads: Iterator[torch.Tensor]) -> None:
        nonlocal product
        # Summed in place, as a second matrix of all tokens may not fit.
        sum_BTT = reduce(torch.Tensor.add_, heads)
        product = rolled_out(product, sum_BTT.div_(num_heads))

    read_attention(model, images_B3SS, add)
    assert product is not None
    return product


def patch_weights(
    rollout_BTT: torch.Tensor,
    *,
    num_prefix_tokens: int,
    grid: tuple[int, int],
    pooled: bool,
) -> torch.Tensor:
    """Weight of each patch over the largest one: [B, R, C].

    From the row of the class token, which is the first; pooled: from the mean of the patches' rows.
    """
    # A pooled model has no token that gathers the image, so all patches count alike.
    rows_BXT = rollout_BTT[:, :1]
    if pooled:
        rows_BXT = rollout_BTT[:, num_prefix_tokens:]
    weights_BL = rows_BXT.mean(dim=1)[:, num_prefix_tokens:]
    return (weights_BL / weights_BL.amax(dim=1, keepdim=True)).unflatten(1, grid)


def draw_rollout(subject: Visualized) -> Figure:
    arch = subject.vit
    is_pooled = arch.pool != "cls"
    titles, images_B3SS = subject.sheet(subject.run.num_images)
    _, photos_B3PP = subject.sheet(subject.run.num_images, at_least=SHOWN_PX)
    weights = []
    for batch_B3SS in images_B3SS.split(subject.attention_batch):
        rollout_BTT = attention_rollout(subject.model, batch_B3SS)
        weights_BRC = patch_weights(
            rollout_BTT,
            num_prefix_tokens=arch.num_prefix_tokens,
            grid=arch.grid,
            pooled=is_pooled,
        )
        weights.append(weights_BRC.cpu())
    weights_B1PP = F.interpolate(
        torch.cat(weights)[:, None], size=photos_B3PP.shape[2:], mode="bilinear"
    )

    # The colours of the heat would mix with those of the photograph, so that one is grey.
    greys_B1PP = photos_B3PP.double().mean(dim=1, keepdim=True) / 255
    colors_BPP4 = colormaps[COLORS](weights_B1PP[:, 0].numpy())
    colors_B3PP = torch.from_numpy(colors_BPP4[..., :3]).permute(0, 3, 1, 2)
    heats_B3PP = torch.lerp(greys_B1PP, colors_B3PP, OPACITY)

    # Below each row of photographs is one of the heat on them.
    captions = subject.captions(titles, images_B3SS)
    above = [
        (text, is_wrong, photo)
        for (text, is_wrong), photo in zip(captions, photos_B3PP, strict=True)
    ]
    below = [("", False, heat) for heat in heats_B3PP]
    rows = []
    for start in range(0, len(titles), COLUMNS):
        rows.append(above[start : start + COLUMNS])
        rows.append(below[start : start + COLUMNS])

    source = "the class token"
    if is_pooled:
        source = "the mean of all patches"
    text = f"Attention rollout: what {source} draws on through all {arch.depth} layers"
    figure = sheet(f"{subject.name}\n{text}", rows, width=SIDE)
    label = "weight, relative to the largest one of the image"
    colors = ScalarMappable(cmap=COLORS)
    figure.colorbar(colors, ax=figure.axes, label=label, shrink=1 / len(rows), pad=0.01)
    return figure
