"""Parameters, FLOPs and activations of a masked autoencoder, by formula. Needs no torch.

Legend: d width of the encoder, w of the decoder, N patches, T kept patches and the class token,
P values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.models import costs as vit_costs
from vitscale.models.settings import ViTSettings

MLP_RATIO = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSize:
    """Of MAE's decoder; `MLP_RATIO` times its width in the MLPs."""

    width: int
    depth: int
    num_heads: int


def num_kept(num_patches: int, *, mask_ratio: float) -> int:
    """Patches that the encoder sees; rounded down: of 100 at 0.8 it keeps 19."""
    return int(num_patches * (1 - mask_ratio))


def num_parameters(arch: ViTSettings, decoder: DecoderSize) -> int:
    """Exact count of trained values of encoder and decoder; both positions are fixed."""
    d, w, pixels = arch.width, decoder.width, _patch_values(arch)
    block = vit_costs.block_parameters(_decoder_arch(arch, decoder))
    added = (d * w + w) + w + decoder.depth * block + 2 * w + (w * pixels + pixels)
    return vit_costs.num_parameters(arch) + added


def train_flops_per_image(arch: ViTSettings, decoder: DecoderSize, *, mask_ratio: float) -> int:
    """Counted as `vit_costs` does: the encoder sees T tokens, the decoder all N + 1.

    All N patches are embedded. The decoder adds T d w, its blocks, and (N + 1) w P multiply-adds.
    """
    visible = _num_visible(arch, mask_ratio)
    encoder = vit_costs.train_flops_per_image(arch, num_tokens=visible)
    embed = visible * arch.width * decoder.width
    predict = arch.num_tokens * decoder.width * _patch_values(arch)
    blocks = decoder.depth * vit_costs.block_multiply_adds(_decoder_arch(arch, decoder))
    return encoder + 3 * 2 * (embed + blocks + predict)


def activation_bytes_per_image(
    arch: ViTSettings,
    decoder: DecoderSize,
    *,
    mask_ratio: float,
    precision: str,
    activation_checkpointing: bool,
) -> int:
    """Of both parts, as `vit_costs` counts them."""
    parts = ((arch, _num_visible(arch, mask_ratio)), (_decoder_arch(arch, decoder), None))
    return sum(
        vit_costs.activation_bytes_per_image(
            part,
            precision=precision,
            activation_checkpointing=activation_checkpointing,
            num_tokens=num_tokens,
        )
        for part, num_tokens in parts
    )


def _patch_values(arch: ViTSettings) -> int:
    return arch.patch_values


def _num_visible(arch: ViTSettings, mask_ratio: float) -> int:
    """Tokens that the encoder sees."""
    return num_kept(arch.num_patches, mask_ratio=mask_ratio) + arch.num_prefix_tokens


def _decoder_arch(arch: ViTSettings, decoder: DecoderSize) -> ViTSettings:
    sizes = {"width": decoder.width, "depth": decoder.depth, "num_heads": decoder.num_heads}
    sizes |= {"mlp_width": MLP_RATIO * decoder.width}
    return arch.model_copy(update={**sizes, "head_width": None, "layer_scale": None})
