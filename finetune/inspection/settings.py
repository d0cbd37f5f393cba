"""The run type of looking inside a model. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune.loading.settings import ModelRun
from vitscale.data.settings import RemoteSettings
from vitscale.data.storage import is_url, url_problem

# Needs images, or the weights alone.
PICTURES = {
    "patch_filters": False,
    "position_similarity": False,
    "attention_distance": True,
    "attention_rollout": True,
}
if TYPE_CHECKING:
    PictureName = str
else:
    PictureName = Literal[tuple(PICTURES)]


class VisualizeRun(ModelRun):
    """trained model -> pictures of what it has learned."""

    stage: Literal["visualize"] = "visualize"
    """Which script runs this file: finetune/visualize.py."""
    output: str | None = None
    """Folder of the pictures; null: pictures/ in the run folder that `init` is in, else
    runs/visualize/pictures."""
    pictures: tuple[PictureName, ...] = Field(default=(), strict=False)
    """The pictures to draw; empty: all that the model has."""
    images: tuple[str, ...] = Field(default=(), strict=False)
    """Image files and folders of images, or one shard folder or its URL. Empty: the shards that the
    run was trained on."""
    split: str | None = None
    """Split of the shards that `images` are taken from; null: the run's validation split."""
    num_images: int = Field(default=8, gt=0, le=32)
    """Images in a sheet, evenly spaced over `images`."""
    remote: RemoteSettings = RemoteSettings()
    mlflow: bool = True
    """Upload the pictures to the MLflow run of the run folder that `init` is in."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        for path in self.images:
            problem = url_problem(path) if is_url(path) else None
            if problem is not None:
                yield ("images", problem)
