"""The interface of a training objective, and the supervised ones, of the ViT paper and of DeiT.

Needs no torch when imported, and neither may a file with an objective: settings are validated on
machines without torch. Import torch inside the methods, and modules from a file beside it.
Leaves out: the teacher (`teacher`), the losses (`losses`), and the objectives of
pretrain/objectives/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from vitscale.config.errors import UserError
from vitscale.config.section import NamedSection, Problems
from vitscale.evaluation.classification import ClassificationSettings
from vitscale.evaluation.evaluation import SettingsBase
from vitscale.evaluation.registry import EVALUATIONS
from vitscale.models.registry import costs_of
from vitscale.objectives.settings import TeacherSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitscale.data.loader import Batch
    from vitscale.data.settings import ViewSettings
    from vitscale.distributed.world import World
    from vitscale.engine.engine import Engine
    from vitscale.engine.settings import EngineSettings
    from vitscale.models.settings import Architecture
    from vitscale.objectives.teacher import Teacher
    from vitscale.runs.training import TrainingRun


class Objective:
    """What a run optimises. A subclass names its settings and defines `loss`."""

    Settings: ClassVar[type[NamedSection]]
    needs_labels: ClassVar[bool] = True
    """Whether `loss` reads `batch.labels`."""
    trains_classifier: ClassVar[bool] = True
    """Whether `loss` trains the model's head; without, the model is built without one."""
    reads_views: ClassVar[bool] = False
    """Whether `loss` reads `batch.views`, the views that `data.views` names."""
    couples: ClassVar[bool] = False
    """Whether `loss` compares the images of a global batch, of all ranks: none is accumulated."""

    has_teacher: ClassVar[bool] = False
    """Whether `loss` asks `engine.teacher`, which has the average of the weights."""
    step = 0
    """Number of the step that is trained, from 0."""

    def __init__(
        self, settings: Any, *, seed: int, views: Sequence[ViewSettings] = ()
    ) -> None:
        """settings: an instance of `Settings`. seed: the run's, for draws by position.

        views: of each image, `data.views`.
        """
        self.settings = settings
        self.seed = seed
        self.views = views
        self.recorded: dict[str, torch.Tensor] = {}
        """Further metrics of the last micro-batch; the log shows their means."""
        self.messages: list[str] = []
        """Lines for the start of the log."""

    def problems(self, run: TrainingRun) -> Problems:
        """Conflicts with other settings of the run, as (dotted key, what is wrong, what to do)."""
        # Settings know their own conflicts, but not those with the rest of the run.
        yield from self.settings.problems()
        if run.data.views and not self.reads_views:
            yield (
                "data.views",
                f"{self.settings.name} reads one view of each image; remove it",
            )
        if run.data.views and run.data.mixing is not None:
            yield ("data.mixing", "mixes single images; set it to null")
        if self.couples and run.data.repeats > 1:
            yield (
                "data.repeats",
                "an image would be compared with itself; set it to 1",
            )
        if self.has_teacher and run.optim.ema is None:
            yield (
                "optim.ema",
                f"is the teacher of {self.settings.name}; set it, as in {{decay: 0.996}}",
            )
        if self.trains_classifier:
            return

        # The model is built without a head, so nothing may need one.
        reason = f"{self.settings.name} trains no classifier"
        if run.model.num_classes is not None:
            yield ("model.num_classes", f"{reason}; set it to null")
        if run.keep_head not in ("auto", False):
            yield "keep_head", f"{reason}; set it to false"
        if getattr(run.model, "representation_layer", False):
            yield ("model.representation_layer", f"{reason}; set it to false")
        if getattr(run.model, "distillation_token", False):
            yield (
                "model.distillation_token",
                f"{reason}, so no distillation head either; set it to false",
            )

        # kNN, few-shot and linear probes read features, which every objective trains.
        for evaluation in self.evaluations(run):
            if EVALUATIONS[evaluation.name].needs != "features":
                yield (
                    "evaluate",
                    f"{evaluation.name} needs a classifier, which {self.settings.name} does not "
                    "train; remove it, or take knn where there are labels",
                )

    def check_batch(self, run: TrainingRun, *, share: int, num_samples: int) -> None:
        """Raise UserError where images that are compared do not come together, or come twice.

        share: images of a global batch on each rank. num_samples: of an epoch.
        """
        if not self.couples:
            return
        batch = run.data.global_batch
        name = self.settings.name
        if not 1 < batch <= num_samples:
            raise UserError(
                f"{name} compares {batch} images of {num_samples}, each with all others",
                where="data.global_batch",
                allowed=f"2 to {num_samples}",
                next_step="change it; a larger one would have some images twice",
            )

        largest = run.engine.max_micro_batch
        if share > largest:
            raise UserError(
                f"{name} compares all {batch} images of a global batch, {share} a rank; "
                f"accumulated micro-batches of {largest} would not see each other",
                where="engine.max_micro_batch",
                allowed=f"at least {share}; or at least {-(-batch // largest)} ranks",
                next_step="raise it, take more ranks, or lower data.global_batch",
            )

    def evaluations(self, run: TrainingRun) -> tuple[SettingsBase, ...]:
        """The evaluations of `run`: those it names, else classification if there is a head."""
        if run.evaluate is not None:
            return run.evaluate
        if self.trains_classifier:
            return (ClassificationSettings(),)
        return ()

    def prepare(
        self, *, classes: Sequence[str], world: World, engine: EngineSettings
    ) -> dict[str, Any]:
        """Load what `loss` needs besides the model; called once, before the model is built.

        classes: of the data, by label. Puts what is to be said into `messages`.
        Returns what a checkpoint and a resumed run must agree on because of it.
        Raises UserError when it does not fit the run.
        """
        return {}

    def extend_model(self, model: nn.Module, arch: Architecture) -> None:
        """Add what only this objective trains, as the module `model.objective`.

        Called once, before the engine is built, with a random state that depends on the run's seed
        alone. Transfer leaves out this module's tensors.
        """

    def part_of(self, name: str) -> str:
        """The part of the model that has this parameter, for `rate_factor`."""
        return ""

    def rate_factor(self, part: str) -> float:
        """Factor of the learning rate of a part at `step`; 0: it stays as it is."""
        return 1.0

    def num_parameters(self, arch: Architecture) -> int:
        """Exact count of trained values, with those that this objective adds."""
        return int(costs_of(arch).num_parameters(arch))

    def teacher_parameters(self, arch: Architecture) -> int:
        """Values of teachers, which are not trained, as far as they are known."""
        return self.num_parameters(arch) if self.has_teacher else 0

    def train_flops_per_image(self, arch: Architecture) -> int:
        """Model FLOPs of one training step per image, counted as `models.costs` does."""
        return int(costs_of(arch).train_flops_per_image(arch))

    def activation_bytes_per_image(
        self, arch: Architecture, *, precision: str, activation_checkpointing: bool
    ) -> int:
        """Activations kept for the backward pass of one image."""
        bytes_per_image = costs_of(arch).activation_bytes_per_image(
            arch, precision=precision, activation_checkpointing=activation_checkpointing
        )
        return int(bytes_per_image)

    def loss_bytes(
        self, arch: Architecture, *, precision: str, micro_batch: int
    ) -> int:
        """Bytes at the peak of a loss, beside the activations of the model and the head."""
        return 0

    def notes(self) -> Iterator[str]:
        """What a dry run says about the objective besides its name."""
        yield from ()

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        """Mean loss over one micro-batch of this rank; scalar."""
        raise NotImplementedError

    def record(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar of this micro-batch to the mean of a metric, by its full name."""
        self.recorded[name] = value

    def warning(self, means: Mapping[str, float]) -> str | None:
        """What the log says of an interval, from its metrics; None: nothing."""
        return None

    def draw(self, session: Any) -> None:
        """Draw PNG files after the last step, in `session.folder`/pictures.

        Collective; rank 0 writes.
        """


def check_objective(
    objective: Objective, run: TrainingRun, *, num_classes: int
) -> None:
    """Raise UserError when the shards cannot serve the model, the objective and its evaluations."""
    # A dry run on a login node has no shards, so this is checked when they are opened.
    name = objective.settings.name
    path = run.data.path
    if objective.needs_labels and num_classes == 0:
        raise UserError(
            f"{name} needs labels, but the shards of {path} have none",
            where="objective.name",
            next_step="set data.path to labelled shards, or choose an objective without labels",
        )

    # A head of another size would train, with classes that never occur or labels out of its range.
    head_classes = run.model.num_classes
    if objective.trains_classifier and head_classes not in (None, num_classes):
        raise UserError(
            f"{head_classes} classes, but the label map of {path} has {num_classes}",
            where="model.num_classes",
            next_step=f"set model.num_classes={num_classes}, or null, or take other shards",
        )

    # Every evaluation compares with labels, also where the objective needs none.
    names = [evaluation.name for evaluation in objective.evaluations(run)]
    if names and num_classes == 0 and run.data.evaluated is not None:
        raise UserError(
            f"{', '.join(names)} needs labels, but the shards of {path} have none",
            where="evaluate",
            next_step="set evaluate=[], or data.path to labelled shards",
        )


# ---- supervised objectives ----------------------------------------------------------------------


class SupervisedSettings(NamedSection):
    name: Literal["supervised"] = "supervised"
    """The class of each image is predicted from the class token or the pooled tokens."""
    loss: Literal["softmax", "sigmoid", "bce"] = "softmax"
    """sigmoid: binary cross-entropy SUMMED over classes, averaged over the batch (ViT on 21k). bce:
    averaged over classes too, mixed labels both count in full (DeiT-III on ImageNet-1k)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target spread evenly over all classes; softmax and sigmoid only."""

    def problems(self) -> Problems:
        if self.label_smoothing and self.loss == "bce":
            yield (
                "objective.label_smoothing",
                f"has no effect on the {self.loss} loss; set it to 0",
            )


class Supervised(Objective):
    Settings: ClassVar[type[NamedSection]] = SupervisedSettings

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        return self.label_loss(engine.logits(batch.images), batch)

    def label_loss(self, logits_BC: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean loss of the logits against the batch's labels, mixed or not; scalar."""
        from vitscale.objectives.losses import label_loss

        return label_loss(
            logits_BC,
            batch.labels,
            kind=self.settings.loss,
            smoothing=self.settings.label_smoothing,
            mixed_labels_B=batch.mixed_labels,
            mix_lambda_B=batch.mix_lambda,
        )


class DistillationSettings(SupervisedSettings):
    name: Literal["distillation"] = "distillation"  # type: ignore[assignment]  # another entry
    """Labels and a teacher's predictions are learned together. Touvron et al. 2021 (DeiT), sec. 3.
    With model.distillation_token each has a head of its own; without, one head learns both.
    Metrics: `train/label_loss`, `train/teacher_loss`; `train/teacher_agreement`: share of the
    images for which the student's class is the teacher's."""
    teacher: TeacherSettings
    kind: Literal["hard", "soft"] = "hard"
    """hard: cross-entropy with the teacher's class. soft: divergence from its probabilities."""
    alpha: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the loss. DeiT 0.5 (hard) and 0.1 (soft)."""
    tau: PositiveFloat = 1.0
    """soft only: temperature of both softmaxes. DeiT's paper 3, its code 1."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.kind == "hard" and self.tau != 1.0:
            yield ("objective.tau", "has no effect on hard distillation; set it to 1")


class Distillation(Supervised):
    """The teacher is no part of the model: it has no gradients, is in no checkpoint, and every
    rank holds all of it, whatever the ZeRO stage."""

    Settings = DistillationSettings
    teacher: Teacher

    def prepare(
        self, *, classes: Sequence[str], world: World, engine: EngineSettings
    ) -> dict[str, Any]:
        from vitscale.objectives.teacher import open_teacher

        self.teacher = open_teacher(
            self.settings.teacher, classes=classes, world=world, engine=engine
        )
        self.messages += self.teacher.messages
        return {"teacher": self.teacher.frozen.fingerprint}

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from vitscale.objectives.losses import hard_loss, soft_loss

        settings = self.settings
        teacher_BC = self.teacher.logits(batch.images)

        # A distillation token has a head of its own. Without it the two targets pull at one head,
        # as in the ablation of DeiT's table 3.
        if "heads" in engine.known_outputs:
            class_BC, student_BC = engine.forward(batch.images, "heads")
        else:
            class_BC = student_BC = engine.logits(batch.images)

        label_loss = self.label_loss(class_BC, batch)
        if settings.kind == "hard":
            teacher_loss = hard_loss(student_BC, teacher_BC)
        else:
            teacher_loss = soft_loss(student_BC, teacher_BC, tau=settings.tau)

        # The sum alone would not show which of the two has stopped to fall.
        self.record("train/label_loss", label_loss)
        self.record("train/teacher_loss", teacher_loss)
        agrees_B = student_BC.argmax(dim=1) == teacher_BC.argmax(dim=1)
        self.record("train/teacher_agreement", agrees_B.float().mean())
        return (1 - settings.alpha) * label_loss + settings.alpha * teacher_loss

    def notes(self) -> Iterator[str]:
        # The costs of a teacher that is a run of ours are unknown before it is opened.
        settings = self.settings.teacher
        yield f"{self.settings.kind}, from {settings.model or settings.weights}"
        yield "without the costs of the teacher"
