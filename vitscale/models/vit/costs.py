"""Parameters, FLOPs and activations of a Vision Transformer, by formula. Needs no torch.

Legend: d width, a width of all heads together (d unless heads have a width of their own), m MLP
width, T tokens, N patches, p patch size, C classes.
"""

from __future__ import annotations

from vitscale.models.vit.architecture import ViTArchitecture

ACTIVATION_SCALE = {"bf16": 1, "fp16": 1, "fp32": 2}


def num_parameters(arch: ViTArchitecture) -> int:
    """Exact count: biases everywhere, two norms per block; fixed positions are no parameters.

    Source: Dosovitskiy et al. 2021, section 3.1; ViT-B/16 with 1,000 classes has 86,567,656.
    """
    d = arch.width
    patch = arch.patch_values * d + d
    tokens = arch.num_prefix_tokens * d + arch.num_position_rows * d
    representation = d * d + d if arch.representation_layer else 0
    head = arch.num_classifiers * (arch.feature_width * arch.num_classes + arch.num_classes)
    blocks = arch.depth * block_parameters(arch)
    return patch + tokens + blocks + 2 * d + pool_parameters(arch) + representation + head


def pool_parameters(arch: ViTArchitecture) -> int:
    """Of the pooling head (MAP): a query, Q, K, V and output, a norm and an MLP."""
    if arch.pool != "map":
        return 0
    d, m = arch.width, arch.mlp_width
    return d + 4 * (d * d + d) + 2 * d + (d * m + m) + (m * d + d)


def block_parameters(arch: ViTArchitecture) -> int:
    """Of one block."""
    d, a, m = arch.width, arch.attention_width, arch.mlp_width
    inner = 2 if arch.mlp == "swiglu" else 1
    mlp = inner * (d * m + m) + (m * d + d)
    block = 2 * (2 * d) + (3 * d * a + 3 * a) + (a * d + d) + mlp
    return block + (2 * d if arch.layer_scale else 0)


def train_flops_per_image(arch: ViTArchitecture, *, num_tokens: int | None = None) -> int:
    """Model FLOPs of one training step per image: three forward passes, no recomputation.

    Forward multiply-adds: depth * (T * (4da + 2dm) + 2T^2 a) + 3Np^2 d + dC, two FLOPs each; the
    backward pass counts twice the forward (PaLM, Chowdhery et al. 2022, appendix B). Norms,
    softmax and GELU are left out. For a = d, m = 4d the first term is the familiar 12 T d^2.

    num_tokens: T where the blocks see fewer than all tokens, after all N patches are embedded.
    """
    d = arch.width
    patch = arch.num_patches * arch.patch_values * d
    head = arch.num_classifiers * arch.feature_width * arch.num_classes
    head += d * d if arch.representation_layer else 0
    if arch.pool == "map":  # one query attends to the patches
        num_seen = (num_tokens or arch.num_tokens) - arch.num_prefix_tokens
        head += num_seen * (2 * d * d + 2 * d) + 2 * d * d + 2 * d * arch.mlp_width
    return 3 * 2 * (arch.depth * block_multiply_adds(arch, num_tokens) + patch + head)


def block_multiply_adds(arch: ViTArchitecture, num_tokens: int | None = None) -> int:
    """Count one block's forward pass; num_tokens: all by default."""
    d, a, m = arch.width, arch.attention_width, arch.mlp_width
    num_tokens = num_tokens or arch.num_tokens
    mlp = (3 if arch.mlp == "swiglu" else 2) * d * m
    return num_tokens * (4 * d * a + mlp) + 2 * num_tokens**2 * a


def activation_bytes_per_image(
    arch: ViTArchitecture,
    *,
    precision: str,
    activation_checkpointing: bool,
    num_tokens: int | None = None,
) -> int:
    """Activations kept for the backward pass of one image, without the T x T attention matrix.

    34 bytes per token and channel of a block in bf16 for m = 4d, here split into 10d + 8a + 4m:
    Korthikanti et al. 2022 (Reducing Activation Recomputation), table 2, without the 5aT^2 term
    that a fused attention kernel never stores. SwiGLU keeps 8m. Checkpointing keeps each block's
    input and one block in full. num_tokens: that the blocks see, all by default.
    """
    num_tokens = num_tokens or arch.num_tokens
    mlp = (8 if arch.mlp == "swiglu" else 4) * arch.mlp_width
    block = num_tokens * (10 * arch.width + 8 * arch.attention_width + mlp)
    block_input = num_tokens * 2 * arch.width
    if activation_checkpointing:
        total = arch.depth * block_input + block
    else:
        total = arch.depth * block
    return total * ACTIVATION_SCALE[precision]
