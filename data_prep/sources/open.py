"""The kinds of sources, by the name that the configuration uses."""

from __future__ import annotations

from collections.abc import Callable

from data_prep.inputs import Source
from data_prep.sources.class_tars import ClassTars
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.webdataset_tars import WebdatasetTars
from vitscale.runs.data_prep import SourceSettings

SOURCES: dict[str, Callable[[SourceSettings], Source]] = {
    "image_folder": ImageFolder,
    "class_tars": ClassTars,
    "webdataset": WebdatasetTars,
}


def open_source(settings: SourceSettings) -> Source:
    return SOURCES[settings.kind](settings)
