"""Build any model of timm with the weights of a local file.

Owns: names, files and their misfits. Nothing is downloaded, and no file runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitscale.config.errors import UserError, nearest
from vitscale.images.size import ImageSize
from vitscale.models.weights.files.suffixes import SUFFIXES
from vitscale.models.weights.reading import (
    is_weight_file,
    read_external_weights,
)
from vitscale.models.weights.transfer import refuse_misfits

# Counters of BatchNorm, which evaluation does not read; some files lack them.
COUNTER = "num_batches_tracked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """What a model sees: images, normalised by (x / 255 - mean) / std."""

    image_size: ImageSize
    mean: tuple[float, ...]
    std: tuple[float, ...]


def build_timm_model(name: str, path: Path, *, num_classes: int) -> tuple[nn.Module, Pixels]:
    """The model on the CPU in fp32, and the pixels that timm's own weights of it expect.

    Raises UserError for an unknown name, a file that is missing, untrusted or of another model,
    and another number of classes.
    """
    if not timm.is_model(name):
        known = timm.list_models()
        close = nearest(name.partition(".")[0], known)
        raise UserError(
            f"timm has no model {name!r}",
            where="objective.teacher.model",
            allowed=f"{close}, or another of timm.list_models()" if close else "timm.list_models()",
            next_step="correct the name",
        )
    given = _weights(path)
    model: Any = timm.create_model(name, pretrained=False, num_classes=num_classes)
    config: Mapping[str, Any] = model.pretrained_cfg
    own = model.state_dict()
    _check_classes(own, given, classifier=config.get("classifier"), path=path)
    own, given = (
        {key: tensor for key, tensor in tensors.items() if not key.endswith(COUNTER)}
        for tensors in (own, given)
    )
    refuse_misfits(own, given, where=str(path), next_step=f"give weights of timm's {name}")
    model.load_state_dict(given, strict=False)
    pixels = Pixels(
        image_size=config["input_size"][-1], mean=tuple(config["mean"]), std=tuple(config["std"])
    )
    return model, pixels


def _weights(path: Path) -> dict[str, torch.Tensor]:
    if is_weight_file(str(path)):
        return read_external_weights(path, grid=(1, 1)).weights  # no positions are resized
    raise UserError(
        f"{path.suffix or 'a name without suffix'} is no kind of weight file",
        where=str(path),
        allowed=", ".join(SUFFIXES),
        next_step="set objective.teacher.weights to such a file",
    )


def _check_classes(
    own: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    *,
    classifier: str | tuple[str, ...] | None,
    path: Path,
) -> None:
    """Before the table of misfits: the usual mistake, in one sentence."""
    names = (classifier,) if isinstance(classifier, str) else classifier or ()
    for key in (f"{name}.weight" for name in names):
        if key in own and key in given and len(own[key]) != len(given[key]):
            raise UserError(
                f"the teacher predicts {len(given[key])} classes, but the label map has "
                f"{len(own[key])}",
                where=str(path),
                next_step="take a teacher of the same classes, or train one on these shards",
            )
