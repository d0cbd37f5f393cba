"""The kinds of source, by name.

Owns: which module lists which `source.kind`.
Leaves out: listing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from data_prep.sources.class_tars import ClassTars
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.parquet_images import ParquetImages
from data_prep.sources.path_table import PathTable
from data_prep.sources.protocol import Source
from data_prep.sources.webdataset_tars import WebdatasetTars
from vitscale.runs.data_prep import LabelSettings, SourceSettings

# Where the class of an image comes from changes what a missing label means.
SOURCES: dict[str, Callable[[SourceSettings, LabelSettings], Source]] = {
    "image_folder": lambda source, labels: ImageFolder(source),
    "class_tars": lambda source, labels: ClassTars(source),
    "webdataset": WebdatasetTars,
    "parquet": ParquetImages,
    "path_table": PathTable,
}


def open_source(settings: SourceSettings, labels: LabelSettings | None = None) -> Source:
    """The source of a run. Nothing is read before its `containers` are asked for."""
    return SOURCES[settings.kind](settings, labels or LabelSettings())
