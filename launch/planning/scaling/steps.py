"""Predict the time of one update on many GPUs.

Owns: compute, gradient traffic of each ZeRO stage, stragglers, optimiser, data.
Leaves out: start, checkpoints and failures (`recovery`). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Kind, Ranks, collective_seconds, wire_bytes

# Weights, gradient and both moments read, weights and moments written, fp32, and a bf16 copy.
OPTIMIZER_BYTES_PER_PARAMETER = 28
BACKWARD_SHARE = 2 / 3
# DeepSpeed's buckets where `reduce_bucket_size` has no effect (runtime/engine.py).
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
REMAINDER_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a run computes in one update."""

    parameters: int
    flops_per_image: float
    """Forward and backward."""
    micro_batch: int
    accumulation: int
    zero_stage: int
    weight_bytes: int
    """Of a parameter in the forward pass: 2 or 4."""
    gradient_bytes: int
    """Of a gradient when it is sent."""
    bucket_elements: int
    overlap: bool
    head_parameters: int
    """Of the last layer, which computes in fp32."""
    cores_per_node: int
    state_bytes: int
    """Of a checkpoint."""

    @property
    def images_per_rank(self) -> int:
        return self.micro_batch * self.accumulation


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """One kind of collective of an update."""

    kind: Kind
    num_bytes: int
    """Of the tensor, over all buckets of one occurrence."""
    bucket_bytes: int
    is_hidden: bool
    """Whether it runs beside the backward pass."""
    times: int = 1
    """Occurrences in an update."""


def traffic(work: Work) -> Iterator[Traffic]:
    """The collectives of one update, as DeepSpeed's wrappers run them (0.19.8, runtime/zero).

    Stage 0 all-reduces fp32 gradients after the backward pass. Stages 1 and 2 all-reduce them in
    buckets beside it, stage 2 in every micro-batch, and gather the updated weights in one piece
    (all_gather_into_tensor_dp_groups). Stage 3 scatters the sums, and gathers weights for the
    forward and for the backward pass. Below fp32 every rank also gets what rounding took from the
    last layer.
    """
    count, bucket = work.parameters, work.bucket_elements
    if work.zero_stage == 0:
        yield Traffic(
            kind="all_reduce",
            num_bytes=4 * count,
            bucket_bytes=4 * DEEPSPEED_BUCKET_ELEMENTS,
            is_hidden=False,
        )
        return
    yield Traffic(
        kind="reduce_scatter" if work.zero_stage == 3 else "all_reduce",
        num_bytes=work.gradient_bytes * count,
        bucket_bytes=work.gradient_bytes * bucket,
        is_hidden=work.overlap,
        times=1 if work.zero_stage == 1 else work.accumulation,
    )
    yield Traffic(
        kind="all_gather",
        num_bytes=work.weight_bytes * count,
        bucket_bytes=work.weight_bytes * (bucket if work.zero_stage == 3 else count),
        is_hidden=work.zero_stage == 3,
        times=2 * work.accumulation if work.zero_stage == 3 else 1,
    )
    if work.weight_bytes < 4 and work.head_parameters:
        remainders = REMAINDER_BYTES * work.head_parameters
        yield Traffic(
            kind="all_reduce", num_bytes=remainders, bucket_bytes=remainders, is_hidden=False
        )


def update_bytes(work: Work, *, world: int) -> float:
    """Bytes that each rank sends for one update."""
    return sum(
        each.times * wire_bytes(each.kind, each.num_bytes, world=world) for each in traffic(work)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one update, by cause."""

    compute: float
    exposed: float
    """Communication that nothing hides."""
    stragglers: float
    optimizer: float
    data: float
    """What the loader takes for the same images; counts where it is the longest."""

    @property
    def gpu(self) -> float:
        return self.compute + self.exposed + self.stragglers + self.optimizer

    @property
    def total(self) -> float:
        return max(self.gpu, self.data)


def step_time(work: Work, *, ranks: Ranks, cluster: Cluster) -> StepTime:
    """Predict one update of all ranks.

    The slowest of P ranks with normally distributed times is about sqrt(2 ln P) standard deviations
    behind the mean (extreme value theory).
    """
    products = work.flops_per_image * work.micro_batch / (cluster.gpu_tflops * 1e12 * cluster.mfu)
    compute = work.accumulation * (products + cluster.micro_batch_overhead_ms / 1e3)
    window = BACKWARD_SHARE * products * cluster.overlap_share
    exposed = sum(_exposed(each, window, ranks, cluster) for each in traffic(work))
    sharded = ranks.world if work.zero_stage else 1
    memory_bytes = OPTIMIZER_BYTES_PER_PARAMETER * work.parameters / sharded
    late = cluster.straggler_sigma * math.sqrt(2 * math.log(ranks.world))
    return StepTime(
        compute=compute,
        exposed=exposed,
        stragglers=compute * late,
        optimizer=memory_bytes / (cluster.memory_gb_s * 1e9),
        data=work.images_per_rank * ranks.world / images_from_disk(work, ranks, cluster),
    )


def _exposed(each: Traffic, window: float, ranks: Ranks, cluster: Cluster) -> float:
    """Seconds of all occurrences in an update. Hidden traffic has `window` seconds each time."""
    num_buckets = math.ceil(each.num_bytes / each.bucket_bytes)
    bucket = each.num_bytes / num_buckets
    seconds = num_buckets * collective_seconds(each.kind, bucket, ranks=ranks, cluster=cluster)
    return each.times * max(0.0, seconds - (window if each.is_hidden else 0.0))


def images_from_disk(work: Work, ranks: Ranks, cluster: Cluster) -> float:
    """Images per second that cores and file system can give to all ranks."""
    cores = ranks.nodes * work.cores_per_node * cluster.loader_images_per_core_s
    gb_s = min(cluster.file_system_read_gb_s, ranks.nodes * cluster.node_read_gb_s)
    return min(cores, gb_s * 1e6 / cluster.image_kb)
