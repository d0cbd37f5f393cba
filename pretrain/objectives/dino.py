"""DINO, iBOT and DINOv2: a student predicts, view by view, what its own average says of an image.

Source: Caron et al. 2021 (DINO), Zhou et al. 2022 (iBOT), Oquab et al. 2024 (DINOv2). Each part can
be switched off: DINO has views alone, iBOT masked patches too, DINOv2 a spread of features as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pretrain.objectives.views import ViewObjective, split_by_kind
from vitscale.config.section import NamedSection, Pair, Problems
from vitscale.models.costs import ACTIVATION_SCALE
from vitscale.models.registry import costs_of

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine
    from vitscale.runs.training import TrainingRun


class DinoSettings(NamedSection):
    name: Literal["dino"] = "dino"
    """The student's answer to each view is drawn to the teacher's answers to the other global
    views; the teacher is the average of the student's weights, `optim.ema`. Metrics:
    `train/view_loss`, `train/patch_loss`, `train/koleo`; `train/teacher_entropy`, of an answer, and
    `train/mean_entropy`, of the mean answer, over ln(prototypes); `train/spread` of features (1
    where they point everywhere, 0 where all are one)."""
    view_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss over views."""
    patch_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss over masked patches (iBOT); 0: nothing is masked."""
    koleo_weight: float = Field(default=0.0, ge=0)
    """Weight of KoLeo, which spreads the features of each global view; DINOv2: 0.1."""
    num_prototypes: int = Field(default=65536, gt=1)
    """Outputs of the head, that an answer is a distribution over."""
    hidden_width: PositiveInt = 2048
    """Width of the two hidden layers of the head."""
    bottleneck_width: PositiveInt = 256
    """Width that the prototypes see, of length 1."""
    has_patch_head: bool = False
    """Whether patches have a head of their own."""
    centering: Literal["softmax", "sinkhorn"] = "softmax"
    """How the teacher's answers are kept from being all alike. softmax: their moving mean is
    subtracted (DINO). sinkhorn: those of a global batch use all prototypes alike (DINOv2, 22k)."""
    student_temperature: PositiveFloat = 0.1
    """Prototype scores of the student are divided by it."""
    teacher_temperature: PositiveFloat = 0.07
    """The same of the teacher, after `temperature_steps`."""
    first_temperature: PositiveFloat = 0.04
    """That of the teacher at step 0."""
    temperature_steps: NonNegativeInt = 0
    """Steps in which the first temperature becomes the other, linearly; DINOv2: 37,500."""
    frozen_prototype_steps: NonNegativeInt = 0
    """Steps in which the prototypes stay as they are; DINO: an epoch, DINOv2: 1,250."""
    patch_embed_rate: PositiveFloat = 1.0
    """Factor of the learning rate of the patch embedding; DINOv2: 0.2."""
    masked_views: float = Field(default=0.5, gt=0, le=1)
    """Share of the global views that are masked, where `patch_weight` is not 0."""
    masked_patches: Pair = (0.1, 0.5)
    """Least and largest share of the patches of a masked view that are masked, in blocks."""

    def problems(self) -> Problems:
        if not self.view_weight + self.patch_weight:
            yield "objective.view_weight", "and patch_weight are 0; set one of them"
        low, high = self.masked_patches
        if not 0 < low <= high <= 1:
            yield (
                "objective.masked_patches",
                f"({low}, {high}) is not an increasing pair above 0, at most 1",
            )

        # A setting that nothing reads would be a recipe that is not trained.
        users = {
            "first_temperature": "temperature_steps",
            "masked_views": "patch_weight",
            "masked_patches": "patch_weight",
            "has_patch_head": "patch_weight",
        }
        for key, user in users.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and not getattr(self, user):
                yield f"objective.{key}", f"has no effect without {user}; remove it"


class Dino(ViewObjective):
    Settings = DinoSettings
    settings: DinoSettings
    has_teacher = True
    _module: Any
    """Of the model that is trained: it has the centres."""

    def problems(self, run: TrainingRun) -> Problems:
        yield from super().problems(run)
        settings = self.settings
        has_one_width = getattr(run.model, "pool", None) != "cls_mean"
        if settings.patch_weight and not (has_one_width or settings.has_patch_head):
            yield (
                "objective.has_patch_head",
                "model.pool=cls_mean makes features wider than patches; set it to true",
            )
        if settings.patch_weight and getattr(run.model, "pool_norm", False):
            yield "model.pool_norm", "leaves patches without a norm; set it to false"

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.self_distillation import SelfDistillation

        super().extend_model(model, arch)
        width = costs_of(arch).feature_width(arch)
        model.objective = SelfDistillation(self.settings, width=width, model=model)
        self._module = model.objective

    def part_of(self, name: str) -> str:
        if ".prototypes." in name:
            return "prototypes"
        if name.startswith("patch_embed."):
            return "patch embedding"
        return super().part_of(name)

    def rate_factor(self, part: str) -> float:
        if part == "prototypes" and self.step < self.settings.frozen_prototype_steps:
            return 0.0
        if part == "patch embedding":
            return self.settings.patch_embed_rate
        return super().rate_factor(part)

    # ---- costs: the student sees all views, and the teacher the global ones

    def head_layers(self, arch: Any) -> list[tuple[int, int, int]]:
        return self._head_layers(costs_of(arch).feature_width(arch))

    def _head_layers(self, width: int) -> list[tuple[int, int, int]]:
        settings = self.settings
        hidden = settings.hidden_width
        bottleneck = settings.bottleneck_width
        return [
            (width, hidden, hidden),
            (hidden, hidden, hidden),
            (hidden, bottleneck, bottleneck),
            (bottleneck, settings.num_prototypes, 0),
        ]

    def num_parameters(self, arch: Any) -> int:
        settings = self.settings
        total = super().num_parameters(arch)
        # The mask token, and a head, are as wide as patches.
        patch_width = getattr(arch, "width", costs_of(arch).feature_width(arch))
        if settings.patch_weight:
            total += patch_width
        if settings.has_patch_head:
            for rows, columns, others in self._head_layers(patch_width):
                total += rows * columns + others
        return int(total)

    def train_flops_per_image(self, arch: Any) -> int:
        num_global = self._count(is_local=False)
        # A step of the model is three forward passes, and the teacher has one.
        teacher = num_global * costs_of(arch).train_flops_per_image(arch) // 3

        # What else passes through heads: the teacher's views once, and what is masked.
        passes = num_global + (3 + 1) * self._num_masked(arch)
        heads = 2 * self.head_weights(arch) * passes
        return super().train_flops_per_image(arch) + teacher + int(heads)

    def _num_masked(self, arch: Any) -> float:
        """Patches of an image that are masked in its global views, on average."""
        settings = self.settings
        if not settings.patch_weight:
            return 0.0
        masked_share = sum(settings.masked_patches) / 2 * settings.masked_views
        num_patches = getattr(arch, "num_patches", 0)
        return float(masked_share * num_patches * self._count(is_local=False))

    def activation_bytes_per_image(self, arch: Any, **options: Any) -> int:
        model = super().activation_bytes_per_image(arch, **options)
        head = self.head_bytes(arch, precision=options["precision"])
        return model + int(self._num_masked(arch) * head)

    def loss_bytes(self, arch: Any, *, precision: str, micro_batch: int) -> int:
        """The larger of two moments: the gradients of scores, or those of prototypes."""
        settings = self.settings
        num_views = sum(view.count for view in self.views)
        num_masked = self._num_masked(arch)
        # In fp32: scores, their logarithms and gradients; of patches the student's and teacher's.
        rows = 3 * num_views + 5 * num_masked
        row_bytes = 4 * settings.num_prototypes
        scores = micro_batch * rows * row_bytes

        # Prototypes at length 1 for each head, and five of their size while one is normalised.
        values = settings.bottleneck_width * settings.num_prototypes
        matrix = 2 * ACTIVATION_SCALE[precision] * values
        num_heads = 2 if settings.has_patch_head else 1
        kept = micro_batch * (num_views + num_masked) * row_bytes
        return int(num_heads * matrix + max(scores, kept + 5 * matrix))

    # ---- training

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        import torch

        from pretrain.objectives.isotropy import spread
        from pretrain.objectives.self_distillation import (
            entropies,
            koleo,
            patch_loss,
            view_loss,
        )

        settings = self.settings
        global_BGCSS, local_BVCSS = split_by_kind(batch)
        num_global = global_BGCSS.shape[1]
        pixels = global_BGCSS.flatten(0, 1)

        # The student alone sees the masks; the patches that they hide are asked of both.
        masks = self._masks(batch, num_global)
        student = engine.forward(pixels, "objective", **masks)
        teacher = engine.teacher(pixels, "objective", chosen_M=masks.get("chosen_M"))
        answers = self._module.answers(teacher, temperature=self._temperature())

        students_BSK = student.views_NK.unflatten(0, (-1, num_global))
        if local_BVCSS is not None:
            local = engine.forward(local_BVCSS.flatten(0, 1), "objective")
            local_BSK = local.views_NK.unflatten(0, local_BVCSS.shape[:2])
            students_BSK = torch.cat([students_BSK, local_BSK], dim=1)
        answers_BGK = answers.views_NK.unflatten(0, (-1, num_global))
        loss = view_loss(
            students_BSK, answers_BGK, temperature=settings.student_temperature
        )
        # The losses are logged apart, without their weights.
        self.record("train/view_loss", loss)
        total = settings.view_weight * loss

        if masks:
            loss = patch_loss(
                student.patches_MK,
                answers.patches_MK,
                masks["masked_NL"],
                temperature=settings.student_temperature,
            )
            self.record("train/patch_loss", loss)
            total = total + settings.patch_weight * loss
        features_BGD = student.features_ND.unflatten(0, (-1, num_global))
        if settings.koleo_weight:
            loss = torch.stack([koleo(view_BD) for view_BD in features_BGD.unbind(1)])
            self.record("train/koleo", loss.mean())
            total = total + settings.koleo_weight * loss.sum()

        # What the warning of a collapse reads.
        self.record("train/spread", spread(features_BGD[:, 0]))
        for name, value in entropies(answers.views_NK).items():
            self.record(name, value)
        return total

    def _temperature(self) -> float:
        """Of the teacher, at this step."""
        settings = self.settings
        if self.step >= settings.temperature_steps:
            return settings.teacher_temperature
        first = settings.first_temperature
        progress = self.step / settings.temperature_steps
        return first + (settings.teacher_temperature - first) * progress

    def _masks(self, batch: Batch, num_global: int) -> dict[str, torch.Tensor]:
        """Inputs of the student's module for the global views; none if nothing is masked."""
        settings = self.settings
        if not settings.patch_weight:
            return {}
        from pretrain.objectives.block_masks import draw_masks
        from vitscale.objectives.draws import on_device

        assert batch.positions is not None
        masked_NL = draw_masks(
            batch.positions,
            num_views=num_global,
            grid=self._module.grid,
            masked_views=settings.masked_views,
            shares=settings.masked_patches,
            seed=self.seed,
        )
        # Numbers made on the host: a device would be waited for.
        numbers = {"masked_NL": masked_NL, "chosen_M": masked_NL.ravel().nonzero()[0]}
        device = batch.images.device
        return {name: on_device(values, device) for name, values in numbers.items()}
