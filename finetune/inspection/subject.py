"""What is looked at: a model and its images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.inference.prediction.inputs import Files, Shards, find_files
from finetune.inspection.images import ImageReader
from finetune.inspection.settings import VisualizeRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.config.errors import UserError
from vitscale.data.index import MANIFEST_NAME, read_manifest, read_split
from vitscale.data.settings import DataSettings
from vitscale.data.urls import is_url
from vitscale.distributed.world import World
from vitscale.models.vit.architecture import ViTArchitecture

# Of one forward pass at most: 4 images of 512 px, or 20 of 224 px.
MAX_PIXELS = 4 * 512**2
# Values of one head's attention at most, for all images of a forward pass.
MAX_ATTENTION = 1 << 22


class Inspected:
    """A trained model with everything that its pictures need."""

    def __init__(self, run: VisualizeRun, loaded: LoadedModel, world: World) -> None:
        """Raises UserError if `images` is given and cannot be opened."""
        self.run, self.loaded = run, loaded
        self.model = loaded.for_inference(world, precision=run.compute.precision)
        self.device = world.device
        if run.images:
            self.images  # noqa: B018  # opened before any work

    @property
    def name(self) -> str:
        """The model, in titles."""
        trained = self.loaded.trained
        if trained is None:
            return Path(self.run.init).name
        return f"{trained.run_folder.absolute().name}, step {self.loaded.step}"

    @property
    def batch(self) -> int:
        """Images of one forward pass."""
        pixels = self.loaded.arch.image_size**2
        return min(self.run.compute.batch, max(1, MAX_PIXELS // pixels))

    @property
    def attention_batch(self) -> int:
        """Images of a forward pass whose attention is read."""
        return min(self.batch, max(1, MAX_ATTENTION // self._vit.num_tokens**2))

    @property
    def patch_grid(self) -> tuple[tuple[int, int], int]:
        """Rows and columns of patches, and the pixels a side of each; of transformers only."""
        arch = self._vit
        return arch.grid, arch.patch_size

    @property
    def is_pooled(self) -> bool:
        """Whether the output is the mean of the patches instead of the class token."""
        return self._vit.pool != "cls"

    @property
    def _vit(self) -> ViTArchitecture:
        arch = self.loaded.arch
        assert isinstance(arch, ViTArchitecture)
        return arch

    @property
    def folder(self) -> Path:
        """Where the pictures are written."""
        if self.run.output is not None:
            return Path(self.run.output)
        trained = self.loaded.trained
        run_folder = Path("runs", self.run.name) if trained is None else trained.run_folder
        return run_folder / "pictures"

    @cached_property
    def images(self) -> ImageReader:
        """The images to look at. Raises UserError if there are none."""
        run = self.run
        if not run.images:
            return self._reader(self._split(self._shards_of_run(), run.split))
        if (path := self._given_shards()) is not None:
            return self._reader(self._split(path, run.split))
        if run.split is not None:
            raise UserError(
                "only shards have splits, and images are files",
                where=f"split={run.split}",
                next_step="remove split, or set images to a shard folder",
            )
        return self._reader(find_files(run.images), roots=run.images)

    def _given_shards(self) -> str | None:
        """The shard folder that `images` is; None if it is files. Raises UserError for both."""
        images = self.run.images
        shards = [path for path in images if _is_shards(path)]
        if shards and len(images) > 1:
            raise UserError(
                f"{shards[0]!r} is a shard folder, and {len(images)} inputs are given",
                where="images",
                allowed="image files and folders of images, or one shard folder",
            )
        return shards[0] if shards else None

    def _shards_of_run(self) -> str:
        trained = self.loaded.trained
        if trained is None:
            raise UserError(
                "a weight file does not say which images it was trained on",
                where="images",
                next_step="set images=PATH",
            )
        path = str(trained.config["data"]["path"])
        if not _is_shards(path):
            raise UserError(
                f"the shards that the run was trained on are not here: {path}",
                where="images",
                next_step="start in the folder that has them, or set images=PATH",
            )
        return path

    def _split(self, path: str, split: str | None) -> Shards:
        remote = self.run.remote
        if split is None:
            splits = read_manifest(path).splits
            trained = self.loaded.trained
            data: Any = {} if trained is None else trained.config["data"]
            wanted = data.get("val_split") or "test"
            split = wanted if wanted in splits else next(iter(splits))
        return Shards(read_split(path, split=split, key="split", remote_settings=remote))

    def _reader(self, inputs: Files | Shards, *, roots: Sequence[str] = ()) -> ImageReader:
        preprocessing = self.loaded.preprocessing
        settings = DataSettings(path="", global_batch=1, **preprocessing.data_values())
        return ImageReader(
            inputs, settings=settings, image_size=preprocessing.image_size, roots=roots
        )


def _is_shards(path: str) -> bool:
    return is_url(path) or (Path(path) / MANIFEST_NAME).is_file()
