"""Measure means over ranks and memory, and trace steps.

Leaves out: the FLOPs formula (`models.costs`), throughput and writing metrics (`interval_log`).
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from vitscale.distributed.world import sum_over_ranks

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
def profiled(
    path: Path | None, *, steps: int, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Trace `steps` steps after the first ones into `path`, for chrome://tracing or Perfetto.

    Yields a function to call at the end of every step. With path None or 0 steps it does nothing.
    Reports when the run had too few steps for a trace.
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
    if profile.step_num < PROFILE_SKIPPED + steps:
        needed = f"{steps} steps after the first {PROFILE_SKIPPED}"
        say(f"no complete trace of {needed}: the run made {profile.step_num} steps")


class IntervalMeans:
    """Means of values of micro-batches since the last reading, by name.

    Sums stay on the device: nothing synchronises between readings.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        # [sum, count] of the values that are finite
        self._sums_N2 = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar of one micro-batch of this rank.

        A value that is not finite is skipped: so is the update of a loss that is not.
        """
        value = value.detach().to(torch.float64)
        finite = torch.isfinite(value)
        own = torch.stack([torch.where(finite, value, 0.0), finite.to(torch.float64)])
        self._sums_N2[self._rows[name]] += own

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last call, NaN where no value was finite. Collective."""
        sums = sum_over_ranks(self._sums_N2.cpu()).tolist()
        self._sums_N2.zero_()
        return {
            name: sums[row][0] / sums[row][1] if sums[row][1] else math.nan
            for name, row in self._rows.items()
        }
