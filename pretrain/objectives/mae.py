"""MAE: most patches are removed; the encoder sees the rest, and a small decoder predicts them.

Source: He et al. 2022 (Masked Autoencoders Are Scalable Vision Learners); facebookresearch/mae.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from vitscale.config.section import NamedSection, Problems
from vitscale.distributed.random_numbers import stream_key
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
    decoder_width: PositiveInt = 512
    """Channels of the decoder; 4 divides it."""
    decoder_depth: PositiveInt = 8
    """Blocks of the decoder; 1 is enough for fine-tuning, not for a linear probe (table 1)."""
    decoder_heads: PositiveInt = 16
    """Attention heads of the decoder; they divide its width."""

    def num_kept(self, num_patches: int) -> int:
        """Patches that the encoder sees; rounded down: of 100 at 0.8 it keeps 19."""
        return int(num_patches * (1 - self.mask_ratio))

    def problems(self) -> Problems:
        width = self.decoder_width
        remainder = width % self.decoder_heads
        if remainder:
            yield (
                "objective.decoder_heads",
                f"{self.decoder_heads} heads do not divide width {width} (remainder {remainder}); "
                "change one of them",
            )
        # Each of x and y has a sine and a cosine for every frequency.
        if width % 4:
            yield (
                "objective.decoder_width",
                f"{width}: sin-cos positions need a width that 4 divides; change it",
            )


class Mae(Objective):
    Settings = MaeSettings
    settings: MaeSettings
    needs_labels = False
    trains_classifier = False
    patch_size: int
    """Known once the model is."""

    def problems(self, run: TrainingRun) -> Problems:
        yield from super().problems(run)
        model: Any = run.model
        if model.name != "vit":
            yield (
                "model.name",
                f"mae removes patches of pixels, which {model.name} has none of; set it to vit",
            )
            return

        # The decoder was published for one encoder: class token, patches, last norm.
        if not model.has_class_token:
            yield (
                "model.pool",
                "mae's encoder has a class token; set pool=cls, or class_token=true beside "
                "pool=gap",
            )
        if model.num_registers:
            yield ("model.num_registers", "mae's encoder has no registers; set it to 0")
        if model.pool_norm:
            yield (
                "model.pool_norm",
                "is for fine-tuning; mae's decoder reads normalised tokens; set it to false",
            )
        if run.data.mixing is not None:
            yield ("data.mixing", "mae reconstructs single images; set it to null")

        # The model's own report comes first: with its problems the number of patches is unknown.
        if any(model.problems()):
            return
        num_patches = model.resolved(num_classes=0).num_patches
        num_kept = self.settings.num_kept(num_patches)
        if not 0 < num_kept < num_patches:
            yield (
                "objective.mask_ratio",
                f"{self.settings.mask_ratio:g} keeps {num_kept} of {num_patches} patches; keep at "
                "least 1 and remove at least 1",
            )

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.masked_autoencoder import MaskedAutoencoder

        # The loss cuts images into patches, and sees the architecture nowhere else.
        self.patch_size = arch.patch_size
        model.objective = MaskedAutoencoder(
            arch,
            width=self.settings.decoder_width,
            depth=self.settings.decoder_depth,
            num_heads=self.settings.decoder_heads,
        )

    # ---- costs: D width of the encoder, W of the decoder, T tokens that the encoder sees

    def _decoder(self, arch: Any) -> Any:
        """The decoder as a model, whose blocks see all tokens."""
        width = self.settings.decoder_width
        sizes = {
            "width": width,
            "mlp_width": 4 * width,
            "head_width": None,
            "layer_scale": None,
            "depth": self.settings.decoder_depth,
            "num_heads": self.settings.decoder_heads,
        }
        return arch.model_copy(update=sizes)

    def _num_visible(self, arch: Any) -> int:
        return self.settings.num_kept(arch.num_patches) + int(arch.num_prefix_tokens)

    def num_parameters(self, arch: Any) -> int:
        """Exact count of trained values of encoder and decoder; both positions are fixed."""
        # The parts of `MaskedAutoencoder`: each dense layer has a bias, and a norm two vectors.
        decoder = self._decoder(arch)
        embed = arch.width * decoder.width + decoder.width
        mask_token = decoder.width
        blocks = decoder.depth * costs.block_parameters(decoder)
        norm = 2 * decoder.width
        predict = decoder.width * arch.patch_values + arch.patch_values
        added = embed + mask_token + blocks + norm + predict
        return super().num_parameters(arch) + int(added)

    def train_flops_per_image(self, arch: Any) -> int:
        """All N patches are embedded and the encoder sees T tokens. The decoder adds T D W, its
        blocks over all N + 1 tokens, and (N + 1) W P multiply-adds for the P values of a patch."""
        decoder = self._decoder(arch)
        num_visible = self._num_visible(arch)
        embed = num_visible * arch.width * decoder.width
        blocks = decoder.depth * costs.block_multiply_adds(decoder)
        predict = arch.num_tokens * decoder.width * arch.patch_values

        # A multiply-add is two operations, and the backward pass costs twice the forward pass.
        encoder = costs.train_flops_per_image(arch, num_tokens=num_visible)
        return encoder + 3 * 2 * int(embed + blocks + predict)

    def activation_bytes_per_image(self, arch: Any, **options: Any) -> int:
        # Both are kept until the backward pass, which begins at the decoder's end. The pixels of
        # the decoder are those that it predicts.
        encoder = costs.activation_bytes_per_image(
            arch, num_tokens=self._num_visible(arch), **options
        )
        decoder = costs.activation_bytes_per_image(self._decoder(arch), **options)
        return encoder + decoder

    # ---- training

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from pretrain.objectives.masked_autoencoder import reconstruction_loss

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

        from pretrain.objectives.patches import random_orders, to_patches
        from vitscale.objectives.draws import on_device, uniform_rows

        patches_BLP = to_patches(
            engine.normalized(images_B3SS), patch_size=self.patch_size
        )
        # A fixed number, so that every image of a batch has tokens of the same shape.
        num_patches = patches_BLP.shape[1]
        num_kept = self.settings.num_kept(num_patches)

        # On the CPU, in fp64: the same patches on every device and in every precision.
        noise_BL = uniform_rows(
            positions, num=num_patches, key=stream_key("mae", self.seed)
        )

        # The patches with the least noise are kept; the inverse order puts them back in place.
        order = random_orders(noise_BL)
        order_BL = on_device(order, images_B3SS.device)
        restore_BL = on_device(np.argsort(order, axis=1), images_B3SS.device)
        predicted_BLP = engine.forward(
            images_B3SS,
            "objective",
            kept_BK=order_BL[:, :num_kept],
            restore_BL=restore_BL,
        )
        return predicted_BLP, patches_BLP, order_BL[:, num_kept:]

    def draw(self, session: TrainingSession) -> None:
        import numpy as np

        from pretrain.objectives.masked_autoencoder import picture_rows
        from pretrain.objectives.pictures import draw_predictions

        # The positions are the same in every run, so that two pictures show the same patches.
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
