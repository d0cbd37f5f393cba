"""Jobs compared with the limits of their partitions."""

from __future__ import annotations

import pytest

from launch.planning.partitions import limit_problems, read_partitions
from vitscale.runs.launching import LaunchSettings

# As SLURM 22.05 answers, without fields that nothing reads.
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL Default=YES DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=01:00:00 \
MaxCPUsPerNode=UNLIMITED Nodes=c[1-4] State=UP MaxMemPerNode=UNLIMITED
PartitionName=gpu Default=NO MaxNodes=2 MaxTime=7-12:30:00 MaxCPUsPerNode=32 MaxMemPerNode=1024000
PartitionName=endless Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MaxCPUsPerNode=UNLIMITED
"""
NODES = """\
cpu|c1|64|257000|(null)
cpu|c2|64|257000|(null)
cpu|c3|8|64000|(null)
gpu|g1|128|2000000|gpu:h200:8(S:0-1),nvme:1
gpu|g2|128|2000000|gpu:h200:8(S:0-1)
gpu|g3|128|2000000|gpu:a100:2,gpu:a30:2
endless|c1|64|257000|(null)
"""
GPU_NODE = {"gpus_per_node": 8, "tasks_per_node": 8, "cpus_per_task": 4}


def problems(
    names: str | None, *, answers: tuple[str, str] = (PARTITIONS, NODES), **fields: object
) -> dict[str, str]:
    """Setting -> what is allowed."""
    found = limit_problems(
        LaunchSettings.model_validate(fields),
        partitions_text=answers[0], nodes_text=answers[1], names=names,
    )  # fmt: skip
    return {str(each.where).removeprefix("launch."): str(each.allowed) for each in found}


@pytest.mark.parametrize(
    ("names", "fields", "expected"),
    [
        (None, {"timeout_min": 60}, {}),
        (None, {"timeout_min": 61}, {"timeout_min": "at most 60 minutes in cpu"}),
        ("gpu", {"timeout_min": 10830}, {}),
        ("gpu", {"timeout_min": 10831}, {"timeout_min": "at most 10830 minutes in gpu"}),
        ("endless", {"timeout_min": 10**6}, {}),
        ("gpu", {"nodes": 3}, {"nodes": "at most 2 node(s) in gpu"}),
        ("endless", {"nodes": 2}, {"nodes": "at most 1 node(s) of this size in endless"}),
        # Two of the three nodes have 64 cores.
        (None, {"nodes": 2, "cpus_per_task": 64, "timeout_min": 9}, {}),
        (
            None,
            {"nodes": 3, "cpus_per_task": 64, "timeout_min": 9},
            {"nodes": "at most 2 node(s) of this size in cpu"},
        ),
        (
            "endless",
            {"tasks_per_node": 3, "cpus_per_task": 22},
            {"cpus_per_task": "at most 21 cores per task in endless"},
        ),
        ("endless", {"tasks_per_node": 65}, {"tasks_per_node": "at most 64 tasks in endless"}),
        # The partition's limit is below its nodes'.
        ("gpu", {"cpus_per_task": 33}, {"cpus_per_task": "at most 32 cores per task in gpu"}),
        ("gpu", {"mem_gb": 1000}, {}),
        ("gpu", {"mem_gb": 1001}, {"mem_gb": "at most 1000 GB per node in gpu"}),
        ("endless", {"mem_gb": 251}, {"mem_gb": "at most 250 GB per node in endless"}),
        ("gpu", GPU_NODE, {}),
        ("gpu", {**GPU_NODE, "gpu_type": "h200", "nodes": 2}, {}),
        (
            "gpu",
            {"gpus_per_node": 4, "gpu_type": "a100"},
            {"gpus_per_node": "at most 2 a100 GPUs per node in gpu"},
        ),
        ("endless", {"gpus_per_node": 8, "gpu_request": "none"}, {}),
    ],
)
def test_what_exceeds_a_limit_names_it(
    names: str | None, fields: dict[str, object], expected: dict[str, str]
) -> None:
    assert problems(names, **fields) == expected


def test_several_settings_are_reported_together() -> None:
    found = problems(None, timeout_min=61, cpus_per_task=65, mem_gb=900, gpus_per_node=1)
    assert list(found) == ["timeout_min", "cpus_per_task", "mem_gb", "gpus_per_node"]


def test_a_job_fits_if_one_partition_fits() -> None:
    assert problems("cpu,endless", timeout_min=61) == {}
    # No partition has both.
    found = problems("cpu,gpu", timeout_min=61, cpus_per_task=64)
    assert found == {
        "timeout_min": "at most 60 minutes in cpu",
        "cpus_per_task": "at most 32 cores per task in gpu",
    }


def test_a_quality_of_service_can_lift_time_and_nodes() -> None:
    assert problems("gpu", timeout_min=20_000, nodes=3, qos="long") == {}


@pytest.mark.parametrize(
    "answers",
    [
        ("", ""),
        ("No partitions in the system\n", NODES),
        ("PartitionName=cpu Default=YES MaxTime=soon MaxNodes=few MaxMemPerNode=0", "cpu|c1|4+"),
        ("PartitionName=cpu", "cpu|c1|many|much|gpu:some"),
    ],
)
def test_unknown_answers_refuse_nothing(answers: tuple[str, str]) -> None:
    for names in (None, "cpu", "nowhere"):
        assert problems(names, answers=answers, timeout_min=10**6, cpus_per_task=999) == {}


def test_another_cluster_is_not_compared_with_this_one() -> None:
    assert problems(None, timeout_min=61, sbatch={"clusters": "other"}) == {}


def test_gpus_are_counted_by_type() -> None:
    gpu = next(each for each in read_partitions(PARTITIONS, NODES) if each.name == "gpu")
    assert [node.num_gpus for node in gpu.nodes] == [
        {"h200": 8}, {"h200": 8}, {"a100": 2, "a30": 2},
    ]  # fmt: skip
    assert gpu.nodes[2].gpus_of(None) == 4
