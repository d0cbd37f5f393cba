"""Write vitscale.json beside weights that do not say which model they are of."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from finetune.loading.loaded_model import LoadedModel
from vitscale.distributed.atomic_files import write_json
from vitscale.models.weights.folders.exported import DESCRIPTION, Description


def write_description(loaded: LoadedModel, folder: Path) -> None:
    description = Description(
        model=loaded.settings.model_dump(mode="json"),
        num_classes=loaded.num_classes,
        grid=loaded.arch.grid,
        preprocessing=asdict(loaded.preprocessing),
        classes=loaded.classes,
    )
    write_json(folder / DESCRIPTION, description.as_json())
