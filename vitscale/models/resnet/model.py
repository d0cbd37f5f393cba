"""BiT ResNets, from timm's modules.

Leaves out: sizes (`settings`), costs (`costs`), loading weights (`transfer`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import GroupNormAct, StdConv2d
from timm.models.resnetv2 import PreActBottleneck, ResNetV2
from torch import nn

from vitscale.models.interface.classifier import classify_in_fp32
from vitscale.models.interface.compilation import compile_each
from vitscale.models.interface.initialization import lecun_normal
from vitscale.models.interface.outputs import check_output
from vitscale.models.resnet.architecture import ResNetArchitecture
from vitscale.models.resnet.settings import ResNetSettings
from vitscale.models.resnet.units import NUM_GROUPS, ROOT_WIDTH

STANDARDIZATION_EPS = 1e-10  # big_transfer, bit_pytorch/models.py: added to the variance


class BiTResNet(ResNetV2):
    """timm's ResNet with other outputs than logits; see `vit.model.ViT`."""

    objective: nn.Module

    def forward(  # type: ignore[override]  # further outputs
        self, images_B3SS: torch.Tensor, *, output: str = "logits", **inputs: Any
    ) -> Any:
        """output: `logits` [B, num_classes]; `features` [B, width], the mean of the last feature
        map; `objective`: what the objective's module predicts from the images and `inputs`.
        Raises TypeError for inputs of another output.
        """
        if output == "objective":
            return self.objective(self, images_B3SS, **inputs)
        check_output(output, inputs, known=self.known_outputs)
        features_BDRC = self.forward_features(images_B3SS)
        return self.forward_head(features_BDRC, pre_logits=output == "features")

    @property
    def known_outputs(self) -> tuple[str, ...]:
        """What `forward` gives besides `objective`."""
        return ("logits", "features")


def build_model(settings: ResNetSettings, arch: ResNetArchitecture, *, seed: int) -> BiTResNet:
    """Build and initialise a model on the CPU in fp32. The same seed gives the same weights.

    Input: normalised images [B, 3, rows, columns]; output: logits [B, num_classes].
    The root's pool pads with zeros, as in BiT; torch's own padding, minus infinity, differs at the
    borders.
    """
    model = BiTResNet(
        layers=list(arch.stage_depths),
        width_factor=arch.root_width / ROOT_WIDTH,  # type: ignore[arg-type]  # timm multiplies
        num_classes=arch.num_classes,
        # A plain mean; the gradient of torch's adaptive pool is not deterministic on GPUs.
        global_pool="fastavg",
        preact=True,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=STANDARDIZATION_EPS),
        norm_layer=partial(GroupNormAct, num_groups=NUM_GROUPS),
    )
    initialize(model, seed=seed, head_bias=settings.head_bias, head_std=settings.head_std)
    classify_in_fp32(model.head.fc)
    return model


@torch.no_grad()
def initialize(model: BiTResNet, *, seed: int, head_bias: float, head_std: float) -> None:
    """big_vision, `models/bit.py`: LeCun-normal kernels; norms 1 and 0, the last ones too; zero
    head.
    """
    random = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, StdConv2d):
            lecun_normal(module.weight, random)
        elif isinstance(module, GroupNormAct):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    if not model.num_classes:
        return
    nn.init.zeros_(model.head.fc.weight)
    nn.init.constant_(model.head.fc.bias, head_bias)
    if head_std > 0:
        nn.init.normal_(model.head.fc.weight, std=head_std, generator=random)


def decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay acts on it: kernels only, that of the head too; no bias, no norm."""
    return parameter.ndim >= 2


def layers_above(name: str, arch: ResNetArchitecture) -> int:
    """Layers from the one that holds this parameter up to the head, for layer decay.

    0: head and final norm; 1 to the number of units: the units from the last to the first; one
    more: the root.
    """
    if name.startswith("stages."):
        _, stage, _, unit, *_ = name.split(".")
        return arch.num_units - sum(arch.stage_depths[: int(stage)]) - int(unit)
    return arch.num_units + 1 if name.startswith("stem.") else 0


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute the units' activations in the backward pass instead of keeping them."""
    assert isinstance(model, ResNetV2)
    model.set_grad_checkpointing(True)


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile each unit in place, when it is first used."""
    compile_each((m for m in model.modules() if isinstance(m, PreActBottleneck)), backend=backend)
