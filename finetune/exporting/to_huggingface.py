"""Export for transformers: a ViT, DeiT or DINOv2 folder that its Auto classes load."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import IN_VITSCALE, Format, save_weights, weights_of
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.trained_model import Preprocessing, TrainedModel
from vitscale.models.settings import ViTSettings
from vitscale.models.weights.huggingface import to_huggingface

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
        kind, pool, has_scale = _kind(arch), arch.pool, arch.layer_scale is not None
        found = {
            "a representation layer": arch.representation_layer,
            "attention heads of a width of their own": arch.attention_width
            != arch.width,
        }
        if not kind.startswith("dinov2"):
            return found | {
                f"pool={pool}": pool != "cls",
                f"layer scale or SwiGLU in a {kind}": has_scale or arch.mlp != "gelu",
            }
        reads_class_token = pool == "cls" and model.num_classes == 0
        return found | {
            "registers or two pooled tokens without layer scale": not has_scale,
            f"pool={pool} beside layer scale or registers": not (
                pool == "cls_mean" or reads_class_token
            ),
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
    ) -> torch.Tensor | None:
        if importlib.util.find_spec("transformers") is None:
            return None
        import transformers

        transformers.utils.logging.disable_progress_bar()
        kind: Any = getattr(transformers, _class_name(model))
        theirs = kind.from_pretrained(
            folder, local_files_only=True, **_options(model)
        ).eval()
        outputs: Any = theirs(pixel_values=images_B3SS)
        if model.num_classes:
            logits: torch.Tensor = outputs.logits
            return logits
        tokens_BLD = outputs.last_hidden_state
        return torch.cat(
            [tokens_BLD[:, a:b].mean(dim=1) for a, b in _pooled(model)], dim=1
        )

    def usage(self, model: TrainedModel) -> str:
        kind = (
            "AutoModelForImageClassification"
            if model.num_classes
            else _class_name(model)
        )
        more = "".join(f", {key}={value}" for key, value in _options(model).items())
        return (
            f"from transformers import AutoImageProcessor, {kind}\n"
            f'model = {kind}.from_pretrained("FOLDER"{more})\n'
            'processor = AutoImageProcessor.from_pretrained("FOLDER")\n'
            f"# or\n{IN_VITSCALE}"
        )

    def notes(self, model: TrainedModel) -> Iterator[str]:
        if model.num_classes == 0:
            means = [
                f"`last_hidden_state[:, {a}:{b or ''}].mean(1)`"
                for a, b in _pooled(model)
            ]
            feature = " and ".join(means) + (", concatenated" if len(means) > 1 else "")
            yield f"The model has no head. An image's feature is {feature}."


def _kind(arch: ViTSettings) -> str:
    """Return the model type of transformers with the same parts."""
    if arch.distillation_token:
        return "deit"
    if arch.num_registers:
        return "dinov2_with_registers"
    return (
        "dinov2" if arch.pool == "cls_mean" or arch.layer_scale is not None else "vit"
    )


def _class_name(model: TrainedModel) -> str:
    arch: Any = model.arch
    start, classifier = CLASSES[_kind(arch)]
    return start + (classifier if model.num_classes else "Model")


def _pooled(model: TrainedModel) -> list[tuple[int, int | None]]:
    """The tokens whose means are the feature of an image: first, and end."""
    arch: Any = model.arch
    if arch.pool == "cls_mean":
        return [(0, 1), (arch.num_prefix_tokens, None)]
    return [(0, 2 if arch.distillation_token else 1)]


def _options(model: TrainedModel) -> dict[str, Any]:
    """Arguments of `from_pretrained`: these two families would add a pooler with random weights."""
    arch: Any = model.arch
    has_pooler = model.num_classes == 0 and _kind(arch) in ("vit", "deit")
    return {"add_pooling_layer": False} if has_pooler else {}


def _mlp_ratio(arch: Any) -> int:
    """The whole number that DINOv2's config stores; gated MLPs have two thirds of it."""
    return round(arch.mlp_width / arch.width * (1.5 if arch.mlp == "swiglu" else 1))


def _mlp_width(arch: Any) -> int:
    """The hidden channels that transformers computes from DINOv2's `mlp_ratio`."""
    hidden: int = arch.width * _mlp_ratio(arch)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if arch.mlp == "swiglu" else hidden


def _weights(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Rename the weights for transformers. A class token without a position gets a zero one."""
    arch: Any = model.arch
    weights, kind = weights_of(model), _kind(arch)
    if weights["pos_embed"].shape[1] == arch.num_patches:
        none_11D = torch.zeros_like(weights["pos_embed"][:, :1])
        weights["pos_embed"] = torch.cat([none_11D, weights["pos_embed"]], dim=1)
    named = to_huggingface(weights, kind, gated=arch.mlp == "swiglu")
    if kind.startswith("dinov2"):
        # What masked patches of a pre-training there would be.
        named[f"{kind}.embeddings.mask_token"] = torch.zeros(1, arch.width)
    if model.num_classes:
        return named
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
        "id2label": {str(label): name for label, name in enumerate(model.class_names)},
        "label2id": {name: label for label, name in enumerate(model.class_names)},
        **({"problem_type": "multi_label_classification"} if model.independent else {}),
    }
    if not kind.startswith("dinov2"):
        return config | {"intermediate_size": arch.mlp_width}
    config |= {"mlp_ratio": _mlp_ratio(arch), "use_swiglu_ffn": arch.mlp == "swiglu"}
    return config | (
        {"num_register_tokens": arch.num_registers} if arch.num_registers else {}
    )


def _preprocessor(how: Preprocessing) -> dict[str, Any]:
    """ViTImageProcessor squashes; BitImageProcessor resizes the short side, DeiTImageProcessor the
    whole image, and both crop."""
    square = {"height": how.image_size, "width": how.image_size}
    larger = math.floor(how.image_size / how.eval_crop_fraction)
    kind, size = {
        "squash": ("ViT", square),
        "center_crop": ("Bit", {"shortest_edge": larger}),
        "squash_crop": ("DeiT", {"height": larger, "width": larger}),
    }[how.eval_resize.removesuffix("_down")]
    crop = {} if kind == "ViT" else {"do_center_crop": True, "crop_size": square}
    return {
        "image_processor_type": f"{kind}ImageProcessor",
        "size": size,
        **crop,
        "do_resize": True,
        "resample": FILTERS[how.eval_interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(how.mean),
        "image_std": list(how.std),
        # Without it grey and transparent images raise.
        "do_convert_rgb": True,
    }
