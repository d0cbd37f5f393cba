"""Define the interface of an export format, and share what several formats need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save

from vitscale.distributed.atomic_files import write_bytes, write_json
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.models.weights.names import FUSED, Tensors
from vitscale.models.weights.reading import DESCRIPTION, FORMAT_VERSION

# Python that opens a photograph as `predict` does. With convert("RGB") alone, Pillow would show
# the hidden colours of transparent pixels, and lay a photograph of a telephone on its side.
PHOTO = """\
# Upright, and white where it is transparent.
image = ImageOps.exif_transpose(Image.open("PHOTO.jpg")).convert("RGBA")
white = Image.new("RGBA", image.size, "white")
image = Image.alpha_composite(white, image).convert("RGB")
"""


def in_vitscale(model: TrainedModel) -> str:
    """Python that loads the folder with vitscale and applies it to a photograph."""
    apply = 'print(model(model.preprocess(image)[None], output="features"))'
    if model.num_classes:
        apply = (
            "logits = model(model.preprocess(image)[None])\n"
            "print(model.classes[logits.argmax()], logits.softmax(1).max())"
        )
    return (
        "import vitscale\nfrom PIL import Image\n"
        'model = vitscale.load_model("FOLDER")\n'
        f'image = Image.open("PHOTO.jpg")\n{apply}'
    )


class Format:
    """Writes a model as files of one format, and reads them back with the library they are for."""

    library: ClassVar[str]
    """The library that reads the format."""
    hub_library: ClassVar[str]
    """The same, as the Hugging Face Hub names it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that write it, beyond those of every installation."""

    def unlike(self, model: TrainedModel) -> dict[str, bool]:
        """Feature that the format cannot express -> True if the model has it."""
        return {}

    def notes(self, model: TrainedModel) -> Iterator[str]:
        """Yield what users of the files have to know, for the model card."""
        yield from ()

    def write(self, model: TrainedModel, folder: Path) -> None:
        """Write all files into an empty folder."""
        raise NotImplementedError

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the written model for normalised images, by `library`, which is installed."""
        raise NotImplementedError

    def usage(self, model: TrainedModel) -> str:
        """Python that applies the folder `FOLDER` to `PHOTO.jpg`, for the model card."""
        raise NotImplementedError


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; `save_file` would let its owner alone read it."""
    # Safetensors has no strides, so a transposed view must be copied first.
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    write_bytes(path, save(contiguous, metadata={"format": "pt"}))


def weights_of(model: TrainedModel) -> dict[str, torch.Tensor]:
    """All weights under timm's names, which are ours; fixed positions as learned ones."""
    weights = dict(model.network.state_dict())
    # Other libraries compute no positions, and a buffer is not in the state.
    positions = getattr(model.network, "pos_embed", None)
    if isinstance(positions, torch.Tensor):
        weights["pos_embed"] = positions.detach()
    return weights


def write_description(model: TrainedModel, folder: Path) -> None:
    """Write vitscale.json, because the weights do not say which model they belong to."""
    description = {
        "format_version": FORMAT_VERSION,
        "model": model.arch.model_dump(mode="json", exclude={"num_classes"}),
        "num_classes": model.num_classes,
        "grid": model.arch.grid,
        "preprocessing": asdict(model.preprocessing),
        "classes": model.classes,
        "independent": model.independent,
    }
    write_json(folder / DESCRIPTION, description)


def split(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Queries, keys and values as tensors of their own; the inverse of `joined`."""
    # Other libraries name the three matrices that timm keeps as one.
    single = dict(weights)
    for where, parts, fused in FUSED:
        pattern = re.compile(rf"({where})\.{fused}\.(weight|bias)")
        for match in filter(None, map(pattern.fullmatch, weights)):
            chunks = single.pop(match[0]).chunk(len(parts))
            for part, values in zip(parts, chunks, strict=True):
                single[f"{match[1]}.{part}.{match[2]}"] = values.contiguous()
    return single
