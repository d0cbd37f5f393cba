"""Write the metrics of each log interval: to journal, MLflow and console."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vitscale.data.loader import Batch
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import sum_over_ranks
from vitscale.engine.engine import Engine
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.tracking.console import Console
from vitscale.tracking.tracker import Tracker
from vitscale.training.detectors import SkippedUpdateMonitor, UnreadableSampleMonitor
from vitscale.training.meters import IntervalMeans, peak_flops, peak_memory_gib


@dataclass
class _Clock:
    """The speed of this rank since `start`."""

    start: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
    """Spent waiting for data."""
    num_images: int = 0


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
        self._losses = IntervalMeans(("train/loss",), device)
        self._flops_per_image, self._peak_flops = flops_per_image, peak_flops(device)
        self._skipped = SkippedUpdateMonitor(
            data=data, plan=plan, start_step=start_step, num_skipped=engine.health().skipped
        )
        self._unreadable = UnreadableSampleMonitor(
            data=data, max_fraction=run.data.max_unreadable_fraction
        )
        self._clock = _Clock()
        # Of the first step, which starts workers and compiles: it counts for the throughput only
        # where its interval has no other step.
        self._first: _Clock | None = None

    def add_batch(self, batch: Batch) -> None:
        """Count a micro-batch of this rank."""
        self._clock.num_images += len(batch.labels)
        self._unreadable.add(batch.unreadable)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the mean loss of one micro-batch of this rank, without synchronising."""
        self._losses.add("train/loss", loss)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as spent waiting for data."""
        start = time.perf_counter()
        yield
        self._clock.wait_s += time.perf_counter() - start

    def advance(self, step: int) -> None:
        """After every step: the clock of the first interval, and the profiler."""
        if self._first is None:
            if self._engine.world.device.type == "cuda":
                torch.cuda.synchronize(self._engine.world.device)
            self._first, self._clock = self._clock, _Clock()
            self.console.end_warm_up(step)
        self._profile()

    def write(self, step: int, *, lr: float, metrics: dict[str, float]) -> None:
        """Log the interval that ends with `step`. Collective.

        metrics: of the objective. Raises UserError when training has diverged or the data is too
        damaged.
        """
        self._report_unreadable(step)
        world = self._engine.world
        # First the losses: it waits for the device, so the time is measured correctly.
        metrics = self._losses.read() | self._speed() | metrics
        metrics |= {"train/lr": lr, "train/grad_norm": self._engine.gradient_norm()}
        health = self._engine.health()
        metrics["train/skipped_steps"] = float(health.skipped)
        metrics["vitals/memory_gib"] = peak_memory_gib(world.device)
        if (scale := self._engine.loss_scale) is not None:
            metrics["train/loss_scale"] = scale
        speed, wait = metrics["vitals/images_per_s"], metrics["vitals/data_wait"]
        if self._peak_flops is not None:
            flops = self._flops_per_image * speed / world.world_size
            metrics["vitals/mfu"] = flops / self._peak_flops
        self.tracker.log(metrics, step=step)
        loss = metrics["train/loss"]
        self.console.update(step, loss=loss, lr=lr, images_per_s=speed, data_wait=wait)
        self._skipped.update(health, step=step, loss_scale=scale, say=self.console.message)

    def _speed(self) -> dict[str, float]:
        clock = self._clock if self._clock.num_images else self._first or self._clock
        elapsed, self._clock = time.perf_counter() - clock.start, _Clock()
        own = torch.tensor([clock.num_images, clock.wait_s], dtype=torch.float64)
        num_images, wait_s = sum_over_ranks(own).tolist()
        return {
            "vitals/images_per_s": num_images / elapsed,
            "vitals/data_wait": wait_s / self._engine.world.world_size / elapsed,
        }

    def _report_unreadable(self, step: int) -> None:
        messages = self._unreadable.collect(step)
        for message in messages:
            self.console.message(message)
        if messages:
            self.tracker.log({"vitals/unreadable": float(self._unreadable.num_replaced)}, step=step)
            seen = (step - self._start_step) * self._plan.global_batch
            self._unreadable.check_limit(seen, num_samples=self._plan.num_samples)

    def write_evaluation(self, step: int, metrics: dict[str, float], *, subject: str) -> None:
        """subject: what was evaluated, for the console."""
        self.tracker.log(metrics, step=step)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.console.message(f"step {step}: {shown} on {subject}")
