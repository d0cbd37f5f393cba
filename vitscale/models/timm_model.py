"""Any model of timm: built, divided into layers, counted, and filled from local weights.

timm's modules, names of tensors, initial values, layers and resampling are used as they are.
Leaves out: reading files (`weights`). Nothing is downloaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import (
    PretrainedCfg,
    get_pretrained_cfg,
    group_parameters,
    vision_transformer,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitscale.config.errors import UserError, nearest
from vitscale.models.interface import (
    classify_in_fp32,
    compile_each,
    drop_by_position,
    refuse_misfits,
    tokens_of,
)
from vitscale.models.settings import TimmSettings

# Counters of BatchNorm, which evaluation does not read; some files lack them.
COUNTER = "num_batches_tracked"
# Blocks are compiled one by one. Most models of timm call them so.
BLOCK = re.compile(r"(.*\.)?blocks\.\d+")


class TimmModel(nn.Module):
    """The interface that training and evaluation use; the first base class, before timm's."""

    objective: nn.Module
    known_outputs = ("logits", "features")
    classifiers: tuple[str, ...]
    """Names of the last layers."""

    def forward(
        self, images_B3SS: torch.Tensor, *, output: str = "logits", **inputs: Any
    ) -> Any:
        """output: `logits` [B, classes]; `features` [B, width], what the last layer sees;
        `tokens`: of `tokens_of`, for models that keep tokens; `class_token` [B, width], for models
        with one; `objective`: what the objective's module predicts from the images and `inputs`.
        """
        if output == "objective":
            return self.objective(self, images_B3SS, **inputs)
        if output == "tokens":
            return tokens_of(self, images_B3SS, **inputs)
        model: Any = self
        if output == "class_token":
            return model.forward_features(images_B3SS)[:, 0]
        assert output in self.known_outputs and not inputs, (output, *inputs)
        # Convolutions on GPUs are faster so, and every layer keeps the layout.
        if images_B3SS.is_cuda:
            images_B3SS = images_B3SS.contiguous(memory_format=torch.channels_last)
        if output == "logits":
            return super().forward(images_B3SS)
        return model.forward_head(model.forward_features(images_B3SS), pre_logits=True)

    def load_weights(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        where: str,
        keep_head: bool,
        resize_patches: bool = False,
    ) -> None:
        """Load weights under timm's names. timm resamples those of another image size, and with
        `resize_patches` those of another patch size.

        Raises UserError for weights that do not fit; then nothing was loaded.
        """
        left_out: tuple[str, ...] = ("objective.",)
        next_step = "give weights of the same model of timm"
        if keep_head:
            next_step += " and the same classes, or keep_head=false"
        else:
            left_out += tuple(f"{name}." for name in self.classifiers)
        target = _compared(self.state_dict(), left_out)
        given = _compared(weights, left_out)

        # timm's own function changes positions and kernels to the sizes of the model.
        resample = _resampler(self)
        if resample is not None:
            has_other_patches = any(
                _differ_in_pixels(tensor, given.get(name))
                for name, tensor in target.items()
            )
            if has_other_patches:
                next_step += "; or set init_patch=resize"
            has_all = target.keys() <= given.keys()
            is_same = has_all and all(
                tensor.shape == given[name].shape for name, tensor in target.items()
            )
            if has_all and not is_same and (resize_patches or not has_other_patches):
                given = resample(given, self)

        refuse_misfits(target, given, where=where, next_step=next_step)
        self.load_state_dict(given, strict=False)


def _resampler(model: Any) -> Callable[..., dict[str, torch.Tensor]] | None:
    """timm's function that resizes weights for a model, with the arguments timm has for it."""
    module = sys.modules[type(model).__module__]
    resample = getattr(module, "checkpoint_filter_fn", None)
    name = model.pretrained_cfg["architecture"]
    if module is not vision_transformer or not is_resized_bilinearly(name):
        return resample

    # What `_create_vision_transformer` passes for them.
    options: dict[str, Any] = {"interpolation": "bilinear", "antialias": False}
    if "radio" in name:
        aligned = vision_transformer._RADIO_ALIGN_CORNERS
        options["align_corners"] = any(part in name for part in aligned)
    return partial(vision_transformer.checkpoint_filter_fn, **options)


def is_resized_bilinearly(name: str) -> bool:
    """Whether timm resizes positions and patches of this model otherwise than those of others."""
    return "flexi" in name or "radio" in name


def _compared(
    tensors: Mapping[str, torch.Tensor], left_out: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The tensors that a model and its weights must both have."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(left_out) and COUNTER not in name
    }


def _differ_in_pixels(target: torch.Tensor, given: torch.Tensor | None) -> bool:
    """Whether these are kernels of patches of another size, alike but for rows and columns."""
    if given is None or not target.ndim == given.ndim == 4:
        return False
    # With a first dimension of 1 they are positions in two dimensions.
    if len(target) == 1:
        return False
    return target.shape != given.shape and target.shape[:2] == given.shape[:2]


def build_model(arch: TimmSettings, *, seed: int) -> TimmModel:
    """Build and initialise a model on the CPU in fp32. The same seed gives the same weights.

    timm's initial values, but those of the last layers: zero weights, or N(0, head_std).
    Raises UserError for an unknown name, and for arguments and image sizes that timm refuses.
    """
    # It raises for what timm refuses, before any memory is taken.
    _measured(arch)

    # timm draws from torch's own state, which the run must not see move.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _create(arch)
        drop_by_position(model, seed=seed)
        named = dict(model.named_modules())
        for last in map(named.get, model.classifiers):
            if isinstance(last, nn.Linear | nn.Conv2d) and last.bias is not None:
                nn.init.normal_(last.weight, std=arch.head_std)
                nn.init.constant_(last.bias, arch.head_bias)
                classify_in_fp32(last)
    return model


def _create(arch: TimmSettings) -> TimmModel:
    config = pretrained_config(arch.model)
    arguments = {"num_classes": arch.num_classes, **arch.arguments}
    if config.fixed_input_size and arch.image_size != config.input_size[-1]:
        arguments["img_size"] = arch.image_size
    model: Any = timm.create_model(arch.model, pretrained=False, **arguments)

    # The class gets our interface; its module stays timm's, where resampling looks for functions.
    kind = type(model)
    model.__class__ = type(
        kind.__name__, (TimmModel, kind), {"__module__": kind.__module__}
    )
    model.classifiers = classifiers(config)

    # Names are gone when the optimiser asks, so each parameter says it itself.
    undecayed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    for name, parameter in model.named_parameters():
        parameter.is_undecayed = name in undecayed
    created: TimmModel = model
    return created


def pretrained_config(name: str, *, where: str = "model.model") -> PretrainedCfg:
    """Look up a model in timm: image size, mean and std of its weights, its last layers.

    Raises UserError for names that timm does not have.
    """
    config = None
    if timm.is_model(name):
        # timm has the model, but maybe not the tag after the dot.
        with suppress(RuntimeError):
            config = get_pretrained_cfg(name)
    if config is not None:
        return config

    allowed = "timm.list_models()"
    close = nearest(name.partition(".")[0], timm.list_models())
    if close:
        allowed = f"{close}, or another of {allowed}"
    raise UserError(
        f"timm has no model {name!r}",
        where=where,
        allowed=allowed,
        next_step="correct the name",
    )


def classifiers(config: PretrainedCfg) -> tuple[str, ...]:
    # timm states one name, several, or none.
    names: Any = config.classifier
    if isinstance(names, str):
        return (names,)
    return tuple(names or ())


class _Measured(NamedTuple):
    num_parameters: int
    forward_flops: int
    """FLOPs of one image."""
    feature_width: int
    layers_above: dict[str, int] | None
    """Per parameter; None if timm does not define layers for this model."""


@cache
def _measured(arch: TimmSettings) -> _Measured:
    """Measure a model without memory. Raises UserError where timm does not build or run it."""
    try:
        with torch.device("meta"), torch.no_grad():
            # The counter's hooks follow gradients, which there are none of.
            model: Any = _create(arch).eval().requires_grad_(False)
            with FlopCounterMode(display=False) as counter:
                output = model(torch.empty(1, 3, arch.image_size, arch.image_size))
    except UserError:
        raise
    except Exception as error:  # timm's models raise any kind
        # Messages of torch go on with stacks and advice.
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UserError(
            f"timm cannot run {arch.model} on images of {arch.image_size} px ({reason})",
            where="model",
            next_step="correct model.image_size or model.arguments",
        ) from None
    if arch.num_classes and output.shape != (1, arch.num_classes):
        raise UserError(f"timm's {arch.model} is not a classifier", where="model.model")

    # timm numbers layers from the input; layer decay counts from the classifier.
    layers = None
    if hasattr(model, "group_matcher"):
        groups = group_parameters(
            model, model.group_matcher(coarse=False), reverse=True
        )
        last = max(groups.values())
        layers = {name: last - layer for name, layer in groups.items()}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return _Measured(
        num_parameters, counter.get_total_flops(), model.head_hidden_size, layers
    )


def num_parameters(arch: TimmSettings) -> int:
    return _measured(arch).num_parameters


def feature_width(arch: TimmSettings) -> int:
    """Width of the pooled features, which a head reads."""
    return _measured(arch).feature_width


def train_flops_per_image(arch: TimmSettings) -> int:
    """Model FLOPs of one training step per image: three forward passes, counted in matrix products
    and convolutions."""
    return 3 * _measured(arch).forward_flops


def decayed(name: str, parameter: Any) -> bool:
    """Apply timm's rule: weight decay acts on this parameter."""
    return (
        parameter.ndim >= 2
        and not name.endswith(".bias")
        and not getattr(parameter, "is_undecayed", False)
    )


def layers_above(name: str, arch: TimmSettings) -> int:
    """Layers from the one that holds this parameter up to the classifier, as timm divides them."""
    layers = _measured(arch).layers_above
    if layers is None:
        raise UserError(
            f"timm does not define the layers of {arch.model}",
            where="optim.layer_decay",
            next_step="set it to 1",
        )
    # What an objective adds is above all layers of timm.
    return layers.get(name, 0)


def checkpoint_activations(model: nn.Module) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]  # of timm's class
    except (AssertionError, AttributeError):
        raise UserError(
            "timm cannot recompute the activations of this model",
            where="engine.activation_checkpointing",
            next_step="set it to false",
        ) from None


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    blocks = (module for name, module in model.named_modules() if BLOCK.fullmatch(name))
    compile_each(blocks, backend=backend)


def built_by_timm(folder: Path) -> nn.Module:
    """The model of a folder that was written here, as timm builds it, in eval mode."""
    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()
