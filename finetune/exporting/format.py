"""Define the interface of an export format, and share what several formats need.

Owns: writing the description of a model, and running exported weights to compare their logits.
Leaves out: the formats themselves (`to_*`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file

from finetune.loading.loaded_model import LoadedModel
from vitscale.distributed.atomic_files import write_json
from vitscale.models.registry import MODELS
from vitscale.models.weights.exported import DESCRIPTION, FORMAT_VERSION
from vitscale.models.weights.reading import read_external_weights
from vitscale.models.weights.transfer import transfer_weights


class Format:
    """Writes a model as files of one format, and reads them back with the library they are for."""

    library: ClassVar[str]
    """Who reads it, in words."""
    hub_library: ClassVar[str]
    """The same, as the Hugging Face Hub names it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that write it, beyond those of every installation."""

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        """Yield what the model has that the format cannot hold."""
        yield from ()

    def notes(self, loaded: LoadedModel) -> Iterator[str]:
        """Yield what users of the files have to know, for the model card."""
        yield from ()

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        """Write all files into an empty folder."""
        raise NotImplementedError

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        """Logits of the written model for normalised images; None if it cannot run here."""
        raise NotImplementedError

    def usage(self, loaded: LoadedModel) -> str:
        """Python that loads the folder `FOLDER`, for the model card."""
        raise NotImplementedError


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file that others may read as far as the umask lets them."""
    save_file(weights, path, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # `save_file` lets its owner alone read it


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """All weights under timm's names, which are ours; fixed positions as learned ones."""
    weights = {name: value.contiguous() for name, value in loaded.network.state_dict().items()}
    positions = getattr(loaded.network, "pos_embed", None)
    if isinstance(positions, torch.Tensor):
        weights["pos_embed"] = positions.detach().contiguous()
    return weights


def write_description(loaded: LoadedModel, folder: Path) -> None:
    """Write vitscale.json, because the weights do not say which model they belong to."""
    description = {
        "format_version": FORMAT_VERSION,
        "model": loaded.settings.model_dump(mode="json"),
        "num_classes": loaded.num_classes,
        "grid": loaded.arch.grid,
        "preprocessing": asdict(loaded.preprocessing),
        "classes": loaded.classes,
    }
    write_json(folder / DESCRIPTION, description)


def logits_read_back(loaded: LoadedModel, path: Path, images_B3HW: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model with these weights, which are read as `init=` reads them."""
    arch = loaded.arch
    external = read_external_weights(path, grid=arch.grid, model=loaded.settings)
    network = MODELS[arch.name].load().build_model(loaded.settings, arch, seed=1).eval()
    transfer_weights(
        network,
        weights=external.weights,
        source_grid=arch.grid,
        target_grid=arch.grid,
        num_prefix_tokens=arch.num_prefix_tokens,
        convention="google",
        where=str(path),
        keep_head=True,
    )
    logits: torch.Tensor = network(images_B3HW)
    return logits
