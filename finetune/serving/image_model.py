"""Load an exported folder as a model of MLflow: images in, logits out.

MLflow imports this module by name (`loader_module`) and calls `_load_pyfunc`; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from finetune.loading.loaded_model import LoadedModel, load_model
from finetune.loading.settings import ModelRun


class ImageModel:
    """Logits of uint8 RGB images that have the model's size already."""

    def __init__(self, loaded: LoadedModel) -> None:
        how = loaded.preprocessing
        self._network = loaded.network
        self._mean, self._std = (
            torch.tensor(values).view(1, 3, 1, 1) for values in (how.mean, how.std)
        )

    @torch.no_grad()
    def predict(self, images_BHW3: Any, params: dict[str, Any] | None = None) -> np.ndarray:
        """float32 logits, one row per image. `params` is MLflow's; there are none."""
        images = torch.from_numpy(np.array(images_BHW3, dtype=np.uint8))
        images_B3HW = images.permute(0, 3, 1, 2).float() / 255
        logits: np.ndarray = self._network((images_B3HW - self._mean) / self._std).numpy()
        return logits


def _load_pyfunc(data_path: str) -> ImageModel:
    return ImageModel(load_model(ModelRun(init=data_path)))
