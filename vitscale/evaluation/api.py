"""The Python API of `import vitscale`: trained models, and shards as a torch dataset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import PositiveInt, ValidationError
from torch import nn
from torch.utils.data import Dataset

from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import Source, explain
from vitscale.config.section import Run
from vitscale.data.index import read_split
from vitscale.data.samples import unreadable_error, unreadable_sample
from vitscale.data.settings import RemoteSettings
from vitscale.engine.device_batches import Normalization
from vitscale.evaluation.samples import EvaluationResize
from vitscale.evaluation.trained_model import Preprocessing, open_model
from vitscale.images.crops import Decoder
from vitscale.images.plain import rgb_pixels
from vitscale.models.registry import ModelSettings


class Preprocess:
    """The preprocessing of a model's evaluations, as a transform of one image. Can be pickled."""

    def __init__(self, pixels: Preprocessing) -> None:
        self.image_size = pixels.image_size
        self._resize = EvaluationResize(pixels.settings(), image_size=pixels.image_size)
        self._normalize = Normalization(
            mean=pixels.mean, std=pixels.std, device=torch.device("cpu")
        )

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Any Pillow image -> fp32 [3, S, S]: upright, over white, resized, cropped, normalised."""
        # The same code as in evaluations, so that a prediction here is the one of the table.
        resized = torch.empty(3, self.image_size, self.image_size, dtype=torch.uint8)
        self._resize(b"", resized, pixels_HW3=torch.from_numpy(rgb_pixels(image)))
        return self._normalize(resized)


class Model(nn.Module):
    """A trained network on the CPU in fp32, in eval mode, with what is needed to use it.

    Attributes:
        network (nn.Module): The network itself; its parameters can be trained.
        preprocess (Preprocess): From a Pillow image to one input.
        classes (tuple[str, ...]): Name of each class by label; `class 0`, ... where unknown,
            empty without a head.
    """

    def __init__(
        self, network: nn.Module, *, preprocess: Preprocess, classes: tuple[str, ...]
    ):
        super().__init__()
        self.network = network
        self.preprocess = preprocess
        self.classes = classes

    def forward(
        self, images_B3SS: torch.Tensor, *, output: str = "logits"
    ) -> torch.Tensor:
        """Preprocessed images [B, 3, S, S] -> logits [B, classes], or features [B, width]."""
        known: Any = self.network.known_outputs
        if output not in known:
            raise UserError(
                f"there is no {output!r}", where="output", allowed=", ".join(known)
            )

        # A network without positions would take any size, and predict worse without a word.
        side = self.preprocess.image_size
        if images_B3SS.shape[1:] != (3, side, side):
            raise UserError(
                f"a tensor of shape {list(images_B3SS.shape)}",
                where="images",
                allowed=f"[batch, 3, {side}, {side}], of images from model.preprocess",
            )
        values_BX: torch.Tensor = self.network(images_B3SS, output=output)
        return values_BX


class _Arguments(Run):
    weights: Literal["auto", "model", "ema"]
    model: ModelSettings | None
    image_size: PositiveInt | None


def load_model(
    init: str | Path,
    *,
    weights: Literal["auto", "model", "ema"] = "auto",
    model: Mapping[str, Any] | None = None,
    image_size: int | None = None,
) -> Model:
    """Load a model as `vitscale predict init=...` does; warn of what is assumed about a file.

    Args:
        init: A run folder, a checkpoint folder, a file of weights (.npz, .safetensors, .pth), a
            folder of vitscale's exports, Hugging Face or timm, or hf://OWNER/NAME[@REVISION].
        weights: Of a run: the weights themselves (model) or their average (ema); auto: the
            average, unless there is none or more than 1 % of it is the random start.
        model: Keys of the section `model` that a file does not tell, such as num_heads.
        image_size: Apply the model at another image size; None: its own.

    Raises:
        ValueError: Nothing there is a model, or it does not fit.
    """
    # The arguments have the rules of the same settings, and their messages.
    given = {
        "weights": weights,
        "model": model and dict(model),
        "image_size": image_size,
    }
    try:
        arguments = _Arguments.model_validate(given)
    except ValidationError as error:
        raise UserErrors(
            explain(error, _Arguments, Source(given, {(): "load_model"}))
        ) from None

    opened = open_model(
        str(init), weights=weights, model=arguments.model, image_size=image_size
    )
    # A command prints the source; in a notebook nobody would see what was assumed.
    if "; assumed " in opened.source:
        warnings.warn(opened.source, stacklevel=2)
    return Model(
        opened.network,
        preprocess=Preprocess(opened.preprocessing),
        classes=opened.class_names,
    )


class ShardDataset(Dataset[tuple[Any, int]]):
    """The images and labels of one split, in stored order, for a DataLoader of torch.

    `dataset[i]` is (image, label): an RGB Pillow image as stored, or what `transform` makes of it;
    the label is a position in `classes`, -1 in shards without labels.

    Args:
        path: The shard folder, or its URL.
        split: Which part of it.
        transform: Called with each image, such as `load_model(...).preprocess`.
        cache_path: Local folder for shards at a URL, which need one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        split: str = "train",
        transform: Callable[[Image.Image], Any] | None = None,
        cache_path: str | None = None,
    ) -> None:
        remote = RemoteSettings(cache_path=cache_path)
        self._index = read_split(path, split=split, key="split", remote_settings=remote)
        self.transform = transform

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class by label; empty in shards without labels."""
        return self._index.classes

    def __len__(self) -> int:
        return self._index.num_samples

    def __getitem__(self, number: int) -> tuple[Any, int]:
        place = self._index.locate(number)
        try:
            pixels_HW3 = Decoder().whole(self._index.read(place))
        except UserError:
            # Outages and wrong settings have an error of their own, which names the cause.
            raise
        except (OSError, ValueError) as error:
            raise unreadable_error(
                self._index,
                unreadable_sample(self._index, number, error),
                next_step="check the storage; vitscale prepare verify names every damaged shard",
            ) from None
        # Transforms of torchvision take Pillow images, not arrays.
        image: Any = Image.fromarray(pixels_HW3.numpy())
        if self.transform:
            image = self.transform(image)
        return image, place.label
