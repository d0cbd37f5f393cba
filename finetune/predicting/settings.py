"""The run type of predictions. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from finetune.loading.settings import ModelRun
from vitscale.data.settings import RemoteSettings

TABLES = (".csv", ".parquet")


class PredictRun(ModelRun):
    """trained model and images -> the most probable classes of each image."""

    stage: Literal["predict"] = "predict"
    """Which script runs this file: finetune/predict.py."""
    images: tuple[str, ...] = Field(min_length=1, strict=False)
    """Image files and folders of images; or one shard folder, or its URL."""
    top: int = Field(default=5, gt=0)
    """Classes of each image, the most probable first."""
    output: str | None = None
    """Table to write, .csv or .parquet; replaced if it exists. null: print, for few images."""
    split: str = "test"
    """Split of the shard folder."""
    num_workers: int = Field(default=2, ge=0)
    """Processes per rank that decode images."""
    remote: RemoteSettings = RemoteSettings()

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.output is not None and not self.output.endswith(TABLES):
            yield ("output", f"{self.output!r} does not end in {' or '.join(TABLES)}")
