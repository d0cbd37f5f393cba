"""Build any model of timm with the weights of a local file.

Owns: names, files and their misfits. Nothing is downloaded, and no file runs code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitscale.config.errors import UserError, nearest
from vitscale.models.weights.reading import (
    MAX_BYTES,
    READERS,
    is_weight_file,
    read_external_weights,
)
from vitscale.models.weights.transfer import refuse_misfits

TORCH_FILES = (".pth", ".pt", ".bin", ".tar")
# Where training scripts put the weights; DeiT and MAE: `model`, timm: `state_dict`.
WEIGHT_KEYS = ("model", "state_dict")
# Counters of BatchNorm, which evaluation does not read; some files lack them.
COUNTER = "num_batches_tracked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """What a model sees: square images, normalised by (x / 255 - mean) / std."""

    image_size: int
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
    if path.suffix in TORCH_FILES:
        return _read_torch_file(path)
    raise UserError(
        f"{path.suffix or 'a name without suffix'} is no kind of weight file",
        where=str(path),
        allowed=", ".join((*READERS, *TORCH_FILES)),
        next_step="set objective.teacher.weights to such a file",
    )


def _read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file of `torch.save`, in fp32; other objects are refused, not created."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"is larger than {MAX_BYTES:,} bytes", where=str(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"is damaged or holds more than tensors ({reason})",
            where=str(path),
            next_step="save the weights alone, best as .safetensors",
        ) from None
    for key in WEIGHT_KEYS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not (isinstance(found, dict) and found):
        raise UserError("holds no tensors by name", where=str(path))
    odd = [key for key, value in found.items() if not isinstance(value, torch.Tensor)]
    if odd:
        what = f"{odd[0]!r} is no tensor"
        keys = " or ".join(WEIGHT_KEYS)
        raise UserError(what, where=str(path), allowed=f"tensors by name, also below {keys}")
    return {str(key): value.float() for key, value in found.items()}


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
