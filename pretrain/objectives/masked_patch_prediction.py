"""Masked patch prediction: the self-supervised objective of the ViT paper.

Half of the patch embeddings are corrupted, and every corrupted patch is predicted from its own
output token. Source: Dosovitskiy et al. 2021, section 4.6 and appendix B.1.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vitscale.config.section import NamedSection, Problems
from vitscale.distributed.random_numbers import stream_key
from vitscale.models.costs import ACTIVATION_SCALE
from vitscale.objectives.objective import Objective

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine
    from vitscale.runs.training import TrainingRun
    from vitscale.training.session import TrainingSession

COLOR_ACCURACY = "train/color_accuracy"
NUM_COLORS = 512  # 3 bits a channel


class MaskedPatchPredictionSettings(NamedSection):
    name: Literal["masked_patch_prediction"] = "masked_patch_prediction"
    """The mean colours of corrupted patches are predicted from their output tokens, without labels.
    Dosovitskiy et al. 2021, appendix B.1.2. Metric: `train/color_accuracy`, the share of corrupted
    patches whose colour is predicted right."""
    corrupted_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the patches of each image that are corrupted and predicted, rounded to a number."""
    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Probability that a corrupted patch is replaced by the mask embedding."""
    swap_share: float = Field(default=0.1, ge=0, le=1)
    """Probability that it is replaced by another patch of the image; the rest is kept."""

    def problems(self) -> Problems:
        if self.mask_share + self.swap_share > 1 + 1e-9:
            yield (
                "objective.mask_share",
                f"{self.mask_share} and swap_share {self.swap_share} exceed 1 together; lower one "
                "of them",
            )

    def num_corrupted(self, num_patches: int) -> int:
        """Corrupted patches of each image: a fixed number, so that shapes never change."""
        return round(self.corrupted_share * num_patches)


class MaskedPatchPrediction(Objective):
    Settings = MaskedPatchPredictionSettings
    settings: MaskedPatchPredictionSettings
    _arch: Any  # known once the model is
    needs_labels = False
    trains_classifier = False

    def problems(self, run: TrainingRun) -> Problems:
        yield from super().problems(run)
        if run.model.name != "vit":
            yield (
                "model.name",
                f"{run.model.name} has no patches of pixels to predict; set model.name=vit, or "
                "choose another objective",
            )
            return
        if run.data.mixing is not None:
            yield (
                "data.mixing",
                "mixed images have no colours of their own to predict; set data.mixing=null",
            )

        # The model's own report comes first: with its problems the number of patches is unknown.
        if any(run.model.problems()):
            return
        arch: Any = run.model.resolved(num_classes=0)
        if not self.settings.num_corrupted(arch.num_patches):
            yield (
                "objective.corrupted_share",
                f"{self.settings.corrupted_share} of {arch.num_patches} patches is none; raise it",
            )
        # A swapped patch gets the embedding of a different one.
        if self.settings.swap_share and arch.num_patches == 1:
            yield (
                "objective.swap_share",
                "an image of one patch has no other patch; set it to 0, or use smaller patches",
            )

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.masked_patches import MaskedPatches

        model.objective = MaskedPatches(arch.width)
        self._arch = arch

    def num_parameters(self, arch: Any) -> int:
        """The mask embedding and the head on top."""
        # A dense layer with a bias, one output per colour.
        head = arch.width * NUM_COLORS + NUM_COLORS
        return super().num_parameters(arch) + int(arch.width + head)

    def train_flops_per_image(self, arch: Any) -> int:
        """The head on top, for the predicted patches alone."""
        head = self.settings.num_corrupted(arch.num_patches) * arch.width * NUM_COLORS
        return super().train_flops_per_image(arch) + int(3 * 2 * head)

    def activation_bytes_per_image(
        self, arch: Any, *, precision: str, **options: Any
    ) -> int:
        """The head's input, and its output in the model's precision and twice in fp32."""
        model = super().activation_bytes_per_image(arch, precision=precision, **options)
        # Cross-entropy works in fp32: its input and its gradient have 4 bytes a value.
        value_bytes = 2 * ACTIVATION_SCALE[precision]
        patch_bytes = value_bytes * (arch.width + NUM_COLORS) + 2 * 4 * NUM_COLORS
        return model + int(self.settings.num_corrupted(arch.num_patches) * patch_bytes)

    def corruption(
        self, positions_B: np.ndarray, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Corrupt the images at these positions."""
        from pretrain.objectives.masked_patches import draw_corruption
        from vitscale.objectives.draws import on_device

        # The key is its own, so that the draws do not repeat those of augmentation.
        inputs = draw_corruption(
            positions_B,
            settings=self.settings,
            num_patches=self._arch.num_patches,
            key=stream_key("corruption", self.seed),
        )
        return {name: on_device(values, device) for name, values in inputs.items()}

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from pretrain.objectives.masked_patches import color_loss, colors
        from pretrain.objectives.patches import take_patches, to_patches

        assert batch.positions is not None
        inputs = self.corruption(batch.positions, batch.images.device)
        logits_BKC = engine.forward(batch.images, "objective", **inputs)

        # The colours are those of the uint8 pixels: normalised ones would depend on the precision.
        patches_BNX = to_patches(batch.images, patch_size=self._arch.patch_size)
        colors_BK = colors(take_patches(patches_BNX, inputs["predicted_BK"]))
        loss, accuracy = color_loss(logits_BKC, colors_BK)
        self.record(COLOR_ACCURACY, accuracy)
        return loss

    def draw(self, session: TrainingSession) -> None:
        import numpy as np

        from pretrain.objectives.masked_patches import picture_rows
        from pretrain.objectives.pictures import draw_predictions

        # The positions are the same in every run, so that two pictures show the same patches.
        def rows(images_B3SS: torch.Tensor) -> dict[str, torch.Tensor]:
            inputs = self.corruption(np.arange(len(images_B3SS)), images_B3SS.device)
            logits_BKC = session.engine.forward(images_B3SS, "objective", **inputs)
            return picture_rows(
                images_B3SS, logits_BKC, inputs, patch_size=self._arch.patch_size
            )

        draw_predictions(session, rows)
