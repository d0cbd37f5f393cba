"""MAE: most patches are removed; the encoder sees the rest, and a small decoder predicts them.

Source: He et al. 2022 (Masked Autoencoders Are Scalable Vision Learners); facebookresearch/mae.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vitscale.config.section import NamedSection
from vitscale.distributed.random_numbers import stream_key, uniform_rows
from vitscale.models import costs
from vitscale.objectives.objective import Objective

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine
    from vitscale.runs.training import TrainingRun
    from vitscale.training.session import TrainingSession


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

    def num_kept(self, num_patches: int) -> int:
        """Patches that the encoder sees; rounded down: of 100 at 0.8 it keeps 19."""
        return int(num_patches * (1 - self.mask_ratio))

    def problems(self) -> Iterator[tuple[str, str]]:
        width, heads = self.decoder_width, self.decoder_heads
        if width % heads:
            what = (
                f"{heads} heads do not divide width {width} (remainder {width % heads})"
            )
            yield ("objective.decoder_heads", f"{what}; change one of them")
        if width % 4:
            what = f"{width}: sin-cos positions need a width that 4 divides"
            yield ("objective.decoder_width", f"{what}; change it")


class Mae(Objective):
    Settings = MaeSettings
    settings: MaeSettings
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
        if not model.has_class_token:
            what = "mae's encoder has a class token"
            yield (
                "model.pool",
                f"{what}; set pool=cls, or class_token=true beside pool=gap",
            )
        if model.num_registers:
            yield ("model.num_registers", "mae's encoder has no registers; set it to 0")
        if model.pool_norm:
            what = "is for fine-tuning; mae's decoder reads normalised tokens"
            yield ("model.pool_norm", f"{what}; set it to false")
        if run.data.mixing is not None:
            yield ("data.mixing", "mae reconstructs single images; set it to null")
        if not any(model.problems()):
            num_patches = model.resolved(num_classes=0).num_patches
            kept = self.settings.num_kept(num_patches)
            if not 0 < kept < num_patches:
                what = f"{self.settings.mask_ratio:g} keeps {kept} of {num_patches} patches"
                yield (
                    "objective.mask_ratio",
                    f"{what}; keep at least 1 and remove at least 1",
                )

    def extend_model(self, model: Any, arch: Any) -> None:
        from vitscale.models.mae import MaskedAutoencoder

        settings, self.patch_size = self.settings, arch.patch_size
        model.objective = MaskedAutoencoder(
            arch,
            width=settings.decoder_width,
            depth=settings.decoder_depth,
            num_heads=settings.decoder_heads,
        )

    # ---- costs: d width of the encoder, w of the decoder, T tokens that the encoder sees

    def _decoder(self, arch: Any) -> Any:
        """The decoder as a model, whose blocks see all tokens."""
        width = self.settings.decoder_width
        sizes = {
            "width": width,
            "mlp_width": 4 * width,
            "head_width": None,
            "layer_scale": None,
        }
        sizes |= {
            "depth": self.settings.decoder_depth,
            "num_heads": self.settings.decoder_heads,
        }
        return arch.model_copy(update=sizes)

    def _num_visible(self, arch: Any) -> int:
        return self.settings.num_kept(arch.num_patches) + int(arch.num_prefix_tokens)

    def num_parameters(self, arch: Any) -> int:
        """Exact count of trained values of encoder and decoder; both positions are fixed."""
        d, w, pixels = arch.width, self.settings.decoder_width, arch.patch_values
        blocks = self.settings.decoder_depth * costs.block_parameters(
            self._decoder(arch)
        )
        added = (d * w + w) + w + blocks + 2 * w + (w * pixels + pixels)
        return super().num_parameters(arch) + int(added)

    def train_flops_per_image(self, arch: Any) -> int:
        """All N patches are embedded and the encoder sees T tokens. The decoder adds T d w, its
        blocks over all N + 1 tokens, and (N + 1) w P multiply-adds for the P values of a patch."""
        decoder, visible = self._decoder(arch), self._num_visible(arch)
        embed = visible * arch.width * decoder.width
        predict = arch.num_tokens * decoder.width * arch.patch_values
        blocks = decoder.depth * costs.block_multiply_adds(decoder)
        encoder = costs.train_flops_per_image(arch, num_tokens=visible)
        return encoder + 3 * 2 * int(embed + blocks + predict)

    def activation_bytes_per_image(self, arch: Any, **options: Any) -> int:
        encoder = costs.activation_bytes_per_image(
            arch, num_tokens=self._num_visible(arch), **options
        )
        return encoder + costs.activation_bytes_per_image(
            self._decoder(arch), **options
        )

    # ---- training

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from vitscale.models.mae import reconstruction_loss

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
        import numpy as np

        from vitscale.data.loader import on_device
        from vitscale.models.patches import random_orders, to_patches

        patches_BLP = to_patches(
            engine.normalized(images_B3SS), patch_size=self.patch_size
        )
        num_patches = patches_BLP.shape[1]
        kept = self.settings.num_kept(num_patches)
        # On the CPU, in fp64: the same patches on every device and in every precision.
        noise_BL = uniform_rows(
            positions, num=num_patches, key=stream_key("mae", self.seed)
        )
        order = random_orders(noise_BL)  # those with the least noise are kept
        order_BL, places_BL = (
            on_device(each, images_B3SS.device)
            for each in (order, np.argsort(order, axis=1))
        )
        predicted_BLP = engine.forward(
            images_B3SS, "objective", kept_BK=order_BL[:, :kept], places_BL=places_BL
        )
        return predicted_BLP, patches_BLP, order_BL[:, kept:]

    def draw(self, session: TrainingSession) -> None:
        import numpy as np

        from pretrain.objectives.pictures import draw_predictions
        from vitscale.models.mae import picture_rows

        def rows(images_B3SS: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted_BLP, patches_BLP, removed_BR = self.reconstruct(
                session.engine, images_B3SS, positions=np.arange(len(images_B3SS))
            )
            return picture_rows(
                predicted_BLP,
                patches_BLP,
                removed_BR=removed_BR,
                grid=session.arch.grid,
                normalized=self.settings.normalized_pixels,
                mean=session.run.data.mean,
                std=session.run.data.std,
            )

        draw_predictions(session, rows)
