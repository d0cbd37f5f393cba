"""Export of the weights under our names, which are timm's, with the settings as JSON."""

from __future__ import annotations

from pathlib import Path

import torch

from finetune.exporting.format import Format, logits_read_back, save_weights, write_description
from finetune.loading.loaded_model import LoadedModel

WEIGHTS_NAME = "model.safetensors"


class SafetensorsFormat(Format):
    library = hub_library = "vitscale"

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        weights = {name: value.contiguous() for name, value in loaded.network.state_dict().items()}
        save_weights(weights, folder / WEIGHTS_NAME)
        write_description(loaded, folder)

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        return logits_read_back(loaded, folder / WEIGHTS_NAME, images_B3HW)

    def usage(self, loaded: LoadedModel) -> str:
        return (
            "from safetensors.torch import load_file\n"
            'weights = load_file("FOLDER/model.safetensors")'
        )
