"""The model that is drawn, and its images. Unreadable ones are skipped and counted."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from finetune.images import Images, find_files, images_of_split, shard_folder
from finetune.predicting import output_names, ranked
from finetune.settings import VisualizeRun
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest
from vitscale.distributed.world import World
from vitscale.evaluation.sheet import caption, shown_size
from vitscale.evaluation.trained_model import TrainedModel

# Characters of a line above an image.
CAPTION = 46
# A side of a photograph, at least.
SHOWN_PX = 320
# A forward pass takes at most 4 images of 512 px, or 20 of 224 px.
MAX_PIXELS = 4 * 512**2
# Values of one head's attention at most, for all images of a forward pass.
MAX_ATTENTION = 1 << 22


class Visualized:
    """A trained model with everything that its pictures need."""

    def __init__(self, run: VisualizeRun, loaded: TrainedModel, world: World) -> None:
        """Raises UserError if there are no images."""
        self.run = run
        self.loaded = loaded
        self.model = loaded.for_inference(
            world, precision=run.compute.precision, num_images=0
        )
        self.skipped: list[str] = []
        """Unreadable images, each with its path and error."""
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
        # Pictures of a training are found beside its report.
        if self.run.output is not None:
            return Path(self.run.output)
        source = self.loaded.run
        folder = Path("runs/visualize")
        if source is not None:
            folder = source.folder
        return folder / "pictures"

    @property
    def network(self) -> Any:
        return self.model.network

    @property
    def num_prefix_tokens(self) -> int:
        """Of a model with tokens: those before the patches."""
        count: int = self.network.num_prefix_tokens
        return count

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of a model with tokens."""
        patch, _ = self.network.patch_embed.patch_size
        side = self.loaded.arch.image_size // patch
        return (side, side)

    @property
    def is_pooled(self) -> bool:
        """Whether no token gathers the image, as patches are averaged instead."""
        return bool(self.network.global_pool != "token")

    @property
    def attention_batch(self) -> int:
        """Images of a forward pass whose attention is read."""
        # Memory is bounded twice: by the activations, and by the matrices of attention.
        by_pixels = MAX_PIXELS // self.loaded.arch.image_size**2
        num_tokens = self.num_prefix_tokens + self.grid[0] ** 2
        by_attention = MAX_ATTENTION // num_tokens**2
        return max(1, min(self.run.compute.batch, by_pixels, by_attention))

    @cached_property
    def images(self) -> Images:
        """Open the images to draw. Raises UserError if there are none."""
        given = self.run.images
        data: dict[str, Any] = {}
        if self.loaded.run is not None:
            data = self.loaded.run.config["data"]
        elif not given:
            raise UserError(
                "a weight file does not say which images it was trained on",
                where="images",
                next_step="set images=PATH",
            )

        # Without a path the images are those of the run, where they still are.
        path = shard_folder(given or (str(data["path"]),))
        if path is None and not given:
            raise UserError(
                f"the shards that the run was trained on are not here: {data['path']}",
                where="images",
                next_step="start in the folder that has them, or set images=PATH",
            )
        if path is None and self.run.split is not None:
            raise UserError(
                "only shards have splits, and images are files",
                where=f"split={self.run.split}",
                next_step="remove split, or set images to a shard folder",
            )
        if path is None:
            return find_files(given)

        # Other shards than the run's may have other splits.
        split = self.run.split
        if not split:
            split = data.get("val_split") or "test"
            splits = tuple(read_manifest(path).splits)
            if split not in splits:
                split = splits[0]
        return images_of_split(path, split=split, remote=self.run.remote)

    @cached_property
    def drawn(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Titles, pixels as the model sees them, and photographs for people, of all sheets."""
        titles, images_B3SS = self.sheet(self.run.num_images)
        _, photos_B3PP = self.sheet(self.run.num_images, at_least=SHOWN_PX)
        return titles, images_B3SS, photos_B3PP

    def sheet(self, count: int, *, at_least: int = 1) -> tuple[list[str], torch.Tensor]:
        """Titles and pixels, uint8 [B, 3, S, S], of at most `count` images, evenly spaced.

        at_least: pixels of a side; the crop is that of the model's image size.
        Raises UserError if none of them can be read.
        """
        preprocessing = self.loaded.preprocessing
        size = shown_size(preprocessing.image_size, at_least=at_least)
        images = self.images
        samples = images.samples(preprocessing.settings(), image_size=size)
        count = min(count, images.total)
        pixels = torch.empty(count, 3, size, size, dtype=torch.uint8)

        # An image that cannot be read leaves its row to the next one.
        titles: list[str] = []
        for position in range(count):
            number = position * images.total // count
            # Remote shards are fetched for the drawn images alone.
            samples.prefetch([number])
            label, unreadable = samples.fill(number, pixels[len(titles)])
            if not unreadable:
                titles.append(self._title(number, label))
            for problem in unreadable:
                (where,) = images.names([number])
                if where != problem.shard:
                    where = f"{where} in {problem.shard}"
                self.skipped.append(f"{where}: {problem.error}")

        if not titles:
            where, error = self.skipped[0].rsplit(": ", 1)
            raise UserError(
                f"no image can be read; the first: {error}",
                where=where,
                next_step="choose other images with images=",
            )
        return titles, pixels[: len(titles)]

    def captions(
        self, titles: list[str], images_B3SS: torch.Tensor
    ) -> list[tuple[str, bool]]:
        """What stands above each image, with the prediction of a model with a head; whether it is
        wrong.

        images: of the model's size.
        """
        if self.loaded.num_classes == 0:
            return [(caption(title, width=CAPTION), False) for title in titles]

        # Files have no true class, nor has an image whose class is none of the model's.
        names, reason = output_names(self.loaded, self.images)
        has_truth = self.images.index is not None and not reason
        logits = [
            self.model.logits(batch_B3SS)
            for batch_B3SS in images_B3SS.split(self.attention_batch)
        ]
        shares_B1, columns_B1 = ranked(torch.cat(logits), self.loaded, top=1)
        found = []
        for title, share, column in zip(
            titles, shares_B1[:, 0].tolist(), columns_B1[:, 0].tolist(), strict=True
        ):
            lines = [f"{share:.0%} {names[column]}", title]
            if has_truth:
                lines[1] = f"is: {title}"
            texts = [caption(line, width=CAPTION, num_lines=2) for line in lines]
            found.append(("\n".join(texts), has_truth and names[column] != title))
        return found

    def _title(self, number: int, label: int) -> str:
        """Class, or the folder of a file in a sub-folder; else file name or number."""
        index = self.images.index
        if index is not None:
            return self.images.label_name(label) or f"{index.split} {number}"
        # People sort photographs into folders by class, but not those that they name themselves.
        folder = Path(self.images.paths[number]).absolute().parent
        roots = {Path(root).absolute() for root in self.run.images}
        if roots & {*folder.parents}:
            return folder.name
        return Path(self.images.names([number])[0]).stem
