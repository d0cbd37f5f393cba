"""Sum gradients over micro-batches and ranks, clip them, and skip updates that are not finite.

All ranks decide alike without communication: a loss that is not finite makes its gradients NaN,
gradients are summed over the ranks before their norm is taken, and the norm is the same everywhere.
Everything stays on the device; only `health` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Stands for the number of a step or micro-step where there was none.
NEVER = -1


@dataclass(eq=False)
class _Bucket:
    """Neighbouring gradients of one group that are sent together."""

    start: int
    stop: int
    parameters: list[torch.Tensor] = field(default_factory=list)
    num_arrived: int = 0
    """Gradients that autograd has added in this backward pass."""
    sent: torch.Tensor | None = None
    work: Any = None


class GradientSums:
    """The gradients of some parameters, each a view of one flat tensor that autograd adds to.

    Micro-batches are added up in fp32. On several ranks each bucket is sent during the backward
    pass of the last micro-batch; in the end all ranks have the mean. Every method is collective.

    All ranks send the buckets in one order, the one in which a backward pass completes them. So a
    rank whose loss leaves out some parameters, whose gradient is zero there, changes no others.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        starts: Sequence[int],
        size: int,
        forward_order: Iterable[torch.Tensor],
        bucket_elements: int,
        sent_as: torch.dtype,
        is_last: Callable[[], bool],
    ) -> None:
        """groups: parameters of one dtype; those of a group lie one after another from its start.

        starts: number of the first value of each group among `size`. forward_order: the parameters
        as the forward pass uses them. bucket_elements: most values that are sent together, but for
        a larger parameter. sent_as: dtype in which ranks add. is_last: whether the micro-batch is
        the last of its update.
        """
        self._num_ranks = dist.get_world_size()
        self._sent_as = sent_as
        self._is_last = is_last

        # Autograd adds in the dtype of the parameters, so the micro-batches of a model in half
        # precision are added up elsewhere.
        some = groups[0][0]
        self._added = torch.zeros(size, dtype=some.dtype, device=some.device)
        self.values = self._added.float()
        self._has_copy = self.values is not self._added

        # A bucket ends with its group: the biases of all layers, a group of their own, are complete
        # at the end of the backward pass only, and nothing else shall wait for them.
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buckets: list[_Bucket] = []
        self._hooks: list[Any] = []
        for group, start in zip(groups, starts, strict=True):
            self._buckets.append(_Bucket(start, start))
            for parameter in group:
                self._add(parameter, bucket_elements)

        # A backward pass goes from the last parameters of the forward pass to the first, and a
        # bucket is complete with the first of its parameters.
        number = {parameter: n for n, parameter in enumerate(forward_order)}
        self._buckets.sort(
            key=lambda bucket: -min(number[p] for p in bucket.parameters)
        )
        self._num_sent = 0
        self.clear()

    def _add(self, parameter: torch.Tensor, bucket_elements: int) -> None:
        """Put a parameter after the last one."""
        bucket = self._buckets[-1]
        start = bucket.stop
        stop = start + parameter.numel()
        if stop - bucket.start > bucket_elements and bucket.parameters:
            bucket = _Bucket(start, stop)
            self._buckets.append(bucket)
        bucket.stop = stop
        bucket.parameters.append(parameter)

        view = self._added.narrow(0, start, parameter.numel()).view(parameter.shape)
        self._views.append((parameter, view))
        if self._num_ranks > 1:
            arrived = partial(self._arrived, bucket)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def _arrived(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        bucket.num_arrived += 1
        if self._is_last():
            # Each arrival may complete the bucket that the others wait behind.
            self._send(only_full=True)

    def _send(self, *, only_full: bool) -> None:
        """Send the next buckets in their order: up to the first that is not full, or all."""
        while self._num_sent < len(self._buckets):
            bucket = self._buckets[self._num_sent]
            is_full = bucket.num_arrived == len(bucket.parameters)
            if only_full and not is_full:
                return

            values = self.values[bucket.start : bucket.stop]
            if self._has_copy:
                values.add_(self._added[bucket.start : bucket.stop])
            # Divided before it is sent: the sum of many ranks could overflow in fp16.
            bucket.sent = values.div_(self._num_ranks).to(self._sent_as)
            # The sum runs beside the rest of the backward pass; `_receive` waits for it.
            bucket.work = dist.all_reduce(bucket.sent, async_op=True)
            self._num_sent += 1

    def finish(self) -> None:
        """End a backward pass; after the last one of an update `values` are the gradients."""
        if self._num_ranks > 1 and self._is_last():
            # Where the loss left out a parameter, no gradient of it arrived.
            self._send(only_full=False)
            for bucket in self._buckets:
                self._receive(bucket)
        elif self._has_copy:
            # Micro-batches add up in fp32, so each one leaves half precision at once.
            self.values.add_(self._added)
            self._added.zero_()

        for bucket in self._buckets:
            bucket.num_arrived = 0

    def _receive(self, bucket: _Bucket) -> None:
        """Wait for the mean of a bucket that was sent."""
        assert bucket.sent is not None
        bucket.work.wait()
        # In fp32 the sum was computed in place.
        if bucket.sent.dtype != self.values.dtype:
            self.values[bucket.start : bucket.stop].copy_(bucket.sent)
        bucket.sent = None
        bucket.work = None

    def clear(self) -> None:
        """Begin a new update."""
        self._num_sent = 0
        self._added.zero_()
        if self._has_copy:
            self.values.zero_()
        # DeepSpeed sets gradients to None after an update; autograd would then allocate new ones.
        for parameter, view in self._views:
            parameter.grad = view

    def close(self) -> None:
        """Watch the parameters no more, so that another engine can train them."""
        for hook in self._hooks:
            hook.remove()


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Counts of skipped updates."""

    skipped: int
    """Updates skipped since the first step of the run."""
    longest: int
    """Most updates skipped in a row, of the rows that grew since the last call."""
    last_step: int | None
    """The last skipped step (the first step of a run is 1); None if none was skipped."""
    bad_micro_step: int | None
    """The last micro-step of this rank in that step whose own loss was not finite."""


class UpdateGuard:
    """Replaces `optimizer.step`, of a fused optimiser."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        norm: Callable[[], Any],
        accumulation: int,
        device: torch.device,
    ) -> None:
        """norm: the global norm of the unclipped gradients, whenever the optimiser steps.

        accumulation: micro-steps of a step.
        """
        message = "an optimiser that is not fused neither clips nor skips"
        assert optimizer.defaults.get("fused"), message
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._norm = norm
        self._accumulation = accumulation
        self._device = device
        self._steps = 0
        self._micro_steps = 0

        # [skipped, skipped in a row, last skipped step, micro-step of this rank's last bad loss,
        # longest row since the last `health`]
        self._counts = torch.tensor(
            [0, 0, NEVER, NEVER, 0], dtype=torch.int64, device=device
        )

        self._update = optimizer.step
        optimizer.step = self._step  # type: ignore[method-assign,assignment]  # replaced

    def checked(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the next micro-step; one that is not finite is made to give gradients that
        are not."""
        finite = torch.isfinite(loss.detach())
        self._counts[3] = torch.where(finite, self._counts[3], self._micro_steps)
        self._micro_steps += 1
        # An infinite cross-entropy has finite gradients. Times 1 changes no bit.
        return loss * torch.where(finite, 1.0, torch.nan)

    def _read_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm, and whether it is bad: not finite, or DeepSpeed's -1 for such a norm."""
        norm = torch.as_tensor(self._norm()).to(self._device, torch.float32)
        return norm, ~torch.isfinite(norm) | (norm < 0)

    def _step(self, closure: Any = None) -> None:
        assert closure is None
        has_gradients = any(
            parameter.grad is not None
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        )
        if not has_gradients:
            return
        norm, bad = self._read_norm()

        # As torch.nn.utils.clip_grad_norm_ does: the small term keeps a zero norm from dividing.
        shrink = torch.ones_like(norm)
        if self._clip_norm is not None:
            shrink = ((norm + 1e-6) / self._clip_norm).clamp(min=1.0)

        # Fused kernels divide by the one and do nothing where the other is 1, step counts
        # included: the interface that torch made for loss scalers.
        self._optimizer.grad_scale = torch.where(bad, 1.0, shrink)  # type: ignore[attr-defined]  # see above
        self._optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # see above
        self._update()

    def finish(self) -> None:
        """Count the update, applied or skipped."""
        self._steps += 1
        # DeepSpeed may have skipped the update itself, without a call of `_step`.
        _, bad = self._read_norm()
        counts = self._counts
        counts[0] += bad
        counts[1] = torch.where(bad, counts[1] + 1, 0)
        counts[2] = torch.where(bad, self._steps, counts[2])
        counts[4] = torch.maximum(counts[4], counts[1])

    def health(self) -> Health:
        """Read the counts and begin a new longest row; waits for the device."""
        skipped, _, last, micro, longest = self._counts.tolist()
        self._counts[4] = 0
        last_step = None
        bad_micro_step = None
        if last != NEVER:
            last_step = last
            # The loss that was not finite may have been another rank's.
            number = micro - (last - 1) * self._accumulation
            if 0 <= number < self._accumulation:
                bad_micro_step = number
        return Health(
            skipped=skipped,
            longest=longest,
            last_step=last_step,
            bad_micro_step=bad_micro_step,
        )

    def state(self) -> dict[str, int]:
        """What the next step depends on; the same on every rank."""
        skipped, consecutive, last, *_ = self._counts.tolist()
        return {
            "steps": self._steps,
            "skipped": skipped,
            "consecutive": consecutive,
            "last_skipped_step": last,
        }

    def load_state(self, state: dict[str, int]) -> None:
        self._steps = state["steps"]
        # Micro-steps start over with the step, since a run resumes between steps.
        self._micro_steps = self._steps * self._accumulation
        values = [state["skipped"], state["consecutive"], state["last_skipped_step"]]
        self._counts.copy_(torch.tensor([*values, NEVER, 0]))
