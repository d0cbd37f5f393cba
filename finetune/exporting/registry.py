"""The export formats by name. A new format is one file and one entry; see also `ExportRun.to`."""

from __future__ import annotations

from finetune.exporting.format import Format
from finetune.exporting.to_huggingface import HuggingFaceFormat
from finetune.exporting.to_npz import NpzFormat
from finetune.exporting.to_onnx import OnnxFormat
from finetune.exporting.to_safetensors import SafetensorsFormat
from finetune.exporting.to_timm import TimmFormat

EXPORTS: dict[str, type[Format]] = {
    "timm": TimmFormat,
    "huggingface": HuggingFaceFormat,
    "npz": NpzFormat,
    "onnx": OnnxFormat,
    "safetensors": SafetensorsFormat,
}
