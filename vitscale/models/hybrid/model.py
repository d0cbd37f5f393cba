"""A Vision Transformer on the feature map of a ResNet, from timm's modules.

Leaves out: sizes (`settings`), costs (`costs`), the transformer (`vit.model`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import GroupNormAct, HybridEmbed, StdConv2dSame
from timm.layers.padding import pad_same
from timm.models.resnetv2 import Bottleneck, ResNetV2, create_resnetv2_stem
from torch import nn

from vitscale.distributed.random_numbers import stream_key
from vitscale.models.hybrid.architecture import HybridArchitecture
from vitscale.models.hybrid.settings import HybridSettings
from vitscale.models.interface.compilation import compile_each
from vitscale.models.interface.initialization import lecun_normal
from vitscale.models.resnet.units import NUM_GROUPS, ROOT_WIDTH
from vitscale.models.vit import model as vit
from vitscale.models.vit.model import ViT, build_transformer

# The stem belongs to the patch embedding.
decayed = vit.decayed
layers_above = vit.layers_above
checkpoint_activations = vit.checkpoint_activations

STANDARDIZATION_EPS = 1e-5  # vision_transformer, models_resnet.py: added to the deviation
GROUP_NORM_EPS = 1e-6  # the default of Flax


class StandardizedConv(StdConv2dSame):
    """A convolution whose kernels have mean 0 and deviation 1, padded as TensorFlow's SAME.

    timm adds its epsilon to the variance, Google to the deviation: 1.6e-4 of the features at the
    initial weights, and more where kernels are small. Qiao et al. 2019 (Weight Standardization).
    """

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        if self.same_pad and self.kernel_size != (1, 1):  # padding by nothing is a copy too
            x_BCHW = pad_same(x_BCHW, list(self.kernel_size), list(self.stride))
        # In fp32: the deviation of bf16 weights would have 8 bits.
        kernel = self.weight.float()
        variance, mean = torch.var_mean(kernel, dim=(1, 2, 3), keepdim=True, correction=0)
        kernel = (kernel - mean) / (variance.sqrt() + STANDARDIZATION_EPS)
        return F.conv2d(
            x_BCHW, kernel.to(self.weight.dtype), None, self.stride, self.padding, self.dilation
        )


def build_model(settings: HybridSettings, arch: HybridArchitecture, *, seed: int) -> ViT:
    """Build and initialise a model on the CPU in fp32. The same seed gives the same weights.

    Input: normalised images [B, 3, rows, columns]; output: logits [B, num_classes].
    """
    stem = _stem(arch)
    model = build_transformer(
        settings, arch, embed_layer=partial(HybridEmbed, backbone=stem), seed=seed
    )
    _initialize_stem(stem, seed=seed)
    return model


def _stem(arch: HybridArchitecture) -> nn.Module:
    norm = partial(GroupNormAct, num_groups=NUM_GROUPS, eps=GROUP_NORM_EPS)
    if not arch.stage_depths:
        root: nn.Module = create_resnetv2_stem(
            3,
            arch.root_width,
            stem_type="same",
            preact=False,
            conv_layer=StandardizedConv,
            norm_layer=norm,
        )
        return root
    return ResNetV2(
        layers=list(arch.stage_depths),
        width_factor=arch.root_width / ROOT_WIDTH,  # type: ignore[arg-type]  # timm multiplies
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=StandardizedConv,
        norm_layer=norm,
    )


@torch.no_grad()
def _initialize_stem(stem: nn.Module, *, seed: int) -> None:
    """vision_transformer, `models_resnet.py`: the last norm of each unit starts at zero.

    Kernels are Flax's default, LeCun-normal. Their scale does not change the output, but how fast
    they learn.
    """
    random = torch.Generator().manual_seed(stream_key("stem", seed) >> 1)
    for module in stem.modules():
        if isinstance(module, StandardizedConv):
            lecun_normal(module.weight, random)
        elif isinstance(module, GroupNormAct):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    for module in stem.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.norm3.weight)


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile the blocks of the transformer and the units of the stem."""
    vit.compile_blocks(model, backend=backend)
    compile_each((m for m in model.modules() if isinstance(m, Bottleneck)), backend=backend)
