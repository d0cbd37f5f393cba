"""Predict throughput and goodput of a run on a number of nodes.

Owns: the work of a run at a size, and its prediction as numbers and as a line of text.
Leaves out: formulas (`steps`, `recovery`), and data facts (`dry_run`). Needs no torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from finetune.run import FinetuneRun
from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Ranks
from launch.planning.scaling.recovery import SECONDS_PER_DAY, Recovery, recovery
from launch.planning.scaling.steps import StepTime, Work, step_time
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.runs.training import TrainingPlan, training_plan

# Of the recipe, or of the images of a GPU: the global batch then grows with the nodes.
Batch = Literal["global", "per GPU"]
GPUS_KEY = "launch.gpus_per_node"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A run on some nodes."""

    ranks: Ranks
    work: Work
    step: StepTime
    recovery: Recovery
    one_node_images_per_s: float
    """Of the same batch rule on one node."""
    every_steps: int
    """Steps between checkpoints, as configured."""
    total_images: int

    @property
    def images_per_s(self) -> float:
        """While it trains."""
        return self.work.images_per_rank * self.ranks.world / self.step.total

    @property
    def efficiency(self) -> float:
        return self.images_per_s / (self.one_node_images_per_s * self.ranks.nodes)

    @property
    def best_steps(self) -> int:
        """Steps between checkpoints with the least loss."""
        return max(1, round(self.recovery.best_interval / self.step.total))

    @property
    def goodput(self) -> float:
        """Share of the time in which training advances, at the best interval."""
        return self.recovery.goodput(self.best_steps * self.step.total)

    @property
    def configured_goodput(self) -> float:
        return self.recovery.goodput(self.every_steps * self.step.total)

    @property
    def effective_images_per_s(self) -> float:
        """Over the whole job, failures included."""
        return self.images_per_s * self.goodput

    @property
    def days(self) -> float:
        """Of the whole run, in one job that always finds its nodes."""
        rate = self.images_per_s * self.configured_goodput
        return self.total_images / rate / SECONDS_PER_DAY if rate else float("inf")


def predict(
    run: PretrainRun | FinetuneRun,
    *,
    nodes: int,
    cluster: Cluster,
    num_classes: int,
    total_images: int,
    batch: Batch = "global",
) -> Prediction:
    """Raises UserError for runs without GPUs, and where the batch does not divide over the GPUs.

    num_classes: of the head, 0 without one; total_images: of the whole run.
    A run with several image sizes is predicted at its last.
    """
    if not run.launch.gpus_per_node:
        raise UserError(
            "0: predictions are for GPUs",
            where=GPUS_KEY,
            next_step=f"set {GPUS_KEY} and launch.tasks_per_node",
        )
    ranks = Ranks(nodes=nodes, per_node=run.launch.tasks_per_node)
    work, step = _timed(run, ranks, cluster, num_classes=num_classes, batch=batch)
    one_rate = work.images_per_rank * ranks.per_node / step.total
    if nodes > 1:
        # Where the batch divides over these nodes only, they are their own measure.
        with suppress(UserError):
            one_node = Ranks(nodes=1, per_node=ranks.per_node)
            one, alone = _timed(run, one_node, cluster, num_classes=num_classes, batch=batch)
            one_rate = one.images_per_rank * ranks.per_node / alone.total
    return Prediction(
        ranks=ranks,
        work=work,
        step=step,
        recovery=recovery(work, ranks=ranks, cluster=cluster, check_s=run.launch.doctor_seconds),
        one_node_images_per_s=one_rate,
        every_steps=run.checkpoint.every_steps,
        total_images=total_images,
    )


def _timed(
    run: PretrainRun | FinetuneRun,
    ranks: Ranks,
    cluster: Cluster,
    *,
    num_classes: int,
    batch: Batch,
) -> tuple[Work, StepTime]:
    data = run.data
    if batch == "per GPU":
        per_rank = max(1, data.global_batch // (run.launch.nodes * run.launch.tasks_per_node))
        data = data.model_copy(update={"global_batch": per_rank * ranks.world})
    # With so many steps that no batch makes them too few.
    endless = {"epochs": None, "steps": 10**12, "warmup_epochs": 0.0, "warmup_steps": 0}
    schedule = run.schedule.model_copy(update=endless)
    sized = run.model_copy(update={"data": data, "schedule": schedule})
    plan = training_plan(sized, world_size=ranks.world, num_samples=0, step=10**12)
    work = work_of(sized, plan, num_classes=num_classes)
    return work, step_time(work, ranks=ranks, cluster=cluster)


def work_of(run: PretrainRun | FinetuneRun, plan: TrainingPlan, *, num_classes: int) -> Work:
    """One update of the run as planned."""
    objective = run.make_objective()
    model = run.model.model_copy(update={"image_size": plan.image_size})
    arch = model.architecture(num_classes=num_classes)
    size = 4 if run.engine.precision == "fp32" else 2
    parameters = objective.num_parameters(arch)
    average = 4 if run.optim.ema is not None else 0
    return Work(
        parameters=parameters,
        flops_per_image=objective.train_flops_per_image(arch),
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        zero_stage=run.engine.zero_stage,
        weight_bytes=size,
        gradient_bytes=4 if run.engine.reduce_precision == "fp32" else size,
        bucket_elements=run.engine.reduce_bucket_elements,
        overlap=run.engine.overlap_comm,
        head_parameters=num_classes * (arch.feature_width + 1),
        cores_per_node=run.launch.tasks_per_node * run.launch.cpus_per_task,
        # Checkpoints hold fp32 weights, optimiser states and the average.
        state_bytes=parameters * (4 + run.optim.state_bytes_per_parameter + average),
    )


def line(prediction: Prediction) -> str:
    """The prediction as a dry run shows it."""
    step, found = prediction.step, prediction
    return (
        f"{found.images_per_s:,.0f} images/s, {found.efficiency:.0%} of {found.ranks.nodes} x one "
        f"node; {step.total:.3g} s per step, {step.exposed / step.total:.0%} of it communication; "
        f"{found.days:.3g} days at a goodput of {found.configured_goodput:.1%}"
    )
