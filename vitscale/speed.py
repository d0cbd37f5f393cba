"""How fast a loop runs, and the mean loss of an interval.

Owns: interval sums (kept on the device: no synchronisation between log lines) and MFU.
Leaves out: the FLOPs formula (`models.costs`), writing the figures (`tracking`).
"""

from __future__ import annotations

import time

import torch

from vitscale.distributed import gather_objects, sum_over_ranks

# Dense bf16 FLOP/s by NVIDIA's datasheets, by a part of the device name.
PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40": 181e12,
    "V100": 112e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Datasheet rate of the device; None where it is not known (CPUs among them)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_BF16_FLOPS.items() if part in name), None)


class IntervalMeter:
    """Loss, throughput and time spent waiting for data since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._num_losses = 0
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._start, self._wait_s, self._num_images = time.perf_counter(), 0.0, 0

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the mean loss of one micro-batch of this rank, without synchronising."""
        self._loss_sum += loss.detach().to(torch.float64)
        self._num_losses += 1

    def add_images(self, count: int, *, wait_s: float) -> None:
        """`count` images of this rank arrived after waiting `wait_s` for them."""
        self._num_images += count
        self._wait_s += wait_s

    def read(self) -> dict[str, float]:
        """Means over all ranks since the last reading; collective, and starts the next interval."""
        loss = self._loss_sum.item()  # waits for the device, so that the clock is honest
        elapsed = time.perf_counter() - self._start
        own = [loss, self._num_losses, self._num_images, self._wait_s]
        loss_sum, num_losses, num_images, wait_s = sum_over_ranks(
            torch.tensor(own, dtype=torch.float64)
        ).tolist()
        ranks = torch.distributed.get_world_size()
        self._loss_sum.zero_()
        self._num_losses = 0
        self._restart_clock()
        return {
            "train/loss": loss_sum / max(1.0, num_losses),
            "perf/images_per_s": num_images / elapsed,
            "perf/data_wait": wait_s / ranks / elapsed,
        }

    def state(self) -> list[list[float]]:
        """[sum, count] of every rank: an interval may have a checkpoint in its middle."""
        return gather_objects([self._loss_sum.item(), self._num_losses])

    def load_state(self, state: list[list[float]], *, rank: int, world_size: int) -> None:
        """Restore sums: each rank its own, or rank 0 all of them on another number of ranks."""
        if len(state) == world_size:
            own = state[rank]
        else:
            sums = [sum(column) for column in zip(*state, strict=True)]
            own = sums if rank == 0 else [0.0, 0]
        self._loss_sum.fill_(own[0])
        self._num_losses = int(own[1])
