"""The export formats by name. A new format is one file and one entry; see also `ExportRun.to`."""

from __future__ import annotations

from finetune.exporting.format import Format
from finetune.exporting.to_timm import TimmFormat

EXPORTS: dict[str, type[Format]] = {
    "timm": TimmFormat,
}
