"""The Vision Transformer: timm's modules, the papers' initialisation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, DropPath, Mlp, SwiGLUPacked
from timm.models import checkpoint_seq
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vitscale.models.initialization import POSITION_STD, initialize, last_layers
from vitscale.models.interface import (
    classify_in_fp32,
    compile_each,
    drop_by_position,
    tokens_of,
)
from vitscale.models.positions import FIXED_POSITIONS
from vitscale.models.settings import ViTSettings

TOKENS = ("pos_embed", "cls_token", "reg_token", "dist_token", "mask_token", "latent")
POOLS: dict[str, Any] = {
    "cls": "token",
    "gap": "avg",
    "map": "map",
    "cls_mean": "token",
}
NUM_BLOCKS = 4  # DINOv2: linear heads on the last one and the last four


class RepresentationHead(nn.Sequential):
    """Dense + tanh + dense: the pre-training head of the ViT paper (sec. 3.1)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_classes)
        )


class PatchProduct(nn.Conv2d):
    """The convolution that embeds patches; on GPUs one product, for which cuDNN takes ten times as
    long (L/16 on an H200: 5 ms of 205).
    """

    def forward(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        if images_B3SS.is_cuda:
            return self.product(images_B3SS)
        return super().forward(images_B3SS)

    def product(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        # The order of the kernel's own values: channel, row, column.
        rows, columns = self.kernel_size
        tiles = images_B3SS.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))
        patches_BRCP = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
        tokens = nn.functional.linear(patches_BRCP, self.weight.flatten(1), self.bias)
        return tokens.permute(0, 3, 1, 2)


class ViT(VisionTransformer):
    """timm's Vision Transformer with other outputs than logits.

    An objective may add a module `objective`, whose forward pass takes this model, the images and
    inputs of its own. It runs inside this one's, as ZeRO 3 needs.
    """

    objective: nn.Module
    classifiers = ("head", "head_dist")
    """Modules that are left out of a transfer, and trained while the backbone is frozen."""
    pools_both = False
    """The head sees the class token and the mean of the patches (DINOv2)."""

    def forward(  # type: ignore[override]  # no masks
        self, images_B3SS: torch.Tensor, *, output: str = "logits", **inputs: Any
    ) -> Any:
        """output: `logits` [B, num_classes]; `features` [B, width], pooled, before the whole head,
        so also before a representation layer; `representation` [B, width], after that layer;
        `blocks`: of `block_features`; `tokens`: of `tokens_of`, which takes inputs;
        `class_token` [B, width], after the last norm;
        `objective`: what the objective's module predicts from the images and `inputs`.
        """
        rows, columns = images_B3SS.shape[2:]
        assert rows == columns, "images are square"
        if output == "objective":
            return self.objective(self, images_B3SS, **inputs)
        if output == "tokens":
            return tokens_of(self, images_B3SS, **inputs)
        if output == "class_token":
            return self.forward_features(images_B3SS)[:, 0]
        assert output in self.known_outputs and not inputs, (output, *inputs)
        if output == "blocks":
            return self.block_features(images_B3SS)

        # `pre_logits` stops timm before the whole head, also before a representation layer.
        tokens_BLD: torch.Tensor = self.forward_features(images_B3SS)
        values_BX: torch.Tensor = self.forward_head(
            tokens_BLD, pre_logits=output != "logits"
        )
        if output == "representation":
            head: Any = self.head
            values_BX = head[1](head[0](values_BX))
        return values_BX

    @property
    def known_outputs(self) -> tuple[str, ...]:
        """Outputs of `forward` besides `objective`."""
        names = ["logits", "features"]
        if isinstance(self.head, RepresentationHead):
            names.append("representation")
        if self.cls_token is not None and len(self.blocks) >= NUM_BLOCKS:
            names.append("blocks")
        return tuple(names)

    def block_features(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """The class token of the last `NUM_BLOCKS` blocks, the last one first, then the mean patch
        token of the last, each through the last norm: [B, (NUM_BLOCKS + 1) * width]. DINOv2,
        `eval/linear.py`.
        """
        blocks: Any = self.forward_intermediates(
            images_B3SS,
            indices=NUM_BLOCKS,
            norm=True,
            return_prefix_tokens=True,
            output_fmt="NLC",
            intermediates_only=True,
        )
        # DINOv2 concatenates the last block first.
        patches_BLD = blocks[-1][0]
        tokens = [prefix_BPD[:, 0] for _, prefix_BPD in reversed(blocks)]
        return torch.cat([*tokens, patches_BLD.mean(dim=1)], dim=1)

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        """Add positions and prefix tokens to patches [B, L, width].

        Images of another size than the model's, such as smaller views, are square; timm resamples
        the positions for them.
        """
        grid = self.patch_embed.grid_size
        num_patches = x.shape[1]
        if num_patches != self.patch_embed.num_patches:
            side = math.isqrt(num_patches)
            grid = (side, side)
        tokens_BLD: torch.Tensor = super()._pos_embed(x.unflatten(1, grid))
        return tokens_BLD

    def pool(self, x: torch.Tensor, pool_type: str | None = None) -> torch.Tensor:
        """Tokens [B, L, width] -> what the head sees."""
        # timm's attention pooling and its own callers name a type.
        if pool_type is not None or not self.pools_both:
            pooled: torch.Tensor = super().pool(x, pool_type)
            return pooled
        mean_BD = x[:, self.num_prefix_tokens :].mean(dim=1)
        return torch.cat([x[:, 0], mean_BD], dim=1)

    def run_blocks(self, tokens_BLD: torch.Tensor) -> torch.Tensor:
        """All blocks and the last norm, on any tokens with their positions."""
        tokens_BLD = run_blocks(
            self.blocks, tokens_BLD, recompute=self.grad_checkpointing
        )
        return self.norm(tokens_BLD)


class DistilledViT(ViT, VisionTransformerDistilled):
    """A ViT with a distillation token after the class token, and a head for each (DeiT, sec. 3).

    Its logits are the mean of both heads', as in the authors' code; the paper adds softmaxes.
    """

    def forward(  # type: ignore[override]  # no masks
        self, images_B3SS: torch.Tensor, *, output: str = "logits", **inputs: Any
    ) -> Any:
        """output: also `heads`, the logits of the class and of the distillation head."""
        if output != "heads":
            return super().forward(images_B3SS, output=output, **inputs)
        assert output in self.known_outputs and not inputs, (output, *inputs)
        tokens_BLD = self.forward_features(images_B3SS)
        return self.head(tokens_BLD[:, 0]), self.head_dist(tokens_BLD[:, 1])

    @property
    def known_outputs(self) -> tuple[str, ...]:
        return (*super().known_outputs, "heads")


def run_blocks(
    blocks: nn.Sequential, tokens_BLD: torch.Tensor, *, recompute: bool = False
) -> torch.Tensor:
    """Run blocks in order. recompute: recompute their activations in the backward pass."""
    # Without gradients there is no backward pass to recompute for.
    if recompute and torch.is_grad_enabled():
        tokens_BLD = checkpoint_seq(blocks, tokens_BLD)
    else:
        tokens_BLD = blocks(tokens_BLD)
    return tokens_BLD


def _attention(head_width: int | None) -> type[nn.Module]:
    """timm's attention. Its blocks pass the number of heads on, but not the width of a head."""
    if head_width is None:
        return Attention

    class HeadsOfOwnWidth(Attention):
        def __init__(self, dim: int, **options: Any) -> None:
            super().__init__(dim, attn_head_dim=head_width, **options)

    return HeadsOfOwnWidth


def build_model(arch: ViTSettings, *, seed: int) -> ViT:
    """Build and initialise a model on the CPU in fp32. The same seed gives the same weights.

    Input: normalised images [B, 3, rows, columns]; output: logits [B, num_classes].
    """
    # timm counts the gates of SwiGLU as hidden channels.
    mlp_layer: Any = Mlp
    mlp_ratio = arch.mlp_ratio
    activation: Any = partial(
        nn.GELU, approximate="tanh" if arch.gelu == "tanh" else "none"
    )
    if arch.mlp == "swiglu":
        mlp_layer = SwiGLUPacked
        mlp_ratio = 2 * arch.mlp_ratio
        activation = nn.SiLU

    family = DistilledViT if arch.distillation_token else ViT
    model = family(
        img_size=arch.image_size,
        patch_size=arch.patch_size,
        num_classes=arch.num_classes,
        global_pool=POOLS[arch.pool],
        class_token=arch.has_class_token,
        reg_tokens=arch.num_registers,
        pos_embed="learn" if arch.positions == "learned" else "none",
        # Registers have no positions, nor has the class token where it is left out.
        no_embed_class=not arch.has_class_position,
        init_values=arch.layer_scale,
        # timm would add a second norm after the mean. The GAP models of ViT and big_vision have
        # one before it, MAE's and BEiT's one after it.
        fc_norm=arch.pool_norm,
        final_norm=True,
        embed_dim=arch.width,
        depth=arch.depth,
        num_heads=arch.num_heads,
        norm_layer=partial(nn.LayerNorm, eps=arch.layer_norm_eps),
        pos_drop_rate=arch.dropout,
        proj_drop_rate=arch.dropout,
        attn_drop_rate=arch.attention_dropout,
        attn_layer=_attention(arch.head_width),
        drop_path_rate=arch.drop_path,
        weight_init="skip",
        mlp_ratio=mlp_ratio,
        mlp_layer=mlp_layer,
        act_layer=activation,
    )
    model.patch_embed.proj.__class__ = PatchProduct
    # For views of other sizes.
    model.patch_embed.strict_img_size = False
    model.dynamic_img_size = True  # type: ignore[misc]  # final for scripts

    # Heads that timm does not have.
    if arch.pool == "cls_mean":
        model.pools_both = True
        if arch.num_classes:
            model.add_module("head", nn.Linear(arch.feature_width, arch.num_classes))
    if arch.representation_layer:
        model.add_module("head", RepresentationHead(arch.width, arch.num_classes))

    # Fixed positions are where timm adds learned ones: no parameter, and in no checkpoint.
    if arch.positions in FIXED_POSITIONS:
        pos_LD = FIXED_POSITIONS[arch.positions](arch.grid, width=arch.width)
        del model.pos_embed
        model.register_buffer("pos_embed", pos_LD[None], persistent=False)
    if arch.drop_path_by_depth == "constant" and arch.drop_path > 0:
        for block in model.blocks:
            block.drop_path1 = DropPath(arch.drop_path)
            block.drop_path2 = DropPath(arch.drop_path)

    drop_by_position(model, seed=seed)

    # Only now are all modules there that need initial values.
    position_std = POSITION_STD
    if arch.position_init == "big_vision":
        position_std = arch.width**-0.5
    initialize(
        model,
        seed=seed,
        head_bias=arch.head_bias,
        head_std=arch.head_std,
        position_std=position_std,
        scheme=arch.weight_init,
    )
    classify_in_fp32(*last_layers(model))
    return model


def decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return True for kernels, on which weight decay acts; False for all other parameters."""
    return parameter.ndim >= 2 and name.rpartition(".")[2] not in TOKENS


def layers_above(name: str, arch: ViTSettings) -> int:
    """Layers from the one that holds this parameter up to the head, for layer decay.

    0: head and final norm; 1 to depth: the blocks from the last to the first; depth + 1: patches,
    positions and tokens. Source: BEiT and MAE, `get_layer_id_for_vit`.
    """
    if name.startswith("blocks."):
        return arch.depth - int(name.split(".")[1])
    if name.startswith(("patch_embed.", *TOKENS)):
        return arch.depth + 1
    return 0


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute the blocks' activations in the backward pass instead of keeping them."""
    assert isinstance(model, VisionTransformer)
    model.set_grad_checkpointing(True)


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile each block in place, when it is first used. Blocks of an objective's module too."""
    assert isinstance(model, VisionTransformer)
    compile_each((m for m in model.modules() if isinstance(m, Block)), backend=backend)
