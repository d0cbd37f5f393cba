"""The model that is drawn, and its images. Unreadable ones are skipped and counted."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from finetune.images import Images, find_files, shard_folder
from finetune.settings import VisualizeRun
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest, read_split
from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.models.settings import ViTSettings

# Of one forward pass at most: 4 images of 512 px, or 20 of 224 px.
MAX_PIXELS = 4 * 512**2
# Values of one head's attention at most, for all images of a forward pass.
MAX_ATTENTION = 1 << 22


class Visualized:
    """A trained model with everything that its pictures need."""

    def __init__(self, run: VisualizeRun, loaded: TrainedModel, world: World) -> None:
        """Raises UserError if `images` is given and cannot be opened."""
        self.run, self.loaded, self.device = run, loaded, world.device
        self.model = loaded.for_inference(
            world, precision=run.compute.precision, num_images=0
        )
        self.skipped: list[str] = []
        """Unreadable images, each with its path and error."""
        if run.images:
            self.images  # noqa: B018  # opened before any work

    @property
    def name(self) -> str:
        """The model, in titles."""
        source = self.loaded.run
        if source is None:
            return Path(self.run.init).name
        return f"{source.folder.absolute().name}, step {source.checkpoint.step}"

    @property
    def folder(self) -> Path:
        if self.run.output is not None:
            return Path(self.run.output)
        source = self.loaded.run
        return (
            Path("runs/visualize") if source is None else source.folder
        ) / "pictures"

    @property
    def vit(self) -> ViTSettings:
        """The architecture of a model with attention."""
        assert isinstance(self.loaded.arch, ViTSettings)
        return self.loaded.arch

    @property
    def attention_batch(self) -> int:
        """Images of a forward pass whose attention is read."""
        by_pixels = MAX_PIXELS // self.loaded.arch.image_size**2
        by_attention = MAX_ATTENTION // self.vit.num_tokens**2
        return max(1, min(self.run.compute.batch, by_pixels, by_attention))

    @cached_property
    def images(self) -> Images:
        """Open the images to draw. Raises UserError if there are none."""
        run, source = self.run, self.loaded.run
        if not run.images and source is None:
            raise UserError(
                "a weight file does not say which images it was trained on",
                where="images",
                next_step="set images=PATH",
            )
        data = {} if source is None else source.config["data"]
        given = run.images or (str(data["path"]),)
        path = shard_folder(given)
        if path is None and not run.images:
            raise UserError(
                f"the shards that the run was trained on are not here: {given[0]}",
                where="images",
                next_step="start in the folder that has them, or set images=PATH",
            )
        if path is None and run.split is not None:
            raise UserError(
                "only shards have splits, and images are files",
                where=f"split={run.split}",
                next_step="remove split, or set images to a shard folder",
            )
        if path is None:
            return find_files(run.images)
        # The run's validation split, else the first one.
        splits = tuple(read_manifest(path).splits)
        wanted = data.get("val_split") or "test"
        split = run.split or (wanted if wanted in splits else splits[0])
        index = read_split(path, split=split, key="split", remote_settings=run.remote)
        return Images(index=index)

    def sheet(self, count: int) -> tuple[list[str], torch.Tensor]:
        """Titles and pixels, uint8 [B, 3, S, S], of at most `count` images, evenly spaced.

        Raises UserError if none of them can be read.
        """
        how, images = self.loaded.preprocessing, self.images
        settings = DataSettings(path="", global_batch=1, **how.data_values())
        samples = images.samples(settings, image_size=how.image_size)
        count = min(count, images.total)
        pixels = torch.empty(
            count, 3, how.image_size, how.image_size, dtype=torch.uint8
        )
        titles: list[str] = []
        for number in (place * images.total // count for place in range(count)):
            samples.prefetch([number])
            label, unreadable = samples.fill(number, pixels[len(titles)])
            if not unreadable:
                titles.append(self._title(number, label))
            for each in unreadable:
                (name,) = images.names([number])
                where = name if name == each.shard else f"{name} in {each.shard}"
                self.skipped.append(f"{where}: {each.error}")
        if not titles:
            where, error = self.skipped[0].rsplit(": ", 1)
            raise UserError(
                f"no image can be read; the first: {error}",
                where=where,
                next_step="choose other images with images=",
            )
        return titles, pixels[: len(titles)]

    def _title(self, number: int, label: int) -> str:
        """Class, or the folder of a file in a sub-folder; else file name or number."""
        index = self.images.index
        if index is not None:
            return self.images.label_name(label) or f"{index.split} {number}"
        folder = Path(self.images.paths[number]).absolute().parent
        roots = {Path(root).absolute() for root in self.run.images}
        return (
            folder.name
            if roots & {*folder.parents}
            else Path(self.images.names([number])[0]).stem
        )
