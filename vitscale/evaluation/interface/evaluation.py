"""The interface of an evaluation, and the model and splits it is given.

Needs no torch when imported, and neither may a file with an evaluation: settings are validated on
machines without torch. Import torch inside the methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field

from vitscale.config.section import NamedSection
from vitscale.data.settings import DataSettings

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vitscale.data.index import SplitIndex
    from vitscale.distributed.world import World

Output = Literal["logits", "features", "heads"]


class EvaluationSettingsBase(NamedSection):
    every_steps: int | None = Field(default=None, gt=0)
    """Steps between two evaluations; null: after the last step only."""


class Outputs(NamedTuple):
    """What a model makes of one batch of this rank."""

    values_BX: torch.Tensor
    """fp32: logits [B, classes], features [B, width], or heads [2, B, classes]: the logits of the
    class and of the distillation head."""
    labels_B: torch.Tensor
    weights_B: torch.Tensor
    """0 for padding, else 1."""


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

    def outputs(
        self, index: SplitIndex, output: Output, *, samples: np.ndarray | None = None
    ) -> Iterator[Outputs]:
        """The model's output for every sample of `index`, or for those in `samples`, in order.

        Sharded over ranks: every rank gets equally many batches of `micro_batch`, the last ones
        padded. Collective; the caller sets the model to eval.
        """
        import torch

        from vitscale.data.loader import evaluation_batches

        world = self.model.world
        forward = {
            "logits": self.model.logits,
            "features": self.model.features,
            "heads": lambda images: torch.stack(self.model.heads(images)),
        }[output]
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
                batch = cpu_batch.to(world.device)
                yield Outputs(forward(batch.images).float(), batch.labels, batch.weights)


class Evaluation:
    """Metrics of a model on the validation split. A subclass defines `metrics`."""

    Settings: ClassVar[type[EvaluationSettingsBase]]
    needs: ClassVar[Output]
    """The output of the model that the evaluation reads."""

    def __init__(self, settings: Any) -> None:
        """settings: an instance of `Settings`."""
        self.settings = settings

    def metrics(self, subject: Subject) -> dict[str, float]:
        """Metrics by name, without the prefix `val/`. Collective; equal on every rank."""
        raise NotImplementedError
