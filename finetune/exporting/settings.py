"""The run type of an export. Needs no torch."""

from __future__ import annotations

from typing import Literal

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
    """Upload the folder to the MLflow run that trained the model, below exported/."""
