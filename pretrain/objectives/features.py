"""Feature distillation: a student learns what frozen teachers see in an image, without labels.

Source: Ranzinger et al. 2024 (AM-RADIO), section 3; Zhang et al. 2025 (Accessing Vision Foundation
Models via ImageNet-1K, Proteus). Leaves out: opening a teacher (`vitscale.objectives.teacher`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vitscale.config.errors import UserError
from vitscale.config.loader import read_yaml
from vitscale.config.section import Items, NamedSection, Problems, Section
from vitscale.data.remote import location_of
from vitscale.data.targets import TeacherTargets, read_header, target_problems
from vitscale.models.registry import MODELS, ModelSettings, costs_of
from vitscale.objectives.objective import Objective
from vitscale.objectives.settings import TeacherSettings

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.distributed.world import World
    from vitscale.engine.engine import Engine
    from vitscale.engine.settings import EngineSettings
    from vitscale.objectives.teacher import FeatureTeacher
    from vitscale.runs.training import TrainingRun


GRID_OF_TARGETS = (
    "missing: stored patches have a grid of their own; set it, as in [7, 7]"
)


class FeaturesSettings(NamedSection):
    name: Literal["features"] = "features"
    """The features of frozen teachers are learned, of the class token or pooled and of patches;
    a linear layer adapts the student's width to that of each. Ranzinger et al. 2024 (AM-RADIO).
    Metrics: `train/class_loss`, `train/patch_loss`, means over teachers; 0 where all is equal."""
    teachers: Items[TeacherSettings] = ()
    """Models with a head or without, of any width, patch and image size."""
    targets: str | None = None
    """Folder or URL of what the teachers say, by `vitscale prepare targets`; `teachers` may then be
    [], and are compared with those of the folder. null: teachers are asked in each step."""
    shares: Items[PositiveFloat] = ()
    """Weight of each teacher in the losses; empty: all count alike."""
    class_weight: float = Field(default=1.0, ge=0)
    """Weight of the cosine between class tokens, or pooled features where the head reads these."""
    patch_weight: float = Field(default=1.0, ge=0)
    """Weight of cosine and smooth L1 between patches."""
    patch_grid: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, strict=False
    )
    """Rows and columns that the patches of student and teachers are averaged to. null: those of the
    student, which the teachers' are averaged to."""

    @property
    def target_grid(self) -> tuple[int, int] | None:
        """The grid of stored patches; None: class tokens alone."""
        return self.patch_grid if self.patch_weight else None

    @property
    def lacks_grid(self) -> bool:
        """Whether patches cannot be stored, since nothing says at which grid."""
        return self.patch_weight > 0 and self.patch_grid is None

    def problems(self) -> Problems:
        if not self.class_weight + self.patch_weight:
            yield "objective.class_weight", "and patch_weight are 0; set one of them"
        if self.patch_grid and not self.patch_weight:
            yield (
                "objective.patch_grid",
                "has no effect without patch_weight; remove it",
            )
        if not self.teachers and self.targets is None:
            yield "objective.teachers", "none; give one, or set objective.targets"
        if self.targets is not None and self.lacks_grid:
            yield "objective.patch_grid", GRID_OF_TARGETS
        if self.shares and self.teachers and len(self.shares) != len(self.teachers):
            yield (
                "objective.shares",
                f"{len(self.shares)} of {len(self.teachers)} teachers; give one for each",
            )


class Features(Objective):
    """The teachers are no part of the model: they have no gradients and are in no checkpoint, and
    every rank holds all of them, whatever the ZeRO stage."""

    Settings = FeaturesSettings
    settings: FeaturesSettings
    needs_labels = False
    trains_classifier = False
    teachers: Sequence[FeatureTeacher] = ()
    """Those that are asked in each step."""

    def problems(self, run: TrainingRun) -> Problems:
        yield from super().problems(run)
        if self.settings.targets is not None:
            yield from target_problems(run.data)

    def prepare(
        self, *, world: World, engine: EngineSettings, **others: Any
    ) -> dict[str, Any]:
        teachers = self.open_teachers(world=world, engine=engine)
        found = [teacher.fingerprint for teacher in teachers]
        if stored := self._stored():
            given = found
            found = [teacher.fingerprint for teacher in stored]
            shares = self.settings.shares
            if shares and len(shares) != len(stored):
                raise UserError(
                    f"{len(shares)} of {len(stored)} teachers",
                    where="objective.shares",
                    next_step="give one for each, in the order of the targets",
                )
            grids = {teacher.grid for teacher in stored}
            expected = {self.settings.target_grid}
            if given not in ([], found) or grids != expected:
                raise UserError(
                    f"are of teachers {found}, patches at {grids}; this run has {given or found}, "
                    f"and objective.patch_grid {expected}",
                    where=f"objective.targets={self.settings.targets}",
                    next_step="undo the change, or make other targets",
                )
            return {"teachers": found}

        self.teachers = teachers
        for teacher in self.teachers:
            costs = f"{teacher.num_parameters:,} parameters, "
            costs += f"{teacher.flops_per_image / 1e9:,.1f} GFLOPs an image"
            self.messages.append(f"teacher: {teacher.frozen.opened.source}; {costs}")
        return {"teachers": found}

    def _stored(self) -> tuple[TeacherTargets, ...]:
        """The teachers of `targets`; none without. Raises UserError."""
        if self.settings.targets is None:
            return ()
        place = location_of(self.settings.targets, where="objective.targets")
        return read_header(place).teachers

    def open_teachers(
        self, *, world: World, engine: EngineSettings
    ) -> list[FeatureTeacher]:
        """All teachers in their order. Raises UserError for one that does not fit."""
        from vitscale.objectives.teacher import open_feature_teacher

        teachers = []
        for number, settings in enumerate(self.settings.teachers):
            key = f"objective.teachers[{number}]"
            teacher = open_feature_teacher(
                settings, key=key, world=world, engine=engine
            )
            if self.settings.patch_weight and teacher.grid is None:
                raise UserError(
                    "the teacher has no square of patches as wide as its features",
                    where=key,
                    next_step="set objective.patch_weight=0, or take a Vision Transformer",
                )
            teachers.append(teacher)
        return teachers

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.adapters import Adapters

        class_width, patch_width = self._student_widths(arch)
        if patch_width and not hasattr(model, "num_prefix_tokens"):
            raise UserError(
                "the model has no patches that could be like a teacher's",
                where="objective.patch_weight",
                next_step="set it to 0, or take a Vision Transformer",
            )
        widths = [width for width, _, _ in self._known_teachers()]
        model.objective = Adapters(
            widths, class_width=class_width, patch_width=patch_width
        )

    def _student_widths(self, arch: Any) -> tuple[int | None, int | None]:
        """Of features and patches; None: not learned."""
        features = costs_of(arch).feature_width(arch)
        class_width = features if self.settings.class_weight else None
        patch_width = getattr(arch, "width", features)
        return class_width, patch_width if self.settings.patch_weight else None

    # ---- costs: of the student, its adapters, and one forward pass of each teacher

    def _known_teachers(self) -> list[tuple[int, int, int]]:
        """Width, parameters and FLOPs per image of the teachers that are known so far."""
        if stored := self._stored():
            return [(teacher.width, 0, 0) for teacher in stored]
        if self.teachers:
            return [
                (teacher.width, teacher.num_parameters, teacher.flops_per_image)
                for teacher in self.teachers
            ]
        known = []
        for settings in self.settings.teachers:
            arch = _planned(settings)
            if arch is not None:
                costs = costs_of(arch)
                flops = costs.train_flops_per_image(arch) // 3
                width = costs.feature_width(arch)
                known.append((width, costs.num_parameters(arch), flops))
        return known

    def teacher_parameters(self, arch: Any) -> int:
        return sum(number for _, number, _ in self._known_teachers())

    def _adapter_weights(self, arch: Any) -> tuple[int, int]:
        """Trained values of all adapters, and their multiply-adds for an image."""
        num_values = 0
        num_products = 0
        # Models of timm do not say how many patches they have.
        rows, columns = self.settings.patch_grid or arch.grid
        for own_width, times in zip(
            self._student_widths(arch), (1, rows * columns), strict=True
        ):
            for width, _, _ in self._known_teachers():
                if own_width:
                    num_values += own_width * width + width
                    num_products += own_width * width * times
        return num_values, num_products

    def num_parameters(self, arch: Any) -> int:
        return super().num_parameters(arch) + self._adapter_weights(arch)[0]

    def train_flops_per_image(self, arch: Any) -> int:
        teachers = sum(flops for _, _, flops in self._known_teachers())
        adapters = 3 * 2 * self._adapter_weights(arch)[1]
        return super().train_flops_per_image(arch) + adapters + teachers

    def notes(self) -> Iterator[str]:
        if self.settings.targets is not None:
            yield f"from {self.settings.targets}"
            return
        for number, settings in enumerate(self.settings.teachers):
            text = f"from {settings.model or settings.weights}"
            if _planned(settings) is None:
                text += f", without the costs of teachers[{number}]"
            yield text

    # ---- training

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from pretrain.objectives.adapters import class_loss, patch_loss
        from vitscale.objectives.teacher import square_grid

        settings = self.settings
        images = batch.images
        students = engine.forward(images, "objective", patch_grid=settings.patch_grid)
        shares = settings.shares or (1.0,) * len(students)
        grid = None
        if students[0].patches_BLD is not None:
            grid = settings.patch_grid or square_grid(students[0].patches_BLD.shape[1])
        answers = batch.targets or [
            teacher.features(images, patch_grid=grid) for teacher in self.teachers
        ]

        losses: dict[str, Any] = {}
        for (class_BD, patches_BLD), student, share in zip(
            answers, students, shares, strict=True
        ):
            parts = {}
            if student.class_BD is not None:
                parts["train/class_loss"] = class_loss(student.class_BD, class_BD)
            if patches_BLD is not None:
                parts["train/patch_loss"] = patch_loss(student.patches_BLD, patches_BLD)
            for name, part in parts.items():
                losses[name] = losses.get(name, 0) + part * (share / sum(shares))

        for name, part in losses.items():
            self.record(name, part)
        weights = {
            "train/class_loss": settings.class_weight,
            "train/patch_loss": settings.patch_weight,
        }
        total: torch.Tensor = sum(weights[name] * part for name, part in losses.items())
        return total


class _Model(Section):
    model: ModelSettings


def _planned(settings: TeacherSettings) -> Any:
    """The architecture of a teacher that is not opened; None: its costs are not known before."""
    config = Path(settings.weights) / "config.yaml"
    if settings.model is not None or not config.is_file():
        return None
    values = read_yaml(config.read_text(), name=str(config)).values
    model = _Model.model_validate({"model": values["model"]}).model
    # A model of timm is counted when it is built, which needs torch.
    if MODELS[model.name].costs is None:
        return None
    arch = model.resolved(num_classes=0)
    return arch.model_copy(
        update={"image_size": settings.image_size or arch.image_size}
    )
