"""The interface of an export format, and what several of them share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file

from finetune.loading.loaded_model import LoadedModel


class Format:
    """Writes a model as files of one format, and reads them back with the library they are for."""

    library: ClassVar[str]
    """Who reads it, in words."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that write it, beyond those of every installation."""

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        """What the model has that the format cannot hold."""
        yield from ()

    def notes(self, loaded: LoadedModel) -> Iterator[str]:
        """What the reader of the files has to know, for the model card."""
        yield from ()

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        """Write all files into an empty folder."""
        raise NotImplementedError

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        """What the written model makes of normalised images; None if it cannot run here."""
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
    if positions is not None:
        weights["pos_embed"] = positions.detach().contiguous()
    return weights
