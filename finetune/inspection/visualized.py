"""The model that is drawn, and its images. Unreadable ones are skipped and counted.

Leaves out: the pictures (`attention`, `weights`), finding and reading images (`predicting.inputs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.inspection.settings import VisualizeRun
from finetune.predicting.inputs import Files, Shards, find_files, shard_folder
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest, read_split
from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.models.settings import ViTSettings

if TYPE_CHECKING:
    pass

# Of one forward pass at most: 4 images of 512 px, or 20 of 224 px.
MAX_PIXELS = 4 * 512**2
# Values of one head's attention at most, for all images of a forward pass.
MAX_ATTENTION = 1 << 22


class Visualized:
    """A trained model with everything that its pictures need."""

    def __init__(self, run: VisualizeRun, loaded: TrainedModel, world: World) -> None:
        """Raises UserError if `images` is given and cannot be opened."""
        self.run, self.loaded, self.device = run, loaded, world.device
        self.model = loaded.for_inference(world, precision=run.compute.precision)
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
        """Where the pictures are written."""
        if self.run.output is not None:
            return Path(self.run.output)
        source = self.loaded.run
        return (Path("runs/visualize") if source is None else source.folder) / "pictures"

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
    def images(self) -> ImageReader:
        """The images to look at. Raises UserError if there are none."""
        run, how = self.run, self.loaded.preprocessing
        path = shard_folder(run.images) if run.images else self._shards_of_run()
        inputs: Files | Shards
        if path is not None:
            index = read_split(
                path, split=self._split(path), key="split", remote_settings=run.remote
            )
            inputs = Shards(index)
        elif run.split is not None:
            raise UserError(
                "only shards have splits, and images are files",
                where=f"split={run.split}",
                next_step="remove split, or set images to a shard folder",
            )
        else:
            inputs = find_files(run.images)
        settings = DataSettings(path="", global_batch=1, **how.data_values())
        return ImageReader(inputs, settings=settings, image_size=how.image_size, roots=run.images)

    def _shards_of_run(self) -> str:
        if self.loaded.run is None:
            raise UserError(
                "a weight file does not say which images it was trained on",
                where="images",
                next_step="set images=PATH",
            )
        path = str(self.loaded.run.config["data"]["path"])
        if shard_folder([path]) is None:
            raise UserError(
                f"the shards that the run was trained on are not here: {path}",
                where="images",
                next_step="start in the folder that has them, or set images=PATH",
            )
        return path

    def _split(self, path: str) -> str:
        """The split of the settings, else the run's validation split, else the first one."""
        if self.run.split is not None:
            return self.run.split
        splits = read_manifest(path).splits
        source = self.loaded.run
        wanted = (source and source.config["data"].get("val_split")) or "test"
        return wanted if wanted in splits else next(iter(splits))


# ---- images -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageBatch:
    """Images as the model's input."""

    pixels_B3SS: torch.Tensor
    """uint8, on the CPU."""
    numbers: tuple[int, ...]
    """Their numbers among all images."""
    titles: tuple[str, ...]
    """Class, or the folder of a file in a sub-folder; else file name or number."""

    def __len__(self) -> int:
        return len(self.numbers)


class ImageReader:
    """Reads images, resized as the model expects them; counts those it skips."""

    def __init__(
        self,
        inputs: Files | Shards,
        *,
        settings: DataSettings,
        image_size: int,
        roots: Sequence[str] = (),
    ) -> None:
        """roots: folders whose sub-folders are classes."""
        self.inputs = inputs
        self.skipped: dict[int, str] = {}
        """Number of each unreadable image -> where it is, and the error."""
        self._samples = inputs.samples(settings, image_size=image_size)
        self._roots = {Path(root).absolute() for root in roots}

    def spaced(self, count: int, *, batch: int) -> Iterator[ImageBatch]:
        """At most `count` readable images, evenly spaced, in batches of at most `batch`.

        An unreadable image is replaced by the next readable one before the next place.
        """
        total = self.inputs.num_images
        count = min(count, total)
        places = [place * total // count for place in range(count + 1)]
        pixels = self._empty(min(batch, count))
        taken: list[tuple[int, int]] = []
        for first, end in zip(places, places[1:], strict=False):
            self._samples.prefetch([first])
            for number in range(first, end):
                label = self._fill(number, pixels[len(taken)])
                if label is not None:
                    taken.append((number, label))
                    break
            if len(taken) == len(pixels):
                yield self._batch(pixels, taken)
                taken = []
        if taken:
            yield self._batch(pixels, taken)

    def sheet(self, count: int) -> ImageBatch:
        """`spaced` in one batch. Raises UserError if none can be read."""
        for batch in self.spaced(count, batch=count):
            return batch
        where, error = next(iter(self.skipped.values())).rsplit(": ", 1)
        raise UserError(
            f"no image can be read; the first: {error}",
            where=where,
            next_step="choose other images with images=",
        )

    def _empty(self, count: int) -> torch.Tensor:
        size = self._samples.image_size
        return torch.empty(count, 3, size, size, dtype=torch.uint8)

    def _fill(self, number: int, out_3SS: torch.Tensor) -> int | None:
        """The label; None if the image cannot be read."""
        label, unreadable = self._samples.fill(number, out_3SS)
        for each in unreadable:
            (name,) = self.inputs.names([number])
            where = name if name == each.shard else f"{name} in {each.shard}"
            self.skipped[number] = f"{where}: {each.error}"
        return None if unreadable else label

    def _batch(self, pixels: torch.Tensor, taken: Sequence[tuple[int, int]]) -> ImageBatch:
        return ImageBatch(
            pixels_B3SS=pixels[: len(taken)].clone(),
            numbers=tuple(number for number, _ in taken),
            titles=tuple(self._title(number, label) for number, label in taken),
        )

    def _title(self, number: int, label: int) -> str:
        if isinstance(self.inputs, Shards):
            return self.inputs.label_name(label) or f"{self.inputs.index.split} {number}"
        folder = Path(self.inputs.paths[number]).absolute().parent
        is_class = self._roots & {*folder.parents}
        return folder.name if is_class else Path(self.inputs.names([number])[0]).stem
