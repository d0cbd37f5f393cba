"""Folders of transformers (Hugging Face): ViT, DeiT, MAE and DINOv2.

Owns: names of tensors, in one table that is read both ways, and what config.json says, in our
settings' names.

transformers renames tensors in memory (from 5.0 on); these are the names that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.layers import to_2tuple

from vitscale.config.errors import UserError
from vitscale.models.weights.files import CONFIG, Weights, labels_in_order, read_folder
from vitscale.models.weights.names import Tensors, joined, numbered
from vitscale.models.weights.pixels import (
    PREPROCESSOR,
    assumed_pixels,
    huggingface_pixels,
)

Names = dict[str, str]


def _names(text: str) -> Names:
    """A table of theirs and ours. Names of tensors, or of modules with weight and bias.

    {} is the number of a block.
    """
    return dict(line.split() for line in text.splitlines())


_SHARED = _names("""\
embeddings.cls_token cls_token
embeddings.position_embeddings pos_embed
embeddings.patch_embeddings.projection patch_embed.proj
layernorm norm
encoder.layer.{}.attention.attention.query blocks.{}.attn.query
encoder.layer.{}.attention.attention.key blocks.{}.attn.key
encoder.layer.{}.attention.attention.value blocks.{}.attn.value
encoder.layer.{}.attention.output.dense blocks.{}.attn.proj""")
_VIT = _SHARED | _names("""\
encoder.layer.{}.layernorm_before blocks.{}.norm1
encoder.layer.{}.layernorm_after blocks.{}.norm2
encoder.layer.{}.intermediate.dense blocks.{}.mlp.fc1
encoder.layer.{}.output.dense blocks.{}.mlp.fc2""")
GATED = _names("""\
encoder.layer.{}.mlp.weights_in blocks.{}.mlp.fc1
encoder.layer.{}.mlp.weights_out blocks.{}.mlp.fc2""")
_DINOV2 = (
    _SHARED
    | GATED
    | _names("""\
encoder.layer.{}.norm1 blocks.{}.norm1
encoder.layer.{}.norm2 blocks.{}.norm2
encoder.layer.{}.layer_scale1.lambda1 blocks.{}.ls1.gamma
encoder.layer.{}.layer_scale2.lambda1 blocks.{}.ls2.gamma
encoder.layer.{}.mlp.fc1 blocks.{}.mlp.fc1
encoder.layer.{}.mlp.fc2 blocks.{}.mlp.fc2""")
)
_HEAD = {"classifier": "head"}
_DEIT_HEADS = _names("""\
classifier head
cls_classifier head
distillation_classifier head_dist""")
# model_type of config.json: (prefix of the trunk, names below it, names without the prefix).
FAMILIES: dict[str, tuple[str, Names, Names]] = {
    "vit": ("vit.", _VIT, _HEAD),
    "vit_mae": ("vit.", _VIT, {}),
    "deit": (
        "deit.",
        _VIT | {"embeddings.distillation_token": "dist_token"},
        _DEIT_HEADS,
    ),
    "dinov2": ("dinov2.", _DINOV2, _HEAD),
    "dinov2_with_registers": (
        "dinov2_with_registers.",
        _DINOV2 | {"embeddings.register_tokens": "reg_token"},
        _HEAD,
    ),
}
# Parts of neither the trunk nor its classifier: the pooler of plain models, the token for masked
# patches, the decoder of MAE.
UNUSED = ("pooler.", "embeddings.mask_token", "decoder.")

# transformers' names of activations; it computes `gelu_new` and `gelu_fast` with tanh.
GELUS = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}


def from_huggingface(tensors: Tensors, model_type: str) -> tuple[Tensors, list[str]]:
    """The tensors under our names, and the names that are left out.

    Q, K and V are joined. Unknown tensors keep their names, which the table of misfits then lists.
    Raises KeyError for a model type that is not in `FAMILIES`.
    """
    prefix, below, beside = FAMILIES[model_type]
    # Some of the folders have the trunk's tensors without the prefix.
    used: Tensors = {}
    left_out = []
    for name, tensor in tensors.items():
        bare = name.removeprefix(prefix)
        if bare.startswith(UNUSED):
            left_out.append(name)
        else:
            used[bare] = tensor
    return joined(renamed(used, below | beside)), left_out


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """The tensors under the names of modules that `names` has; others keep theirs."""
    ours = {}
    for name, tensor in tensors.items():
        stem, part = re.fullmatch(r"(.*?)(\.weight|\.bias|)", name).groups()  # type: ignore[union-attr]  # always
        template, number = numbered(stem)
        if template in names:
            name = names[template].format(number) + part
        ours[name] = tensor
    return ours


def read_huggingface_folder(folder: Path, config: Mapping[str, Any]) -> Weights:
    """Read a folder. Raises UserError for another family of models, and for damaged files."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        problem = "names no model_type"
        if model_type:
            problem = f"describes a model of type {model_type!r}"
        raise UserError(
            problem,
            where=folder / CONFIG,
            allowed=f"{', '.join(FAMILIES)}, or a folder of timm, which has `architecture`",
            next_step="use weights of one of these",
        )

    known = _known(config, folder)
    assumed: tuple[str, ...] = ()
    processor = folder / PREPROCESSOR
    if processor.is_file():
        preprocessing = huggingface_pixels(processor, model_type)
    else:
        preprocessing = assumed_pixels(model_type)
        assumed = tuple(preprocessing)

    rows, columns = to_2tuple(config.get("image_size", 224))
    patch_rows, patch_columns = to_2tuple(config.get("patch_size", 16))
    origin = f"Hugging Face's {model_type}"
    size = preprocessing.get("image_size", max(rows, columns))
    if size != max(rows, columns):
        origin += f", at {size} px as its {PREPROCESSOR} says"

    # A distillation token that no head reads (DeiTForImageClassification) is a register.
    # Registers have no positions: those of both tokens are added to them.
    tensors, left_out = from_huggingface(read_folder(folder), model_type)
    has_unread_token = "dist_token" in tensors and "head_dist.weight" not in tensors
    if has_unread_token and "head.weight" in tensors:
        pos_1LD = tensors["pos_embed"]
        tensors["reg_token"] = tensors.pop("dist_token") + pos_1LD[:, 1:2]
        tensors["cls_token"] = tensors["cls_token"] + pos_1LD[:, :1]
        tensors["pos_embed"] = pos_1LD[:, 2:]

    return Weights(
        tensors=tensors,
        format=origin,
        known=known,
        preprocessing=preprocessing,
        classes=labels_in_order(config.get("id2label")),
        grid=(rows // patch_rows, columns // patch_columns),
        assumed=assumed,
        left_out=tuple(left_out),
        independent=config.get("problem_type") == "multi_label_classification",
        # `interpolate_pos_encoding` there.
        positions="timm" if model_type == "dinov2_with_registers" else "deit",
    )


def _known(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    # A key that config.json leaves out has transformers' own default.
    epsilon = 1e-12
    if str(config["model_type"]).startswith("dinov2"):
        epsilon = 1e-6
    known: dict[str, Any] = {
        "num_heads": int(config["num_attention_heads"]),
        "layer_norm_eps": float(config.get("layer_norm_eps", epsilon)),
    }
    if config.get("use_swiglu_ffn"):
        return known
    activation = config.get("hidden_act", "gelu")
    if activation not in GELUS:
        raise UserError(
            f"hidden_act {activation!r} is not supported",
            where=folder / CONFIG,
            allowed=", ".join(GELUS),
        )
    return known | {"gelu": GELUS[activation]}
