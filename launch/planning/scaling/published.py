"""Compare the model with published throughput of other code, and with bytes counted here.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Ranks
from launch.planning.scaling.steps import Work, step_time, update_bytes

GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Images per second of one training on several numbers of nodes."""

    name: str
    rates: Mapping[int, float]
    """Nodes -> images/s."""
    hardware: Mapping[str, Any]
    """Inputs that differ from the defaults."""


# NVIDIA NeMo user guide (2024), Vision Transformer, training performance of ViT-g/14.
TABLES = (
    Published(
        name="NeMo ViT-g/14, DGX A100",
        rates={1: 693, 16: 10_644},
        hardware={"gpu_tflops": 312.0, "nic_gbit_s": 200.0, "nvlink_gb_s": 230.0},
    ),
    Published(name="NeMo ViT-g/14, DGX H100", rates={1: 1428, 16: 21_561}, hardware={}),
)
# Same guide: 1,011 M parameters, 64 images per GPU, distributed optimiser: fp32 gradients are
# reduced and scattered, bf16 weights gathered, 6 bytes per parameter, as an all-reduce and a
# gathering in bf16. FLOPs: `vitscale.models.costs`.
VIT_G14 = Work(
    parameters=1_011_000_000,
    flops_per_image=1.602e12,
    micro_batch=64,
    accumulation=1,
    zero_stage=2,
    weight_bytes=2,
    gradient_bytes=2,
    bucket_elements=500_000_000,
    overlap=False,
    head_parameters=0,
    cores_per_node=128,
    state_bytes=0,
)

# (ZeRO stage, micro-batches, bytes of a gradient sent) -> bytes per parameter that each of two
# gloo ranks sends for an update, counted on their sockets: docs/benchmarks.md, gradients in bf16.
COUNTED_BYTES = {(0, 1, 4): 4.0, (1, 1, 2): 3.0, (1, 8, 4): 5.0, (2, 1, 2): 3.0, (2, 4, 2): 9.0}


def predicted_bytes(stage: int, accumulation: int, gradient_bytes: int) -> float:
    """Bytes per parameter that each of two ranks sends for an update, without a last layer."""
    work = replace(
        VIT_G14, zero_stage=stage, accumulation=accumulation, gradient_bytes=gradient_bytes
    )
    return update_bytes(work, world=2) / work.parameters


def predicted_rates(published: Published, *, nodes: int, cluster: Cluster) -> tuple[float, float]:
    """(nothing hidden, gradient traffic hidden) images/s, with the MFU that the first row shows.

    Data is not limited: the guide does not say what the images were read from.
    """
    cluster = cluster.model_copy(update=dict(published.hardware))
    low, high = (
        _rate(replace(VIT_G14, overlap=hidden), published, nodes, cluster)
        for hidden in (False, True)
    )
    return low, high


def _rate(work: Work, published: Published, nodes: int, cluster: Cluster) -> float:
    first, rate = next(iter(published.rates.items()))
    smallest, largest = 0.01, 1.0
    for _ in range(50):
        mfu = (smallest + largest) / 2
        calibrated = cluster.model_copy(update={"mfu": mfu})
        if _images_per_s(work, first, calibrated) < rate:
            smallest = mfu
        else:
            largest = mfu
    return _images_per_s(work, nodes, calibrated)


def _images_per_s(work: Work, nodes: int, cluster: Cluster) -> float:
    ranks = Ranks(nodes=nodes, per_node=GPUS_PER_NODE)
    step = step_time(work, ranks=ranks, cluster=cluster)
    return work.images_per_rank * ranks.world / step.gpu
