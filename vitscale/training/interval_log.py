"""Measure a training, and write the metrics of each log interval: to journal, MLflow and console.

Owns: means over micro-batches and ranks, throughput, memory, and traces of steps.
Leaves out: the FLOPs formula (`models.costs`), limits on what is measured (`detectors`).
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vitscale.data.loader import Batch
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import sum_over_ranks
from vitscale.engine.engine import Engine
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.tracking.console import format_duration
from vitscale.tracking.tracker import Tracker
from vitscale.training.detectors import SkippedUpdateMonitor, UnreadableSampleMonitor

# Dense bf16 FLOP/s by NVIDIA's datasheets, by a part of the device name.
PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40": 181e12,
    "V100": 112e12,
}

PROFILE_SKIPPED = 5


def peak_flops(device: torch.device) -> float | None:
    """Datasheet rate of the device; None where it is not known (CPUs among them)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_BF16_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


@contextmanager
def profiled(path: Path | None, *, steps: int) -> Iterator[Callable[[], None]]:
    """Trace `steps` steps after the first ones into `path`, for chrome://tracing or Perfetto.

    Yields a function to call at the end of every step. With path None or 0 steps it does nothing.
    """
    if path is None or steps == 0:
        yield lambda: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=PROFILE_SKIPPED - 1, warmup=1, active=steps, repeat=1
        ),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
    ) as profile:
        yield profile.step


class IntervalMeans:
    """Means of values of micro-batches since the last reading, by name.

    Sums stay on the device: nothing synchronises between readings.
    """

    def __init__(self) -> None:
        # [sum, count] of the values that are finite
        self._sums_2 = dict[str, torch.Tensor]()

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add scalars of one micro-batch of this rank; every rank adds the same names.

        A value that is not finite is skipped: so is the update of a loss that is not.
        """
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            finite = torch.isfinite(value)
            own = torch.stack([torch.where(finite, value, 0.0), finite.to(torch.float64)])
            self._sums_2[name] = own + self._sums_2[name] if name in self._sums_2 else own

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last call, NaN where no value was finite. Collective."""
        names, sums_N2 = list(self._sums_2), torch.stack(list(self._sums_2.values())).cpu()
        self._sums_2.clear()
        return {
            name: total / count if count else math.nan
            for name, (total, count) in zip(names, sum_over_ranks(sums_N2).tolist(), strict=True)
        }


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
        say: Callable[[str], None],
        profile: Callable[[], None],
    ) -> None:
        """flops_per_image: of a training step. profile: to be called after every step."""
        self.tracker, self.say, self._profile = tracker, say, profile
        self._plan, self._engine, self._start_step = plan, engine, start_step
        self._flops_per_image = flops_per_image
        self._peak_flops = peak_flops(engine.world.device)
        self.means = IntervalMeans()
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
        self._profile()

    def write(self, step: int, *, lr: float) -> None:
        """Log the interval that ends with `step`. Collective.

        Raises UserError when training has diverged or the data is too damaged.
        """
        engine, say = self._engine, self.say
        # First the means: they wait for the device, so the time is measured correctly.
        metrics = self.means.read() | self._speed()
        metrics |= {"train/lr": lr, "train/grad_norm": engine.gradient_norm()}
        health = engine.health()
        metrics["train/skipped_steps"] = float(health.skipped)
        metrics["vitals/memory_gib"] = peak_memory_gib(engine.world.device)
        if (scale := engine.loss_scale) is not None:
            metrics["train/loss_scale"] = scale
        speed, wait = metrics["vitals/images_per_s"], metrics["vitals/data_wait"]
        if self._peak_flops is not None:
            flops = self._flops_per_image * speed / engine.world.world_size
            metrics["vitals/mfu"] = flops / self._peak_flops
        seen, epoch = (step - self._start_step) * self._plan.global_batch, self._plan.num_samples
        self._unreadable.report(step, num_seen=seen, num_samples=epoch, say=say)
        if self._unreadable.num_replaced:
            metrics["vitals/unreadable"] = float(self._unreadable.num_replaced)
        self.tracker.log(metrics, step=step)
        steps, loss = self._plan.total_steps, metrics["train/loss"]
        eta_s = (steps - step) * self._plan.global_batch / speed
        say(
            f"step {step}/{steps} loss {loss:.4f} lr {lr:.1e} img/s {speed:.0f} "
            f"wait {wait:.0%} eta {format_duration(eta_s)}"
        )
        self._skipped.update(health, step=step, loss_scale=scale, say=say)

    def _speed(self) -> dict[str, float]:
        clock = self._clock if self._clock.num_images else self._first or self._clock
        elapsed, self._clock = time.perf_counter() - clock.start, _Clock()
        own = torch.tensor([clock.num_images, clock.wait_s], dtype=torch.float64)
        num_images, wait_s = sum_over_ranks(own).tolist()
        return {
            "vitals/images_per_s": num_images / elapsed,
            "vitals/data_wait": wait_s / self._engine.world.world_size / elapsed,
        }
