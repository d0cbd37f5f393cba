"""Sum gradients over micro-batches and ranks in one flat tensor, while the backward pass runs.

Leaves out: the norm and the update (`layouts`, `guard`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


@dataclass(eq=False)
class _Bucket:
    """Neighbouring gradients that are sent together."""

    start: int
    stop: int
    parameters: int = 0
    arrived: int = 0
    sent: torch.Tensor | None = None
    work: Any = None


class GradientSums:
    """The gradients of some parameters, each a view of one flat tensor that autograd adds to.

    On several ranks each bucket is sent as soon as the last of its gradients is there; in the end
    all ranks have the mean. Every method is collective.
    """

    def __init__(
        self,
        engine: Any,
        places: Iterable[tuple[torch.Tensor, int]],
        *,
        size: int,
        dtype: torch.dtype = torch.float32,
        sent_as: torch.dtype = torch.float32,
    ) -> None:
        """engine: DeepSpeed's. dtype: of sums over micro-batches.

        places: parameters of one dtype, with the number of their first value among `size`.
        """
        places = sorted(places, key=lambda place: place[1])
        first, self._ranks = places[0][0], dist.get_world_size()
        self._sent_as, self._is_last = sent_as, engine.is_gradient_accumulation_boundary
        self._added = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.values = self._added.to(dtype)  # the same tensor where the dtype is
        bucket_elements = engine.zero_reduce_bucket_size()
        self._views = [
            (each, self._added.narrow(0, start, each.numel()).view(each.shape))
            for each, start in places
        ]
        self._buckets = [_Bucket(0, 0)]
        for parameter, start in places:
            stop = start + parameter.numel()
            if stop - self._buckets[-1].start > bucket_elements and self._buckets[-1].parameters:
                self._buckets.append(_Bucket(start, stop))
            bucket = self._buckets[-1]
            bucket.parameters, bucket.stop = bucket.parameters + 1, stop
            if self._ranks > 1:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
        self.clear()

    def _arrived(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        bucket.arrived += 1
        if bucket.arrived == bucket.parameters and self._is_last():
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        values = self.values[bucket.start : bucket.stop]
        if self.values is not self._added:
            values.add_(self._added[bucket.start : bucket.stop])
        bucket.sent = values.div_(self._ranks).to(self._sent_as)
        bucket.work = dist.all_reduce(bucket.sent, async_op=True)

    def finish(self) -> None:
        """End a backward pass; after the last one of an update `values` are the gradients."""
        is_sent = self._ranks > 1 and self._is_last()
        for bucket in self._buckets if is_sent else ():
            if bucket.sent is None:  # some parameter had no gradient
                self._send(bucket)
        for bucket in self._buckets:
            bucket.arrived = 0
            if bucket.sent is not None:
                bucket.work.wait()
                if bucket.sent.dtype != self.values.dtype:
                    self.values[bucket.start : bucket.stop].copy_(bucket.sent)
                bucket.sent = bucket.work = None
        if self.values is not self._added and not is_sent:
            self.values.add_(self._added)
            self._added.zero_()

    def clear(self) -> None:
        """Begin a new update."""
        self._added.zero_()
        if self.values is not self._added:
            self.values.zero_()
        for parameter, view in self._views:
            parameter.grad = view
