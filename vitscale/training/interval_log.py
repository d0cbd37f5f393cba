"""Write the metrics of each log interval: to journal, MLflow and console."""

from __future__ import annotations

from collections.abc import Callable

from vitscale.data.training_set import TrainingSet
from vitscale.engine.engine import Engine
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.tracking.console import Console
from vitscale.tracking.tracker import Tracker
from vitscale.training.detectors import SkippedUpdateMonitor, UnreadableSampleMonitor
from vitscale.training.meters import IntervalMeter, peak_flops, peak_memory_gib


class IntervalLog:
    """Measures a training, and watches the metrics on their way to the log."""

    def __init__(
        self,
        run: TrainingRun,
        plan: TrainingPlan,
        data: TrainingSet,
        engine: Engine,
        *,
        start_step: int,
        flops_per_image: float,
        tracker: Tracker,
        console: Console,
        profile: Callable[[], None],
    ) -> None:
        """flops_per_image: of a training step. profile: to be called after every step."""
        self.tracker, self.console, self._profile = tracker, console, profile
        self._plan, self._engine, self._start_step = plan, engine, start_step
        device = engine.world.device
        self.meter = IntervalMeter(device)
        self._flops_per_image, self._peak_flops = flops_per_image, peak_flops(device)
        self._skipped = SkippedUpdateMonitor(
            data=data, plan=plan, start_step=start_step, num_skipped=engine.health().skipped
        )
        self.unreadable = UnreadableSampleMonitor(
            data=data, max_fraction=run.data.max_unreadable_fraction
        )
        self._is_warm = False

    def advance(self, step: int) -> None:
        """After every step: the clocks of the first interval, and the profiler."""
        if not self._is_warm:
            self._is_warm = True
            self.meter.end_warm_up()
            self.console.end_warm_up(step)
        self._profile()

    def write(self, step: int, *, lr: float, metrics: dict[str, float]) -> None:
        """Log the interval that ends with `step`. Collective.

        metrics: of the objective. Raises UserError when training has diverged or the data is too
        damaged.
        """
        self._report_unreadable(step)
        metrics = self.meter.read() | metrics
        loss, speed = metrics["train/loss"], metrics["vitals/images_per_s"]
        metrics |= {"train/lr": lr, "train/grad_norm": self._engine.gradient_norm()}
        health, world = self._engine.health(), self._engine.world
        metrics["train/skipped_steps"] = float(health.skipped)
        metrics["vitals/memory_gib"] = peak_memory_gib(world.device)
        if (scale := self._engine.loss_scale) is not None:
            metrics["train/loss_scale"] = scale
        if self._peak_flops is not None:
            flops = self._flops_per_image * speed / world.world_size
            metrics["vitals/mfu"] = flops / self._peak_flops
        self.tracker.log(metrics, step=step)
        wait = metrics["vitals/data_wait"]
        self.console.update(step, loss=loss, lr=lr, images_per_s=speed, data_wait=wait)
        self._skipped.update(health, step=step, loss_scale=scale, say=self.console.message)

    def _report_unreadable(self, step: int) -> None:
        messages = self.unreadable.collect(step)
        for message in messages:
            self.console.message(message)
        if messages:
            self.tracker.log({"vitals/unreadable": float(self.unreadable.num_replaced)}, step=step)
            seen = (step - self._start_step) * self._plan.global_batch
            self.unreadable.check_limit(seen, num_samples=self._plan.num_samples)

    def write_evaluation(self, step: int, metrics: dict[str, float], *, subject: str) -> None:
        """subject: what was evaluated, for the console."""
        self.tracker.log(metrics, step=step)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.console.message(f"step {step}: {shown} on {subject}")
