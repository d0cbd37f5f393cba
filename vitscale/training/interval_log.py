"""Write the metrics of each log interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitscale.distributed.world import World
from vitscale.engine.engine import Engine
from vitscale.runs.training import TrainingPlan
from vitscale.tracking.console import Console
from vitscale.tracking.tracker import Tracker
from vitscale.training.detectors import SkippedUpdateMonitor, UnreadableSampleMonitor
from vitscale.training.meters import IntervalMeter, peak_memory_gib


@dataclass(kw_only=True)
class IntervalLog:
    """Journal, MLflow, console, and what watches the metrics on the way there."""

    folder: Path
    """Of the run."""
    world: World
    plan: TrainingPlan
    start_step: int
    tracker: Tracker
    console: Console
    meter: IntervalMeter
    skipped: SkippedUpdateMonitor
    unreadable: UnreadableSampleMonitor
    flops_per_image: float
    """Of a training step."""
    peak_flops: float | None
    """FLOP/s of one device by its datasheet, where that is known."""
    profile: Callable[[], None]
    """To be called after every step."""
    is_warm: bool = False
    """Whether a step ended since the start."""

    def advance(self, step: int) -> None:
        """After every step: the clocks of the first interval, and the profiler."""
        if not self.is_warm:
            self.is_warm = True
            self.meter.end_warm_up()
            self.console.end_warm_up(step)
        self.profile()

    def write(self, step: int, *, lr: float, engine: Engine, metrics: dict[str, float]) -> None:
        """Log the interval that ends with `step`. Collective.

        metrics: of the objective. Raises UserError when training has diverged or the data is too
        damaged.
        """
        self._report_unreadable(step)
        metrics = self.meter.read() | metrics
        loss, speed = metrics["train/loss"], metrics["vitals/images_per_s"]
        metrics |= {"train/lr": lr, "train/grad_norm": engine.gradient_norm()}
        health = engine.health()
        metrics["train/skipped_steps"] = float(health.skipped)
        metrics["vitals/memory_gib"] = peak_memory_gib(self.world.device)
        if (scale := engine.loss_scale) is not None:
            metrics["train/loss_scale"] = scale
        if self.peak_flops is not None:
            flops = self.flops_per_image * speed / self.world.world_size
            metrics["vitals/mfu"] = flops / self.peak_flops
        self.tracker.log(metrics, step=step)
        wait = metrics["vitals/data_wait"]
        self.console.update(step, loss=loss, lr=lr, images_per_s=speed, data_wait=wait)
        self.skipped.update(health, step=step, loss_scale=scale, say=self.console.message)

    def _report_unreadable(self, step: int) -> None:
        messages = self.unreadable.collect(step)
        for message in messages:
            self.console.message(message)
        if messages:
            self.tracker.log({"vitals/unreadable": float(self.unreadable.num_replaced)}, step=step)
            seen = (step - self.start_step) * self.plan.global_batch
            self.unreadable.check_limit(seen, num_samples=self.plan.num_samples)

    def write_evaluation(self, step: int, metrics: dict[str, float], *, subject: str) -> None:
        """subject: what was evaluated, for the console."""
        self.tracker.log(metrics, step=step)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.console.message(f"step {step}: {shown} on {subject}")
