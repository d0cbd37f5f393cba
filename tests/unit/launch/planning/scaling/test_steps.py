"""The time of an update, by cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Ranks
from launch.planning.scaling.published import (
    COUNTED_BYTES,
    TABLES,
    VIT_G14,
    Published,
    predicted_bytes,
    predicted_rates,
)
from launch.planning.scaling.steps import StepTime, step_time, traffic, update_bytes

WORK = replace(VIT_G14, micro_batch=4, accumulation=2, bucket_elements=25_000_000)


def timed(nodes: int = 4, *, stage: int = 2, overlap: bool = True, **inputs: float) -> StepTime:
    work = replace(WORK, zero_stage=stage, overlap=overlap)
    return step_time(work, ranks=Ranks(nodes=nodes, per_node=8), cluster=Cluster(**inputs))


def test_overlap_hides_at_most_the_share_of_the_backward_pass() -> None:
    exposed = [timed(overlap=overlap).exposed for overlap in (False, True)]
    backward = 2 / 3 * WORK.flops_per_image * 4 / (989e12 * 0.47)
    # Two micro-batches reduce their gradients, each beside its own backward pass.
    assert exposed[0] - exposed[1] == pytest.approx(2 * 0.8 * backward)
    assert timed(overlap_share=0.0).exposed == exposed[0]


def test_bytes_agree_with_those_counted_on_two_ranks() -> None:
    assert len(COUNTED_BYTES) == 5
    for case, counted in COUNTED_BYTES.items():
        assert predicted_bytes(*case) == counted, case


def test_stage_3_gathers_weights_twice_per_micro_batch() -> None:
    work = replace(WORK, zero_stage=3)
    assert update_bytes(work, world=2) / WORK.parameters == 2 * (1 + 2)


def test_weights_are_gathered_in_one_message_but_at_stage_3() -> None:
    """DeepSpeed's allgather_bucket_size has no effect with all_gather_into_tensor."""
    for stage, num_messages in ((1, 1), (2, 1), (3, 41)):
        gathers = [
            -(-each.num_bytes // each.bucket_bytes)
            for each in traffic(replace(WORK, zero_stage=stage))
            if each.kind == "all_gather"
        ]
        assert gathers == [num_messages]


def test_the_last_layer_gets_its_remainders() -> None:
    for size, expected in ((2, 2 * 1000), (4, 0)):
        plain = replace(WORK, weight_bytes=size)
        head = replace(plain, head_parameters=1000)
        assert update_bytes(head, world=2) - update_bytes(plain, world=2) == expected


def test_the_slowest_of_more_ranks_is_later() -> None:
    few, many = timed(1), timed(128)
    assert many.compute == few.compute
    assert many.stragglers / few.stragglers == pytest.approx(1.826, abs=1e-3)  # sqrt(ln 1024/ln 8)
    assert timed(straggler_sigma=0.0).stragglers == 0


def test_slow_data_decides_the_step() -> None:
    step = timed(file_system_read_gb_s=0.01)
    images = WORK.images_per_rank * 32
    assert step.total == step.data == pytest.approx(images * 92e3 / 0.01e9)
    assert timed().total == timed().gpu


@pytest.mark.parametrize("published", TABLES, ids=lambda each: each.name)
def test_published_scaling_is_met_within_five_percent(published: Published) -> None:
    for nodes, rate in published.rates.items():
        for predicted in predicted_rates(published, nodes=nodes, cluster=Cluster()):
            assert predicted == pytest.approx(rate, rel=0.05)
