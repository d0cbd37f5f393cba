"""MAE: most patches are removed; the encoder sees the rest, and a small decoder predicts them.

Source: He et al. 2022 (Masked Autoencoders Are Scalable Vision Learners); facebookresearch/mae.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vitscale.config.section import NamedSection
from vitscale.distributed.random_numbers import stream_key, uniform_rows
from vitscale.models.objectives.mae_costs import (
    DecoderSize,
    activation_bytes_per_image,
    num_kept,
    num_parameters,
    train_flops_per_image,
)
from vitscale.training.objective import Objective

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine
    from vitscale.runs.training import TrainingRun
    from vitscale.training.loop import TrainingSession


class MaeSettings(NamedSection):
    name: Literal["mae"] = "mae"
    """The pixels of removed patches are predicted from the others. He et al. 2022."""
    mask_ratio: float = Field(default=0.75, gt=0, lt=1)
    """Share of the patches that are removed; the number kept is rounded down."""
    normalized_pixels: bool = True
    """Predict each patch minus its mean, over its deviation; section 4.1: 85.4 against 84.9 %."""
    decoder_width: int = Field(default=512, gt=0)
    """Channels of the decoder; 4 divides it."""
    decoder_depth: int = Field(default=8, gt=0)
    """Blocks of the decoder; 1 is enough for fine-tuning, not for a linear probe (table 1)."""
    decoder_heads: int = Field(default=16, gt=0)
    """Attention heads of the decoder; they divide its width."""

    @property
    def decoder(self) -> DecoderSize:
        return DecoderSize(
            width=self.decoder_width, depth=self.decoder_depth, num_heads=self.decoder_heads
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        width, heads = self.decoder_width, self.decoder_heads
        if width % heads:
            what = f"{heads} heads do not divide width {width} (remainder {width % heads})"
            yield ("objective.decoder_heads", f"{what}; change one of them")
        if width % 4:
            what = f"{width}: sin-cos positions need a width that 4 divides"
            yield ("objective.decoder_width", f"{what}; change it")


class Mae(Objective):
    Settings = MaeSettings
    needs_labels = False
    trains_classifier = False
    patch_size: int
    """Known once the model is."""

    def problems(self, run: TrainingRun) -> Iterator[tuple[str, str]]:
        yield from super().problems(run)
        model: Any = run.model
        if model.name != "vit":
            what = f"mae removes patches of pixels, which {model.name} has none of"
            yield ("model.name", f"{what}; set it to vit")
            return
        if model.pool in ("gap", "map") and not model.class_token:
            what = "mae's encoder has a class token"
            yield ("model.pool", f"{what}; set pool=cls, or class_token=true beside pool=gap")
        if model.num_registers:
            yield ("model.num_registers", "mae's encoder has no registers; set it to 0")
        if model.pool_norm:
            what = "is for fine-tuning; mae's decoder reads normalised tokens"
            yield ("model.pool_norm", f"{what}; set it to false")
        if run.data.mixing is not None:
            yield ("data.mixing", "mae reconstructs single images; set it to null")
        if not any(model.problems()):
            yield from self._mask_problems(model.resolved(num_classes=0).num_patches)

    def _mask_problems(self, num_patches: int) -> Iterator[tuple[str, str]]:
        kept = num_kept(num_patches, mask_ratio=self.settings.mask_ratio)
        if not 0 < kept < num_patches:
            what = f"{self.settings.mask_ratio:g} keeps {kept} of {num_patches} patches"
            yield ("objective.mask_ratio", f"{what}; keep at least 1 and remove at least 1")

    def extend_model(self, model: Any, arch: Any) -> None:
        from vitscale.models.objectives.mae import MaskedAutoencoder

        self.patch_size = arch.patch_size
        model.objective = MaskedAutoencoder(arch, self.settings.decoder)

    def num_parameters(self, arch: Any) -> int:
        return num_parameters(arch, self.settings.decoder)

    def train_flops_per_image(self, arch: Any) -> int:
        return train_flops_per_image(
            arch, self.settings.decoder, mask_ratio=self.settings.mask_ratio
        )

    def activation_bytes_per_image(
        self, arch: Any, *, precision: str, activation_checkpointing: bool
    ) -> int:
        return activation_bytes_per_image(
            arch,
            self.settings.decoder,
            mask_ratio=self.settings.mask_ratio,
            precision=precision,
            activation_checkpointing=activation_checkpointing,
        )

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from vitscale.models.objectives.mae import reconstruction_loss

        assert batch.positions is not None
        predicted_BLP, patches_BLP, removed_BR = self.reconstruct(
            engine, batch.images, positions=batch.positions
        )
        return reconstruction_loss(
            predicted_BLP,
            patches_BLP,
            removed_BR=removed_BR,
            normalized=self.settings.normalized_pixels,
        )

    def reconstruct(
        self, engine: Engine, images_B3SS: torch.Tensor, *, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Predicted patches, patches [B, L, P] of normalised pixels, removed ones [B, R].

        Which are removed is a function of the seed and `positions`, int64 [B].
        """
        from vitscale.models.objectives.mae import mask_orders
        from vitscale.models.objectives.patches import on_device, to_patches

        patches_BLP = to_patches(engine.normalized(images_B3SS), patch_size=self.patch_size)
        num_patches = patches_BLP.shape[1]
        kept = num_kept(num_patches, mask_ratio=self.settings.mask_ratio)
        # On the CPU, in fp64: the same patches on every device and in every precision.
        noise_BL = uniform_rows(positions, num=num_patches, key=stream_key("mae", self.seed))
        order_BL, places_BL = (
            on_device(each, images_B3SS.device) for each in mask_orders(noise_BL)
        )
        predicted_BLP = engine.forward(
            images_B3SS, "objective", kept_BK=order_BL[:, :kept], places_BL=places_BL
        )
        return predicted_BLP, patches_BLP, order_BL[:, kept:]

    def pictures(self, session: TrainingSession) -> Iterable[Path]:
        from pretrain.objectives.pictures import draw_predictions

        return [draw_predictions(session, partial(self._picture_rows, session))]

    def _picture_rows(
        self, session: TrainingSession, images_B3SS: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        import numpy as np

        from vitscale.models.objectives.mae import picture_rows

        arch: Any = session.arch
        predicted_BLP, patches_BLP, removed_BR = self.reconstruct(
            session.engine, images_B3SS, positions=np.arange(len(images_B3SS))
        )
        return picture_rows(
            predicted_BLP,
            patches_BLP,
            removed_BR=removed_BR,
            grid=arch.grid,
            normalized=self.settings.normalized_pixels,
            mean=session.run.data.mean,
            std=session.run.data.std,
        )
