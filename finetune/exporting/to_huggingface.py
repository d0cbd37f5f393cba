"""Export for transformers: a ViT, DeiT or DINOv2 folder that its Auto classes load.

Owns: config.json and preprocessor_config.json. Leaves out: names of tensors (`names.huggingface`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import Format, save_weights, weights_of
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.inference import Preprocessing
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.models.settings import ViTSettings
from vitscale.models.weights.huggingface import to_huggingface

ACTIVATIONS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}
# Model type -> class with a head, class without one.
CLASSES = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersModel",
    ),
}
# Pillow's numbers of filters; box averages areas.
FILTERS = {"bilinear": 2, "bicubic": 3, "area": 4}


class HuggingFaceFormat(Format):
    library = "transformers"
    hub_library = "transformers"

    def problems(self, model: TrainedModel) -> Iterator[str]:
        settings = model.settings
        arch: Any = model.arch
        if not isinstance(settings, ViTSettings):
            yield f"a model of the family {settings.name}"
            return
        if settings.representation_layer:
            yield "a representation layer"
        if arch.attention_width != arch.width:
            yield "attention heads of a width of their own"
        yield from _problems_of_type(_model_type(settings), settings, arch)

    def write(self, model: TrainedModel, folder: Path) -> None:
        save_weights(_weights(model), folder / "model.safetensors")
        write_json(folder / "config.json", _config(model))
        write_json(folder / "preprocessor_config.json", _preprocessor(model.preprocessing))

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor | None:
        if importlib.util.find_spec("transformers") is None:
            return None
        import transformers

        transformers.utils.logging.disable_progress_bar()
        kind: Any = getattr(transformers, _class_name(model))
        theirs = kind.from_pretrained(folder, local_files_only=True, **_options(model)).eval()
        outputs = theirs(pixel_values=images_B3SS)
        if model.num_classes:
            logits: torch.Tensor = outputs.logits
            return logits
        tokens_BLD = outputs.last_hidden_state
        parts = [tokens_BLD[:, each].mean(dim=1) for each in _feature_tokens(model)]
        return torch.cat(parts, dim=1)

    def usage(self, model: TrainedModel) -> str:
        kind, more = "AutoModelForImageClassification", ""
        if not model.num_classes:
            kind = _class_name(model)
            more = "".join(f", {key}={value}" for key, value in _options(model).items())
        return (
            f"from transformers import AutoImageProcessor, {kind}\n"
            f'model = {kind}.from_pretrained("FOLDER"{more})\n'
            'processor = AutoImageProcessor.from_pretrained("FOLDER")'
        )

    def notes(self, model: TrainedModel) -> Iterator[str]:
        if not model.num_classes:
            means = [
                f"`last_hidden_state[:, {each.start or ''}:{each.stop or ''}].mean(1)`"
                for each in _feature_tokens(model)
            ]
            feature = " and ".join(means) + (", concatenated" if len(means) > 1 else "")
            yield f"The model has no head. An image's feature is {feature}."


def _model_type(settings: ViTSettings) -> str:
    """The model of transformers whose parts it has."""
    if settings.distillation_token:
        return "deit"
    if settings.num_registers:
        return "dinov2_with_registers"
    is_dinov2 = settings.pool == "cls_mean" or settings.layer_scale is not None
    return "dinov2" if is_dinov2 else "vit"


def _problems_of_type(model_type: str, settings: ViTSettings, arch: Any) -> Iterator[str]:
    if not model_type.startswith("dinov2"):
        if settings.pool != "cls":
            yield f"pool={settings.pool}"
        if settings.layer_scale is not None or settings.mlp != "gelu":
            yield f"layer scale or SwiGLU in a {model_type}"
        return
    if settings.layer_scale is None:
        yield "registers or two pooled tokens without layer scale"
    if settings.pool != "cls_mean" and (arch.num_classes or settings.pool != "cls"):
        yield f"pool={settings.pool} beside layer scale or registers"
    if _mlp_width(arch) != arch.mlp_width:
        yield f"an MLP of {arch.mlp_width} hidden channels for {arch.width}"


def _mlp_width(arch: Any) -> int:
    """The hidden channels that transformers computes from DINOv2's `mlp_ratio`."""
    hidden: int = arch.width * _mlp_ratio(arch)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if arch.mlp == "swiglu" else hidden


def _mlp_ratio(arch: Any) -> int:
    """A whole number there; gated MLPs have two thirds of it."""
    return round(arch.mlp_width / arch.width * (1.5 if arch.mlp == "swiglu" else 1))


def _class_name(model: TrainedModel) -> str:
    settings: Any = model.settings
    return CLASSES[_model_type(settings)][0 if model.num_classes else 1]


def _feature_tokens(model: TrainedModel) -> list[slice]:
    """The tokens whose means are the feature of an image."""
    settings: Any = model.settings
    if settings.pool == "cls_mean":
        return [slice(0, 1), slice(model.arch.num_prefix_tokens, None)]
    return [slice(0, 2 if settings.distillation_token else 1)]


def _options(model: TrainedModel) -> dict[str, Any]:
    """Of `from_pretrained`: these two families would add a pooler with random weights."""
    settings: Any = model.settings
    has_pooler = not model.num_classes and _model_type(settings) in ("vit", "deit")
    return {"add_pooling_layer": False} if has_pooler else {}


def _weights(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Under transformers' names. A class token without a position gets one of zeros."""
    arch: Any = model.arch
    settings: Any = model.settings
    weights, model_type = weights_of(model), _model_type(settings)
    rows, columns = arch.grid
    if weights["pos_embed"].shape[1] == rows * columns:
        none_11D = torch.zeros_like(weights["pos_embed"][:, :1])
        weights["pos_embed"] = torch.cat([none_11D, weights["pos_embed"]], dim=1)
    named = to_huggingface(weights, model_type, gated=arch.mlp == "swiglu")
    if model_type.startswith("dinov2"):
        # What masked patches of a pre-training there would be.
        named[f"{model_type}.embeddings.mask_token"] = torch.zeros(1, arch.width)
    if model.num_classes:
        return named
    return {name.removeprefix(f"{model_type}."): value for name, value in named.items()}


def _config(model: TrainedModel) -> dict[str, Any]:
    arch: Any = model.arch
    settings: Any = model.settings
    model_type = _model_type(settings)
    names = model.classes or tuple(f"class {label}" for label in range(model.num_classes))
    config = {
        "model_type": model_type,
        "architectures": [_class_name(model)],
        "hidden_size": arch.width,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.num_heads,
        "image_size": model.preprocessing.image_size,
        "patch_size": arch.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
        "hidden_act": ACTIVATIONS[settings.gelu],
        # transformers' own default is 1e-12.
        "layer_norm_eps": settings.layer_norm_eps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }
    if not model_type.startswith("dinov2"):
        return config | {"intermediate_size": arch.mlp_width}
    config |= {"mlp_ratio": _mlp_ratio(arch), "use_swiglu_ffn": arch.mlp == "swiglu"}
    return config | ({"num_register_tokens": arch.num_registers} if arch.num_registers else {})


def _preprocessor(preprocessing: Preprocessing) -> dict[str, Any]:
    """ViTImageProcessor squashes; BitImageProcessor resizes the short side and crops."""
    side = preprocessing.image_size
    sides = {"height": side, "width": side}
    size: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "size": sides,
    }
    if preprocessing.eval_resize != "squash":
        size = {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": math.floor(side / preprocessing.eval_crop_fraction)},
            "do_center_crop": True,
            "crop_size": sides,
        }
    return size | {
        "do_resize": True,
        "resample": FILTERS[preprocessing.eval_interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        # Without it grey and transparent images raise.
        "do_convert_rgb": True,
    }
