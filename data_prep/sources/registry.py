"""List the kinds of source.

A new kind is one module, one line in SOURCES, and its name in SourceKind (vitscale/runs/data_prep).
"""

from __future__ import annotations

from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.protocol import Source
from data_prep.sources.tables import ParquetImages, PathTable
from data_prep.sources.tars import ClassTars, WebDataset
from vitscale.runs.data_prep import LabelSettings, SourceKind, SourceSettings

SOURCES: dict[SourceKind, type[Source]] = {
    "image_folder": ImageFolder,
    "class_tars": ClassTars,
    "webdataset": WebDataset,
    "parquet": ParquetImages,
    "path_table": PathTable,
}


def open_source(settings: SourceSettings, labels: LabelSettings) -> Source:
    """The source that the settings name. Reads nothing before `containers` is called."""
    return SOURCES[settings.kind](settings, labels)
