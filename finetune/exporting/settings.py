"""The run type of an export. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from finetune.loading.settings import ModelRun


class ExportRun(ModelRun):
    """trained model -> a folder that another library loads."""

    stage: Literal["export"] = "export"
    """Which script runs this file: finetune/export.py."""
    to: Literal["timm", "huggingface", "npz", "onnx", "safetensors"]
    """timm: timm.create_model and transformers' Auto classes. huggingface: transformers' own ViT.
    npz: Google's names. onnx: a graph with any batch size. safetensors: vitscale's names."""
    output: str
    """Folder to write: a new one, or an empty one."""
    mlflow: bool = False
    """Log the folder as a model of the MLflow run that trained it, with its signature; safetensors
    only. mlflow.pyfunc.load_model loads it without this project."""
    register_as: str | None = Field(default=None, min_length=1)
    """Name in MLflow's registry of which the logged model becomes a new version; needs mlflow."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.mlflow and self.to != "safetensors":
            yield ("mlflow", f"is for to=safetensors, not {self.to}; change one of them")
        if self.register_as is not None and not self.mlflow:
            yield ("register_as", "needs mlflow=true; set it, or remove register_as")
