"""The sections that pre-training and fine-tuning runs share, and the plan derived from them.

Needs no torch: the plan is made on login nodes too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from vitscale.checkpoint.folders import AT_STEP, place_of
from vitscale.config.errors import UserError
from vitscale.config.section import Items, NamedSection, Problems, Run, Section
from vitscale.data.index import held_out_split
from vitscale.data.settings import DataSettings, data_problems
from vitscale.engine.settings import EngineSettings, raw_problems
from vitscale.evaluation.registry import (
    EvaluationSettings,
    groups_of_names,
    listed_twice,
)
from vitscale.models.registry import ModelSettings
from vitscale.models.settings import ViTSettings
from vitscale.optim.settings import (
    OptimSettings,
    ScheduleSettings,
    optim_problems,
    schedule_problems,
)
from vitscale.runs.launching import LaunchSettings, launch_problems
from vitscale.tracking.settings import TrackingSettings, tracking_problems

# Keys of `model` that mean the head of the training before.
OF_HEAD = {"num_classes", "head_bias", "head_std"}
OF_TRANSFER = ("init_weights", "keep_head", "position_embedding", "init_patch")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class CheckpointSettings(Section):
    """When checkpoints are written, and how many stay."""

    every_steps: PositiveInt = 1000
    """Steps between checkpoints; the last step and a new best value get one, too."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay, beside the best one; older ones are removed after a commit."""


class TrainingRun(Run):
    """Sections of a run that trains a model. Concrete types: `PretrainRun`, `FinetuneRun`."""

    name: str
    """Name in MLflow and of the run folder: letters, digits, dot, dash, underscore."""
    output: str | None = None
    """Run folder; null: runs/NAME."""
    seed: NonNegativeInt = 0
    """Seed of initial weights, sample order, augmentation and dropout."""
    data: DataSettings
    model: ModelSettings = ViTSettings()
    """The model family and its size. Where neither `preset` nor all sizes are given, the model of
    `init`: its keys, and the pixels that it expects in `data`, wherever nobody sets them."""
    init: str | None = None
    """Initial weights: a run folder, a checkpoint folder, a file of weights (.npz, .safetensors,
    .pth), a folder of Hugging Face or timm, timm/NAME or hf://OWNER/NAME; see docs/weights.md.
    RUN@STEP in pre-training: a branch of a run, from that step on, with optimiser and position; see
    docs/methods.md. null: none."""
    init_weights: Literal["auto", "model", "ema"] = "auto"
    """Start from the weights themselves (model) or their average (ema). auto: the average where
    the checkpoint has one."""
    keep_head: bool | Literal["auto", "slice"] = "auto"
    """true: keep the head of `init` too, for the same classes, matched by name (DeiT at 384 px).
    slice: keep its rows of the shards' classes (EVA's 21k head for 1k labels). false: a new head.
    auto: true where both name the same classes and the head fits, else false."""
    position_embedding: Literal["auto", "google", "timm", "deit", "dinov2"] = "auto"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md. auto: as
    the library does that the weights come from."""
    init_patch: Literal["same", "resize"] = "same"
    """resize: `init` may have another patch size; its patch embedding is resized to the model's.
    Beyer et al. 2023 (FlexiViT)."""
    optim: OptimSettings
    schedule: ScheduleSettings
    engine: EngineSettings = EngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluate: Items[EvaluationSettings] | None = None
    """Evaluations of `data.val_split`, or their names, as in evaluate=knn,few_shot; all of them run
    after the last step too. Empty: none. null: classification after the last step, if the objective
    trains a classifier."""
    tracking: TrackingSettings = TrackingSettings()
    launch: LaunchSettings = LaunchSettings()
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed keys, merged over the generated configuration. For experts."""
    stage: str
    """Name of the stage; a concrete type has one value."""
    objective: NamedSection
    """Prediction target of the training, and its loss; a concrete type lists the choices."""

    _names = field_validator("evaluate", mode="before")(groups_of_names)

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    @property
    def trunk(self) -> Path | None:
        """The checkpoint of another run that this one continues with all of its state, if any."""
        if self.stage != "pretrain" or not AT_STEP.fullmatch(self.init or ""):
            return None
        return place_of(str(self.init))

    def make_objective(self) -> Any:
        """Make the `Objective` that `objective` names."""
        raise NotImplementedError

    def implied(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from held_out_split(self.data)
        if self.init is None or self.model.is_complete:
            return
        try:
            # Imported late: torch takes seconds, and all other runs start without it.
            from vitscale.evaluation.trained_model import PIXELS, read_model
        except ModuleNotFoundError as error:
            raise UserError(
                f"to read the model of init, this machine needs {error.name}",
                where="model",
                next_step="describe the model, such as model.preset=S/16",
            ) from None
        source, _, arch = read_model(
            self.init, weights=self.init_weights, model=self.model
        )

        # The family's keys, without those that mean the classes of the training before.
        model = arch.model_dump(mode="json", exclude_unset=True, exclude=OF_HEAD)
        expected = source.preprocessing
        pixels = {key: expected[key] for key in PIXELS if key in expected}
        # Crops of the training are resized alike; they have no filter `area`.
        if pixels["eval_interpolation"] != "area":
            pixels["interpolation"] = pixels["eval_interpolation"]
        yield f"init={self.init}", {"model": model, "data": pixels}

    def problems(self) -> Problems:
        yield from self.model.problems()
        yield from data_problems(self.data)
        schedule = self.schedule
        data = self.data
        engine = self.engine

        if self.init is None and not self.model.is_complete:
            yield (
                "init",
                "null, and `model` describes no model; set init=timm/vit_small_patch16_224."
                "augreg_in21k for published weights, or model.preset=S/16 for random ones",
            )
        for key in OF_TRANSFER:
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.trunk is not None:
                yield key, "a branch has all state of its trunk; remove the key"
        if not RUN_NAME.fullmatch(self.name):
            what = "use letters, digits, '.', '-', '_', at most 100 of them"
            yield ("name", f"{self.name!r}: {what}")
        if (schedule.epochs is None) == (schedule.steps is None):
            given = f"(epochs={schedule.epochs}, steps={schedule.steps})"
            yield ("schedule", f"give either epochs or steps {given}")
        if schedule.final_lr > self.optim.lr:
            what = f"exceeds the peak optim.lr {self.optim.lr}"
            yield ("schedule.final_lr", f"{schedule.final_lr} {what}")

        if data.mixture and sum(part.share for part in data.mixture) > 0.999:
            yield (
                "data.mixture",
                "shares of 0.999 or more together leave nothing for data.path",
            )
        if min(data.std) <= 0:
            yield ("data.std", f"{data.std} must be positive")

        if engine.compile is True and engine.zero_stage == 3:
            what = "ZeRO 3's hooks break blocks apart; use auto, or zero_stage<=2"
            yield ("engine.compile", what)
        if engine.zero_stage == 0 and engine.precision == "fp16":
            yield (
                "engine.precision",
                "fp16 keeps its loss scale in ZeRO 1 to 3; set zero_stage=1",
            )

        yield from listed_twice(self.evaluate or ())
        yield from tracking_problems(self.tracking)
        yield from schedule_problems(schedule)
        yield from optim_problems(self.optim, zero_stage=engine.zero_stage)
        yield from raw_problems(self.deepspeed, engine=engine)
        yield from launch_problems(self.launch)
        # The objective knows which models and data it can train on.
        yield from self.make_objective().problems(self)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Values derived from a run, the world size and the number of samples; never written back."""

    world_size: int
    global_batch: int
    micro_batch: int
    accumulation: int
    num_samples: int
    total_steps: int
    warmup_steps: int
    cooldown_steps: int
    advice: str | None = None
    """A sentence, where another global batch would allow a far larger micro-batch."""

    @property
    def equation(self) -> str:
        text = (
            f"global batch {self.global_batch} = {self.world_size} ranks "
            f"x {self.micro_batch} images"
        )
        if self.accumulation > 1:
            text += f" x {self.accumulation} accumulated"
        return text


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The micro-batches that a rank's share of the global batch can be divided into."""

    largest: int
    """engine.max_micro_batch"""
    unit: int
    """A micro-batch is a multiple of it."""

    def largest_for(self, share: int) -> int:
        """The largest divisor of the share that is allowed; 0 if there is none."""
        sizes = range(self.unit, min(share, self.largest) + 1, self.unit)
        return max((size for size in sizes if share % size == 0), default=0)

    def is_small(self, share: int) -> bool:
        """Whether the share has no divisor near the largest micro-batch, so that steps are slow."""
        found = self.largest_for(share)
        largest = self.largest - self.largest % self.unit
        if found in (share, largest):
            return False
        return found <= 2 or 2 * found < self.largest

    def advice(self, share: int, *, world_size: int) -> str | None:
        """A sentence about a share that is divided into small micro-batches, with the nearest
        global batches whose shares are not; None for any other share."""
        if not self.is_small(share):
            return None

        # A multiple of the largest is never small, nor is a share that needs no division.
        below = range(share - 1, 0, -1)
        above = range(share + 1, share + 2 * self.largest + 1)
        nearest = []
        for shares in (below, above):
            better = next((each for each in shares if not self.is_small(each)), None)
            if better is not None:
                size = self.largest_for(better)
                nearest.append(f"{better * world_size} ({size} images)")

        return (
            f"a micro-batch has only {self.largest_for(share)} of the {self.largest} images that "
            f"engine.max_micro_batch allows, which is slow: the {share} images of each of "
            f"{world_size} ranks have no larger divisor; the nearest data.global_batch with one: "
            f"{' or '.join(nearest)}"
        )


def training_plan(
    run: TrainingRun, *, world_size: int, num_samples: int
) -> TrainingPlan:
    """Derive micro-batch, accumulation and steps.

    The micro-batch is the largest divisor of a rank's share within `engine.max_micro_batch`, even
    with mixing. Raises UserError when there is none, or the steps do not fit the schedule.
    """
    schedule = run.schedule
    batch = run.data.global_batch
    largest = run.engine.max_micro_batch
    share, rest = divmod(batch, world_size)
    if rest:
        sizes = [
            str(size) for size in (batch - rest, batch - rest + world_size) if size
        ]
        raise UserError(
            f"{batch} images do not divide over {world_size} ranks",
            where="data.global_batch",
            allowed=f"multiples of {world_size}: {' or '.join(sizes)}",
            next_step="change data.global_batch or the number of processes",
        )

    # Images are mixed in pairs.
    micro_batches = MicroBatches(
        largest=largest, unit=1 if run.data.mixing is None else 2
    )
    micro_batch = micro_batches.largest_for(share)
    if not micro_batch:
        raise UserError(
            f"mixes neighbours in pairs, but no even micro-batch divides the {share} images of "
            f"each of {world_size} ranks (engine.max_micro_batch={largest})",
            where="data.mixing",
            allowed=f"data.global_batch: multiples of {2 * world_size}; engine.max_micro_batch: "
            "at least 2",
            next_step="change one of these, or set data.mixing=null",
        )

    run.make_objective().check_batch(run, share=share, num_samples=num_samples)

    # Exactly one of `steps` and `epochs` is set.
    total = schedule.steps or max(1, int((schedule.epochs or 0) * num_samples) // batch)
    warmup = schedule.warmup_steps or int(schedule.warmup_epochs * num_samples) // batch
    cooldown = (
        max(1, round(schedule.cooldown_share * total)) if schedule.cooldown_share else 0
    )
    if warmup >= total or warmup + cooldown > total:
        unit = "warmup_epochs" if schedule.warmup_epochs else "warmup_steps"
        raise UserError(
            f"{warmup} warm-up steps and {cooldown} of cool-down do not fit in {total} steps",
            where=f"schedule.{'cooldown_share' if cooldown else unit}",
            next_step=f"lower schedule.{unit} or schedule.cooldown_share, or lengthen the run",
        )

    return TrainingPlan(
        world_size=world_size,
        global_batch=batch,
        micro_batch=micro_batch,
        accumulation=share // micro_batch,
        num_samples=num_samples,
        total_steps=total,
        warmup_steps=warmup,
        cooldown_steps=cooldown,
        advice=micro_batches.advice(share, world_size=world_size),
    )
