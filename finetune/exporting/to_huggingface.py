"""Export for transformers: a ViT, DeiT or DINOv2 folder that its Auto classes load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import (
    PHOTO,
    Format,
    in_vitscale,
    save_weights,
    split,
    weights_of,
)
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.trained_model import Preprocessing, TrainedModel
from vitscale.models.settings import ViTSettings
from vitscale.models.weights.huggingface import FAMILIES, GATED, renamed

ACTIVATIONS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}
# Model type -> start of its classes' names, and what follows it in the class with a head.
CLASSES = {
    "vit": ("ViT", "ForImageClassification"),
    "deit": ("DeiT", "ForImageClassificationWithTeacher"),
    "dinov2": ("Dinov2", "ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegisters", "ForImageClassification"),
}
# Pillow's numbers of filters; box averages areas.
FILTERS = {"bilinear": 2, "bicubic": 3, "area": 4}


class HuggingFaceFormat(Format):
    library = hub_library = "transformers"

    def unlike(self, model: TrainedModel) -> dict[str, bool]:
        arch: Any = model.arch
        if not isinstance(arch, ViTSettings):
            return {f"a model of the family {arch.name}": True}
        kind = _kind(arch)
        # transformers has three models that are like ours: ViT, DeiT and DINOv2.
        has_scale = arch.layer_scale is not None
        features = {
            "a representation layer": arch.representation_layer,
            "attention heads of a width of their own": arch.attention_width
            != arch.width,
        }
        if not kind.startswith("dinov2"):
            return features | {
                f"pool={arch.pool}": arch.pool != "cls",
                f"layer scale or SwiGLU in a {kind}": has_scale or arch.mlp != "gelu",
            }

        # DINOv2's head reads the class token and the mean of the patches; its model has no pool.
        is_pooled_alike = arch.pool == "cls_mean"
        if model.num_classes == 0 and arch.pool == "cls":
            is_pooled_alike = True
        # Layer scale and SwiGLU are in DINOv2 alone, and so is the width that it gives its MLP.
        return features | {
            "registers or two pooled tokens without layer scale": not has_scale,
            f"pool={arch.pool} beside layer scale or registers": not is_pooled_alike,
            f"an MLP of {arch.mlp_width} hidden channels for {arch.width}": (
                _mlp_width(arch) != arch.mlp_width
            ),
        }

    def write(self, model: TrainedModel, folder: Path) -> None:
        save_weights(_weights(model), folder / "model.safetensors")
        write_json(folder / "config.json", _config(model))
        write_json(
            folder / "preprocessor_config.json", _preprocessor(model.preprocessing)
        )

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor:
        import transformers

        # Bars of the library would run through the lines of the export.
        transformers.utils.logging.disable_progress_bar()
        kind: Any = getattr(transformers, _class_name(model))
        # Loaded as a user would, from the files alone.
        theirs = kind.from_pretrained(
            folder, local_files_only=True, **_options(model)
        ).eval()
        outputs: Any = theirs(pixel_values=images_B3SS)
        if model.num_classes:
            logits: torch.Tensor = outputs.logits
            return logits

        # A model without a head returns all tokens, and its users pool them.
        tokens_BLD = outputs.last_hidden_state
        means = [tokens_BLD[:, start:end].mean(dim=1) for start, end in _pooled(model)]
        return torch.cat(means, dim=1)

    def usage(self, model: TrainedModel) -> str:
        # What people paste must run as it stands, so the class and the options are the model's.
        kind = _class_name(model)
        best = "outputs.last_hidden_state"
        if model.num_classes:
            kind = "AutoModelForImageClassification"
            best = "model.config.id2label[outputs.logits.argmax().item()]"
        more = "".join(f", {key}={value}" for key, value in _options(model).items())
        return (
            "from PIL import Image, ImageOps\n"
            f"from transformers import AutoImageProcessor, {kind}\n"
            f'model = {kind}.from_pretrained("FOLDER"{more})\n'
            'processor = AutoImageProcessor.from_pretrained("FOLDER")\n'
            f'{PHOTO}outputs = model(**processor(image, return_tensors="pt"))\nprint({best})\n'
            f"# or\n{in_vitscale(model)}"
        )

    def notes(self, model: TrainedModel) -> Iterator[str]:
        if model.num_classes:
            return
        means = [
            f"`last_hidden_state[:, {start}:{end or ''}].mean(1)`"
            for start, end in _pooled(model)
        ]
        feature = " and ".join(means)
        if len(means) > 1:
            feature += ", concatenated"
        yield f"The model has no head. An image's feature is {feature}."


def _kind(arch: ViTSettings) -> str:
    """Return the model type of transformers with the same parts."""
    if arch.distillation_token:
        return "deit"
    if arch.num_registers:
        return "dinov2_with_registers"
    if arch.pool == "cls_mean" or arch.layer_scale is not None:
        return "dinov2"
    return "vit"


def _class_name(model: TrainedModel) -> str:
    arch: Any = model.arch
    start, classifier = CLASSES[_kind(arch)]
    if model.num_classes == 0:
        return f"{start}Model"
    return start + classifier


def _pooled(model: TrainedModel) -> list[tuple[int, int | None]]:
    """The tokens whose means are the feature of an image: first, and end."""
    arch: Any = model.arch
    if arch.pool == "cls_mean":
        return [(0, 1), (arch.num_prefix_tokens, None)]
    # DeiT is the only one with two tokens before the patches.
    if arch.distillation_token:
        return [(0, 2)]
    return [(0, 1)]


def _options(model: TrainedModel) -> dict[str, Any]:
    """Arguments of `from_pretrained`: these two families would add a pooler with random weights."""
    arch: Any = model.arch
    if model.num_classes == 0 and _kind(arch) in ("vit", "deit"):
        return {"add_pooling_layer": False}
    return {}


def _mlp_ratio(arch: Any) -> int:
    """The whole number that DINOv2's config stores; gated MLPs have two thirds of it."""
    ratio = arch.mlp_width / arch.width
    if arch.mlp == "swiglu":
        ratio *= 1.5
    return round(ratio)


def _mlp_width(arch: Any) -> int:
    """The hidden channels that transformers computes from DINOv2's `mlp_ratio`."""
    hidden: int = arch.width * _mlp_ratio(arch)
    if arch.mlp == "swiglu":
        # Two thirds, rounded up to a multiple of 8.
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
    return hidden


def _weights(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Rename the weights for transformers. A class token without a position gets a zero one."""
    arch: Any = model.arch
    kind = _kind(arch)
    weights = weights_of(model)
    positions_1LD = weights["pos_embed"]
    if positions_1LD.shape[1] == arch.num_patches:
        zero_11D = torch.zeros_like(positions_1LD[:, :1])
        weights["pos_embed"] = torch.cat([zero_11D, positions_1LD], dim=1)

    # The inverse of `from_huggingface`: the last name counts where two have the same meaning.
    prefix, below, beside = FAMILIES[kind]
    rows = [*below.items()]
    if arch.mlp == "swiglu":
        rows += GATED.items()
    names = {ours: prefix + theirs for theirs, ours in rows}
    names |= {ours: theirs for theirs, ours in beside.items()}
    named = renamed(split(weights), names)

    # It is used for masked patches alone, but transformers warns where it is missing.
    if kind.startswith("dinov2"):
        named[f"{kind}.embeddings.mask_token"] = torch.zeros(1, arch.width)
    if model.num_classes:
        return named

    # The class without a head has no prefix for its one part.
    return {name.removeprefix(f"{kind}."): value for name, value in named.items()}


def _config(model: TrainedModel) -> dict[str, Any]:
    arch: Any = model.arch
    kind = _kind(arch)
    config = {
        "model_type": kind,
        "architectures": [_class_name(model)],
        "hidden_size": arch.width,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.num_heads,
        "image_size": model.preprocessing.image_size,
        "patch_size": arch.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
        "hidden_act": ACTIVATIONS[arch.gelu],
        # transformers' own default is 1e-12.
        "layer_norm_eps": arch.layer_norm_eps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": dict(enumerate(model.class_names)),
        "label2id": {name: label for label, name in enumerate(model.class_names)},
    }
    if model.independent:
        config["problem_type"] = "multi_label_classification"

    # DINOv2's configuration has a whole ratio instead of a width.
    if not kind.startswith("dinov2"):
        return config | {"intermediate_size": arch.mlp_width}
    config["mlp_ratio"] = _mlp_ratio(arch)
    config["use_swiglu_ffn"] = arch.mlp == "swiglu"
    if arch.num_registers:
        config["num_register_tokens"] = arch.num_registers
    return config


def _preprocessor(pixels: Preprocessing) -> dict[str, Any]:
    """ViTImageProcessor squashes; BitImageProcessor resizes the short side, DeiTImageProcessor the
    whole image, and both crop."""
    # The side before the crop is rounded down there, too.
    square = {"height": pixels.image_size, "width": pixels.image_size}
    larger = math.floor(pixels.image_size / pixels.eval_crop_fraction)
    kind, size = {
        "squash": ("ViT", square),
        "center_crop": ("Bit", {"shortest_edge": larger}),
        "squash_crop": ("DeiT", {"height": larger, "width": larger}),
    }[pixels.eval_resize.removesuffix("_down")]

    # ViT's processor has no crop, and no key for one.
    crop = {}
    if kind != "ViT":
        crop = {"do_center_crop": True, "crop_size": square}

    return {
        "image_processor_type": f"{kind}ImageProcessor",
        "size": size,
        **crop,
        "do_resize": True,
        "resample": FILTERS[pixels.eval_interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        # Without it grey and transparent images raise.
        "do_convert_rgb": True,
    }
