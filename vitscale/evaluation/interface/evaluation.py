"""The interface of an evaluation, and the model and splits it is given.

Needs no torch when imported, and neither may a file with an evaluation: settings are validated on
machines without torch. Import torch inside the methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from vitscale.config.errors import UserError
from vitscale.config.section import NamedSection
from vitscale.data.settings import DataSettings
from vitscale.evaluation.features.rows import Features
from vitscale.evaluation.features.store import FeatureStore

if TYPE_CHECKING:
    import torch

    from vitscale.data.index import SplitIndex
    from vitscale.distributed.world import World

# Folder of the evaluations' files in that of a run or of results.
FILES = "evaluation"
NORMAL_QUANTILE_975 = 1.959963984540054
Output = Literal["logits", "features", "representation", "blocks"]
"""representation: what the last layer sees, after a representation layer."""


class EvaluationSettingsBase(NamedSection):
    every_steps: int | None = Field(default=None, gt=0)
    """Steps between two evaluations; null: after the last step only."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of its metrics, without `val/`."""

    def metric_names(self) -> tuple[str, ...]:
        """`metrics`, and those that depend on the settings."""
        return self.metrics


class Outputs(NamedTuple):
    """What a model makes of one batch of this rank."""

    values_BX: torch.Tensor
    """fp32: logits [B, classes], or features [B, width]."""
    labels_B: torch.Tensor
    weights_B: torch.Tensor
    """0 for padding, else 1."""
    samples_B: np.ndarray
    """int64: number of each image in its split."""
    heads_2BC: torch.Tensor | None = None
    """Beside logits: those of the class and of the distillation head, if the model has both."""


class Model(Protocol):
    """What evaluations read a model through: `Engine` in training, `InferenceModel` outside.

    Images [B, 3, S, S] are on the device, uint8 or float 0..255. Every method is collective where
    the model is sharded over ranks.
    """

    @property
    def world(self) -> World: ...

    def logits(self, images_B3SS: torch.Tensor, /) -> torch.Tensor:
        """[B, classes]"""
        ...

    def features(self, images_B3SS: torch.Tensor, /) -> torch.Tensor:
        """[B, width], what the head sees."""
        ...

    def heads(self, images_B3SS: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the class and of the distillation head."""
        ...

    def forward(self, images_B3SS: torch.Tensor, output: str, /) -> Any:
        """Another output, by name."""
        ...

    @property
    def known_outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and the splits it is evaluated on."""

    model: Model
    train: tuple[SplitIndex, ...]
    """The parts of the training set."""
    val: SplitIndex
    data: DataSettings
    image_size: int
    micro_batch: int
    num_outputs: int = 0
    """Length of the logits; 0: the model has no head."""
    classes: tuple[str, ...] | None = None
    """Name of each output of the head; None where they are unknown."""
    folder: Path | None = None
    """Where rank 0 puts the files of the evaluations; None: they write none."""
    features: FeatureStore = field(default_factory=FeatureStore)
    """What the evaluations share."""

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Let rank 0 call `write` with the path of a file in `folder`, if there is one. Collective.

        Raises UserError on every rank when that fails.
        """
        from vitscale.distributed.atomic_files import make_folders
        from vitscale.distributed.world import agree_no_error

        if self.folder is None:
            return
        error = None
        if self.model.world.is_first:
            try:
                make_folders(self.folder)
                write(self.folder / name)
            except OSError as caught:
                error = f"{self.folder / name}: cannot be written ({caught.strerror})"
            except UserError as caught:
                error = caught.text()
        agree_no_error(error)

    def outputs(
        self, index: SplitIndex, output: Output, *, samples: np.ndarray | None = None
    ) -> Iterator[Outputs]:
        """The model's output for every sample of `index`, or for those in `samples`, in order.

        Sharded over ranks: every rank gets equally many batches of `micro_batch`, the last ones
        padded. Collective; the caller sets the model to eval.
        """
        import torch

        from vitscale.data.loader import evaluation_batches

        world, model = self.model.world, self.model
        forward = {"logits": model.logits, "features": model.features}.get(
            output, lambda images: model.forward(images, output)
        )
        has_two_heads = output == "logits" and "heads" in model.known_outputs
        batches = evaluation_batches(
            index,
            settings=self.data,
            image_size=self.image_size,
            rank=world.rank,
            world_size=world.world_size,
            micro_batch=self.micro_batch,
            pin_memory=world.device.type == "cuda",
            samples=samples,
        )
        # Closed on errors too: exit would wait for workers that are left.
        with closing(batches), torch.no_grad():
            for cpu_batch in batches:
                assert cpu_batch.positions is not None
                batch = cpu_batch.to(world.device)
                heads_2BC = None
                if has_two_heads:
                    heads_2BC = torch.stack(model.heads(batch.images)).float()
                    values_BX = heads_2BC.mean(dim=0)
                else:
                    values_BX = forward(batch.images).float()
                yield Outputs(
                    values_BX, batch.labels, batch.weights, cpu_batch.positions, heads_2BC
                )

    @property
    def num_train(self) -> int:
        """Training images of all parts."""
        return sum(part.num_samples for part in self.train)

    def train_features(
        self, *, output: Output = "features", samples: np.ndarray | None = None
    ) -> Features:
        """Of the training images that `samples` (increasing) numbers over all parts, or of all.

        Extracted once, whichever evaluation asks first. Collective.
        """
        chosen = np.arange(self.num_train) if samples is None else samples
        return self._features(self.train, chosen, output)

    def val_features(self, *, output: Output = "features") -> Features:
        """Of every validation image. Collective."""
        return self._features((self.val,), np.arange(self.val.num_samples), output)

    def _features(
        self, parts: tuple[SplitIndex, ...], chosen: np.ndarray, output: Output
    ) -> Features:
        import torch

        if output == "representation" and output not in self.model.known_outputs:
            output = "features"
        numbers, values, labels, first = [], [], [], 0
        for part in parts:
            samples = chosen[(chosen >= first) & (chosen < first + part.num_samples)] - first
            if len(samples):
                own, rows_ND = self.features.rows(
                    part,
                    samples,
                    output=output,
                    world=self.model.world,
                    extract=partial(self._values, part, output),
                )
                numbers.append(own + first)
                values.append(rows_ND)
                labels.append(torch.from_numpy(part.label[own].astype(np.int64)))
            first += part.num_samples
        return Features(
            samples=np.concatenate(numbers),
            values_ND=torch.cat(values),
            labels_N=torch.cat(labels),
        )

    def _values(
        self, index: SplitIndex, output: Output, samples: np.ndarray
    ) -> Iterator[torch.Tensor]:
        for outputs in self.outputs(index, output, samples=samples):
            yield outputs.values_BX


class Share(float):
    """A share of `images`, for example those that are classified right. Tables add its interval."""

    images: int

    def __new__(cls, count: float, images: float) -> Share:
        """NaN of no images."""
        share = super().__new__(cls, count / images if images else math.nan)
        share.images = round(images)
        return share

    def interval(self) -> tuple[float, float]:
        """Where the share of an unlimited set is with a confidence of 95 %.

        Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
        """
        z, n = NORMAL_QUANTILE_975, self.images
        if not n:
            return math.nan, math.nan
        middle = (self + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(self * (1 - self) / n + z**2 / (4 * n**2))
        return max(0.0, middle - half), min(1.0, middle + half)


class Evaluation:
    """Metrics of a model on the validation split. A subclass defines `metrics`."""

    Settings: ClassVar[type[EvaluationSettingsBase]]
    needs: ClassVar[Output]
    """The output of the model that the evaluation reads."""

    def __init__(self, settings: Any) -> None:
        """settings: an instance of `Settings`."""
        self.settings = settings

    def check(self, subject: Subject) -> None:
        """Raise UserError where the model and the split do not suit the evaluation.

        Called before any evaluation runs.
        """

    def metrics(self, subject: Subject) -> dict[str, float]:
        """Metrics by name, without the prefix `val/`. Collective; equal on every rank."""
        raise NotImplementedError
