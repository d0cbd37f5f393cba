"""Measure a training, write the metrics of each log interval, and end a run that is unhealthy.

Means over micro-batches and ranks, throughput, memory and traces of steps go to journal, MLflow and
console; skipped updates and unreadable samples are named, and too many of them end the run.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from vitscale.config.errors import DivergedError, UserError
from vitscale.data.index import sample_names, sample_numbers
from vitscale.data.loader import Batch
from vitscale.data.samples import Unreadable
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import gather_objects, sum_over_ranks
from vitscale.engine.engine import Engine
from vitscale.engine.gradients import Health
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.tracking.journal import format_duration
from vitscale.tracking.tracker import Tracker

# Dense bf16 FLOP/s by NVIDIA's datasheets, by a part of the device name.
PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40": 181e12,
    "V100": 112e12,
}
PROFILE_SKIPPED = 5
# A run ends after this many updates in a row whose loss or gradient was not finite. It also ends
# when more than this many of 100 updates were such, or a tenth of a log interval that is longer.
MAX_SKIPPED = 10
WINDOW = 100
# Most samples that are named: unreadable ones, and those of a skipped update.
UNREADABLE_SHOWN = 10
NAMES_SHOWN = 8
# Of all steps, before an objective is asked for warnings.
WARM_SHARE = 0.05

Say = Callable[[str], None]
# Names of samples, given as (position in the training set's parts, sample).
Names = Callable[[Sequence[tuple[int, int]]], list[str]]


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
        # [sum, count] of the values that are finite, in fp64: long sums lose digits in fp32.
        self._sums_2 = dict[str, torch.Tensor]()

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add scalars of one micro-batch of this rank; every rank adds the same names.

        A value that is not finite is skipped: so is the update of a loss that is not.
        """
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            finite = torch.isfinite(value)
            # A mask instead of a branch, which would wait for the device.
            own = torch.stack(
                [torch.where(finite, value, 0.0), finite.to(torch.float64)]
            )
            self._sums_2[name] = own + self._sums_2.get(name, 0.0)

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last call, NaN where no value was finite. Collective."""
        names = list(self._sums_2)
        # The only copy from the device in an interval.
        sums_N2 = torch.stack(list(self._sums_2.values())).cpu()
        self._sums_2.clear()
        totals_N, counts_N = sum_over_ranks(sums_N2).unbind(1)
        return dict(zip(names, (totals_N / counts_N).tolist(), strict=True))


def names_of(data: TrainingSet, *, is_first: bool) -> Names:
    """How samples are named: by their keys on the rank that prints them, so that hundreds of others
    do not read the index for it."""
    return partial(sample_names if is_first else sample_numbers, data.parts)


@dataclass(kw_only=True)
class SkippedUpdateMonitor:
    """Report updates that the guard skipped, and end a run that skips too many."""

    data: TrainingSet
    names: Names
    plan: TrainingPlan
    start_step: int
    num_skipped: int
    """Updates skipped before `start_step`."""
    say: Say

    def __post_init__(self) -> None:
        # (step, updates skipped by then) of log lines; between the first and the last lie at least
        # `WINDOW` updates, as soon as there were so many.
        self._marks = deque([(self.start_step, self.num_skipped)])

    def update(self, health: Health, *, step: int, loss_scale: float | None) -> None:
        """Name the samples of the last skipped update, if there are new ones. Collective.

        loss_scale: of fp16, None otherwise. Raises DivergedError after too many in a row or too
        large a share, except while fp16 still searches its scale by overflowing.
        """
        num_new = health.skipped - self._marks[-1][1]
        self._marks.append((step, health.skipped))
        while step - self._marks[1][0] >= WINDOW:
            self._marks.popleft()

        if not num_new or health.last_step is None:
            return

        # A rank knows its own losses alone. All may be finite, and a gradient overflow.
        found = enumerate(gather_objects(health.bad_micro_step))
        ranks = {rank: number for rank, number in found if number is not None}
        what = "the gradient was not finite"
        if ranks:
            what = f"the loss was not finite on rank {', '.join(map(str, ranks))}"

        names = self._names_at(health.last_step, ranks)
        last = f"the last at step {health.last_step}"
        total = f"{num_new} updates skipped, {health.skipped} since the start"
        self.say(f"{total}, {last}: {what}; samples {names}")

        length = step - self._marks[0][0]
        num_skipped = health.skipped - self._marks[0][1]
        many = ""
        if health.longest >= MAX_SKIPPED:
            many = f"{health.longest} updates in a row"
        elif num_skipped > MAX_SKIPPED * max(length / WINDOW, 1):
            many = f"{num_skipped} of the last {length} updates"
        # A scale that is still falling towards 1 skips updates on the way, which is no divergence.
        if many and not (loss_scale is not None and loss_scale > 1):
            raise DivergedError(
                f"{many} were skipped, {last}: {what}\n    samples of that step: {names}",
                next_step="lower optim.lr, lengthen schedule.warmup_steps or set "
                "optim.clip_norm=1; all checkpoints hold finite weights",
            )

    def _names_at(self, step: int, micro_steps: Mapping[int, int]) -> str:
        """Keys of the samples of a step (counted from 1), at most `NAMES_SHOWN`.

        micro_steps: rank -> the micro-step whose samples are meant; empty: all of the step.
        """
        if self.data.order is None:
            return "that are not known: streamed tars have no positions"

        plan = self.plan
        start = (step - 1) * plan.global_batch
        share = plan.micro_batch
        # Ranks take turns within a global batch, one micro-batch after another.
        positions = [
            start + (number * plan.world_size + rank) * share + each
            for rank, number in micro_steps.items()
            for each in range(share)
        ] or range(start, start + plan.global_batch)

        draws = [self.data.order.at(position) for position in positions[:NAMES_SHOWN]]
        names = self.names([(draw.part, draw.sample) for draw in draws])
        text = ", ".join(names)
        num_more = len(positions) - len(draws)
        if num_more:
            text += f" and {num_more} more"
        return text


@dataclass(kw_only=True)
class UnreadableSampleMonitor:
    """Report samples that were replaced because they could not be read."""

    data: TrainingSet
    names: Names
    max_fraction: float
    num_replaced: int
    """On all ranks since step 0, as of the last `report`; at first, of earlier starts."""
    say: Say
    pending: list[Unreadable] = field(default_factory=list)
    """Samples of this rank that were not reported yet."""

    def add(self, unreadable: Iterable[Unreadable]) -> None:
        """Samples that were replaced on this rank."""
        self.pending.extend(unreadable)

    def report(self, step: int, *, num_seen: int, num_samples: int) -> None:
        """Name the samples that were replaced on any rank since the last call, at most
        `UNREADABLE_SHOWN` of them. Collective.

        num_seen: samples seen since step 0; num_samples: those of one epoch.
        Raises UserError when too many of the larger number were replaced.
        """
        own = self.pending
        self.pending = []
        gathered = gather_objects((len(own), own[:UNREADABLE_SHOWN]))
        num_new = sum(count for count, _ in gathered)
        if not num_new:
            return

        self.num_replaced += num_new
        # The first ranks fill the list: the samples named are examples.
        shown = [each for _, some in gathered for each in some][:UNREADABLE_SHOWN]
        names = [repr(each.key) for each in shown]

        if self.data.order is not None:
            names = self.names([(each.part, each.sample) for each in shown])
        for name, each in zip(names, shown, strict=True):
            self.say(f"{each.shard}: sample {name} was replaced: {each.error}")
        line = f"step {step}: {self.num_replaced} samples replaced since step 0"
        unnamed = num_new - len(shown)
        if unnamed:
            line += f"; {unnamed} of the last {num_new} are not named here"
        self.say(line)

        if self.num_replaced > self.max_fraction * max(num_seen, num_samples):
            raise UserError(
                f"{self.num_replaced} samples could not be read, more than "
                f"data.max_unreadable_fraction={self.max_fraction:g} allows; the last: "
                f"{names[-1]}",
                where=shown[-1].shard,
                next_step="find every damaged shard with vitscale prepare verify and copy it again",
            )


@dataclass
class _Clock:
    """The speed of this rank since `start`."""

    start: float = field(default_factory=lambda: time.perf_counter())
    """Later by every time that does not count."""
    wait_s: float = 0.0
    """Spent waiting for data."""
    num_images: int = 0


@dataclass
class IntervalLog:
    """Measures a training, and watches the metrics on their way to the log."""

    run: TrainingRun
    plan: TrainingPlan
    data: TrainingSet
    engine: Engine
    start_step: int
    num_replaced: int
    """Samples replaced before this start."""
    flops_per_image: float
    """Of a training step."""
    tracker: Tracker
    say: Say
    profile: Callable[[], None]
    """Called after every step."""
    warning: Callable[[Mapping[str, float]], str | None]
    """What an objective says of the metrics of an interval."""

    def __post_init__(self) -> None:
        world = self.engine.world
        self._peak_flops = peak_flops(world.device)
        self.means = IntervalMeans()
        names = names_of(self.data, is_first=world.is_first)
        self._skipped = SkippedUpdateMonitor(
            data=self.data,
            names=names,
            plan=self.plan,
            start_step=self.start_step,
            num_skipped=self.engine.health().skipped,
            say=self.say,
        )
        self._unreadable = UnreadableSampleMonitor(
            data=self.data,
            names=names,
            max_fraction=self.run.data.max_unreadable_fraction,
            num_replaced=self.num_replaced,
            say=self.say,
        )

        self._clock = _Clock()
        self._paced_from = (self._clock.start, self.start_step)
        # The clock of the first step, which starts workers and compiles. It counts for the
        # throughput only where its interval has no other step.
        self._first: _Clock | None = None
        self._last_warning: str | None = None

    def add_batch(self, batch: Batch) -> None:
        self._clock.num_images += len(batch.labels)
        self._unreadable.add(batch.unreadable)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as spent waiting for data."""
        start = time.perf_counter()
        yield
        self._clock.wait_s += time.perf_counter() - start

    @property
    def num_unreadable(self) -> int:
        """Samples replaced on all ranks since step 0, as of the last interval."""
        return self._unreadable.num_replaced

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Leave the time of the block, which trains nothing, out of the rates."""
        # The training before it counts until the device has done it.
        self._wait_for_device()
        start = time.perf_counter()
        yield
        self._clock.start += time.perf_counter() - start

    def _wait_for_device(self) -> None:
        if self.engine.world.device.type == "cuda":
            torch.cuda.synchronize(self.engine.world.device)

    def advance(self) -> None:
        """After every step: the clock of the first interval, and the profiler."""
        if self._first is None:
            self._wait_for_device()
            self._first = self._clock
            self._clock = _Clock()
        self.profile()

    def write(self, step: int, *, lr: float) -> None:
        """Log the interval that ends with `step`. Collective.

        Raises UserError when training has diverged or the data is too damaged.
        """
        engine = self.engine
        # First the means: they wait for the device, so the time is measured correctly.
        metrics = self.means.read() | self._speed()
        metrics |= {"train/lr": lr, "train/grad_norm": engine.gradient_norm()}
        health = engine.health()
        metrics["train/skipped_steps"] = float(health.skipped)
        metrics["vitals/memory_gib"] = peak_memory_gib(engine.world.device)
        if (scale := engine.loss_scale) is not None:
            metrics["train/loss_scale"] = scale
        speed = metrics["vitals/images_per_s"]
        wait = metrics["vitals/data_wait"]
        if self._peak_flops is not None:
            flops = self.flops_per_image * speed / engine.world.world_size
            metrics["vitals/mfu"] = flops / self._peak_flops

        seen = step * self.plan.global_batch
        epoch = self.plan.num_samples
        self._unreadable.report(step, num_seen=seen, num_samples=epoch)
        if self.num_unreadable:
            metrics["vitals/unreadable"] = float(self.num_unreadable)

        self.tracker.log(metrics, step=step)
        steps = self.plan.total_steps
        loss = metrics["train/loss"]
        eta = format_duration(self._seconds_left(step))
        self.say(
            f"step {step}/{steps} loss {loss:.4f} lr {lr:.1e} img/s {speed:.0f} "
            f"wait {wait:.0%} eta {eta}"
        )
        # In the first steps all images still look alike.
        warning = None
        if step > WARM_SHARE * steps:
            warning = self.warning(metrics)
        if warning is not None and warning != self._last_warning:
            self.say(f"step {step}: {warning}")
        self._last_warning = warning

        # Last, since it may end the run: the line before it shows how far it came.
        self._skipped.update(health, step=step, loss_scale=scale)

    def _seconds_left(self, step: int) -> float:
        """By the mean pace, with evaluations and saves, since the first line of this start."""
        now = time.perf_counter()
        begun, first_step = self._paced_from
        # The time before that line has the start of workers and compilation.
        if first_step == self.start_step:
            self._paced_from = (now, step)
        pace_s = (now - begun) / (step - first_step)
        return pace_s * (self.plan.total_steps - step)

    def _speed(self) -> dict[str, float]:
        clock = self._clock
        if self._first is not None and not clock.num_images:
            # An interval of the first step alone has no other speed.
            clock = self._first
        elapsed = time.perf_counter() - clock.start
        self._clock = _Clock()
        # Every rank adds its images; their times are alike, since steps end together.
        own = torch.tensor([clock.num_images, clock.wait_s], dtype=torch.float64)
        num_images, wait_s = sum_over_ranks(own).tolist()
        return {
            "vitals/images_per_s": num_images / elapsed,
            "vitals/data_wait": wait_s / self.engine.world.world_size / elapsed,
        }
