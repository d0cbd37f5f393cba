"""Folders that timm loads: weights and a config.json."""

from __future__ import annotations

from pathlib import Path

import timm
from torch import nn


def read_timm_folder(folder: Path) -> nn.Module:
    """The model of a folder that was written here, in eval mode. Downloads nothing."""
    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()
